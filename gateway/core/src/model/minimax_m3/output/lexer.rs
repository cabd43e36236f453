//! Cuts M3's output into text, thinking tags and namespaced tags, whatever the chunking.

use super::super::{NAMESPACE, THINK_CLOSE, THINK_OPEN};
use crate::markers::{MarkerSet, Position};

/// One piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lexeme {
    /// Text without a marker.
    Text(String),
    /// `<mm:think>`
    ThinkOpen,
    /// `</mm:think>`
    ThinkClose,
    /// The namespace mark with the tag after it.
    Tag(Tag),
}

/// A namespaced tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// What stands between the brackets, without the slash.
    pub(super) name: String,
    pub(super) is_closing: bool,
}

impl Tag {
    /// The tag as it stood in the output.
    pub(super) fn raw(&self) -> String {
        format!("{NAMESPACE}{}", self.plain())
    }

    /// The tag without its namespace mark.
    pub(super) fn plain(&self) -> String {
        format!("<{}{}>", if self.is_closing { "/" } else { "" }, self.name)
    }

    pub(super) fn num_bytes(&self) -> usize {
        NAMESPACE.len() + self.name.len() + 2 + usize::from(self.is_closing)
    }
}

/// What is left when the output ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Remainder {
    /// The beginning of a marker, which is text after all.
    Text(String),
    /// The namespace mark and the beginning of a tag.
    CutTag(String),
}

/// A longer name is no tag.
pub(super) const MAX_NAME_BYTES: usize = 1024;

const NAMESPACE_PATTERN: usize = 0;
const OPEN_PATTERN: usize = 1;

/// Which markers count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    /// The namespace mark.
    Tags,
    /// The thinking tags as well.
    TagsAndThinking,
}

/// The marker sets, made once.
#[derive(Debug)]
struct Sets {
    tags: MarkerSet,
    all: MarkerSet,
}

impl Sets {
    fn get(&self, watch: Watch) -> &MarkerSet {
        match watch {
            Watch::Tags => &self.tags,
            Watch::TagsAndThinking => &self.all,
        }
    }
}

/// The incremental lexer. Text is given out as soon as it can no longer become a marker.
#[derive(Debug)]
pub(super) struct Lexer {
    sets: Sets,
    buffer: String,
    /// Everything before is given out.
    start: usize,
    /// Everything before is scanned.
    scanned: usize,
    watch: Watch,
    position: Position,
    /// A namespace mark begins at `start`, and what follows may be a tag.
    in_tag: bool,
}

impl Lexer {
    pub(super) fn new() -> Self {
        Self {
            sets: Sets {
                tags: MarkerSet::new(&[NAMESPACE]),
                all: MarkerSet::new(&[NAMESPACE, THINK_OPEN, THINK_CLOSE]),
            },
            buffer: String::new(),
            start: 0,
            scanned: 0,
            watch: Watch::TagsAndThinking,
            position: Position::default(),
            in_tag: false,
        }
    }

    /// Adds output; [`Lexer::next`] is to be called until it gives nothing.
    pub(super) fn feed(&mut self, text: &str) {
        self.buffer.drain(..self.start);
        self.scanned -= self.start;
        self.start = 0;
        self.buffer.push_str(text);
    }

    /// The next piece that is certain under this watch.
    pub(super) fn next(&mut self, watch: Watch) -> Option<Lexeme> {
        if watch != self.watch {
            self.watch = watch;
            // what is held back may be less under the new watch; a tag stays a tag
            if !self.in_tag {
                self.rescan_from(self.start);
            }
        }
        while !self.in_tag {
            let set = self.sets.get(self.watch);
            let Some(found) = set.scan(&mut self.position, &self.buffer[self.scanned..]) else {
                self.scanned = self.buffer.len();
                let certain = self.buffer.len() - set.held(self.position);
                return (certain > self.start).then(|| self.text(certain));
            };
            let end = self.scanned + found.end;
            let begin = end - found.length;
            if begin > self.start {
                self.rescan_from(begin);
                return Some(self.text(begin));
            }
            self.scanned = end;
            if found.pattern != NAMESPACE_PATTERN {
                self.start = end;
                let is_open = found.pattern == OPEN_PATTERN;
                return Some(if is_open { Lexeme::ThinkOpen } else { Lexeme::ThinkClose });
            }
            self.in_tag = true;
        }
        self.tag()
    }

    fn rescan_from(&mut self, at: usize) {
        self.scanned = at;
        self.position = Position::default();
    }

    fn text(&mut self, end: usize) -> Lexeme {
        let text = self.buffer[self.start..end].to_owned();
        self.start = end;
        Lexeme::Text(text)
    }

    /// Reads on in the tag behind the namespace mark at `start`.
    fn tag(&mut self) -> Option<Lexeme> {
        let after_mark = self.start + NAMESPACE.len();
        match self.buffer.as_bytes().get(after_mark) {
            None => return None,
            Some(b'<') => {
                let from = self.scanned.max(after_mark + 1);
                let end = self.buffer[from..].find(['>', '<', '\n']).map(|at| from + at);
                let length = end.unwrap_or(self.buffer.len()) - after_mark;
                match end.map(|end| (end, self.buffer.as_bytes()[end])) {
                    _ if length > MAX_NAME_BYTES => {}
                    None => {
                        self.scanned = self.buffer.len();
                        return None;
                    }
                    // a mark before a tag of thinking is a word of its own
                    Some((end, b'>')) if self.is_thinking(&self.buffer[after_mark..=end]) => {}
                    Some((end, b'>')) => return Some(self.whole_tag(after_mark + 1, end)),
                    Some(_) => {}
                }
            }
            Some(_) => {}
        }
        // no tag: the mark is text, and what follows is looked at afresh
        self.in_tag = false;
        self.rescan_from(after_mark);
        Some(self.text(after_mark))
    }

    fn is_thinking(&self, tag: &str) -> bool {
        self.watch == Watch::TagsAndThinking && (tag == THINK_OPEN || tag == THINK_CLOSE)
    }

    fn whole_tag(&mut self, begin: usize, end: usize) -> Lexeme {
        let inside = &self.buffer[begin..end];
        let (name, is_closing) =
            inside.strip_prefix('/').map_or((inside, false), |name| (name, true));
        let tag = Tag { name: name.to_owned(), is_closing };
        self.start = end + 1;
        self.in_tag = false;
        self.rescan_from(self.start);
        Lexeme::Tag(tag)
    }

    /// The output has ended: what is left.
    pub(super) fn finish(&mut self) -> Option<Remainder> {
        let rest = self.buffer.split_off(self.start);
        self.buffer.clear();
        self.start = 0;
        self.rescan_from(0);
        let was_tag = std::mem::take(&mut self.in_tag);
        match rest {
            rest if rest.is_empty() => None,
            rest if was_tag => Some(Remainder::CutTag(rest)),
            rest => Some(Remainder::Text(rest)),
        }
    }
}
