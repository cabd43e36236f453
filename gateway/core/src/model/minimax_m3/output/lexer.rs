//! Cuts M3's output into text, thinking tags and namespaced tags, whatever the chunking.

use super::super::NAMESPACE;
use super::dialect::{Dialect, TagForm};
use super::named;
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
    /// How it stood in the output, if not behind a mark.
    source: Option<String>,
}

impl Tag {
    /// A tag behind a mark.
    pub(super) fn new(name: &str, is_closing: bool) -> Self {
        Self { name: name.to_owned(), is_closing, source: None }
    }

    /// The tag as it stood in the output.
    pub(super) fn raw(&self) -> String {
        match &self.source {
            Some(source) => source.clone(),
            None => format!("{NAMESPACE}{}", self.plain()),
        }
    }

    /// The tag without its namespace mark.
    pub(super) fn plain(&self) -> String {
        match &self.source {
            Some(source) => source.clone(),
            None => format!("<{}{}>", if self.is_closing { "/" } else { "" }, self.name),
        }
    }

    pub(super) fn num_bytes(&self) -> usize {
        match &self.source {
            Some(source) => source.len(),
            None => NAMESPACE.len() + self.name.len() + 2 + usize::from(self.is_closing),
        }
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

/// Which markers count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    /// The namespace mark.
    Tags,
    /// The thinking tags as well.
    TagsAndThinking,
}

/// The markers of a dialect under each watch.
#[derive(Debug)]
pub(super) struct MarkerSets {
    tags: MarkerSet,
    all: MarkerSet,
}

impl MarkerSets {
    /// Those of this dialect.
    pub(super) fn new(dialect: &Dialect) -> Self {
        let tags: Vec<&str> = dialect.tags.iter().map(|(begin, _)| *begin).collect();
        let all = [tags.as_slice(), &[dialect.think_open, dialect.think_close]].concat();
        Self { tags: MarkerSet::new(&tags), all: MarkerSet::new(&all) }
    }

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
    dialect: &'static Dialect,
    buffer: String,
    /// Everything before is given out.
    start: usize,
    /// Everything before is scanned.
    scanned: usize,
    watch: Watch,
    position: Position,
    /// What begins at `start` may be a tag of this form.
    in_tag: Option<usize>,
}

impl Lexer {
    pub(super) fn new(dialect: &'static Dialect) -> Self {
        Self {
            dialect,
            buffer: String::new(),
            start: 0,
            scanned: 0,
            watch: Watch::TagsAndThinking,
            position: Position::default(),
            in_tag: None,
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
            if self.in_tag.is_none() {
                self.rescan_from(self.start);
            }
        }
        while self.in_tag.is_none() {
            let set = self.dialect.marker_sets.get(self.watch);
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
            let num_tags = self.dialect.tags.len();
            if found.pattern >= num_tags {
                self.start = end;
                let is_open = found.pattern == num_tags;
                return Some(if is_open { Lexeme::ThinkOpen } else { Lexeme::ThinkClose });
            }
            self.in_tag = Some(found.pattern);
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

    /// Reads on in the tag that begins at `start`.
    fn tag(&mut self) -> Option<Lexeme> {
        let (begin, form) = self.dialect.tags[self.in_tag?];
        let after = self.start + begin.len();
        let inside = match (form, self.buffer.as_bytes().get(after)) {
            (TagForm::Whole { name, is_closing }, _) => {
                return Some(self.whole_tag(name.to_owned(), is_closing, after));
            }
            (_, None) => return None,
            (TagForm::Marked, Some(b'<')) => Some(after + 1),
            (TagForm::Marked, Some(_)) => None,
            (TagForm::Open | TagForm::Named, Some(_)) => Some(after),
        };
        if let Some(inside) = inside {
            let from = self.scanned.max(inside);
            let end = self.buffer[from..].find(['>', '<', '\n']).map(|at| from + at);
            let length = end.unwrap_or(self.buffer.len()) - after;
            match end.map(|end| (end, self.buffer.as_bytes()[end])) {
                _ if length > MAX_NAME_BYTES => {}
                None => {
                    self.scanned = self.buffer.len();
                    return None;
                }
                Some((end, b'>')) => {
                    if let Some((name, is_closing)) = self.name_of(form, after, end) {
                        return Some(self.whole_tag(name, is_closing, end + 1));
                    }
                }
                Some(_) => {}
            }
        }
        // no tag: its beginning is text, and what follows is looked at afresh
        self.in_tag = None;
        self.rescan_from(after);
        Some(self.text(after))
    }

    /// The name of the tag whose last bracket stands at `end`, and whether it closes; `None` if it
    /// is no tag after all.
    fn name_of(&self, form: TagForm, after: usize, end: usize) -> Option<(String, bool)> {
        match form {
            // a mark before a tag of thinking is a word of its own
            TagForm::Marked if self.is_thinking(&self.buffer[after..=end]) => None,
            TagForm::Marked => {
                let inside = &self.buffer[after + 1..end];
                let closing = inside.strip_prefix('/');
                Some((closing.unwrap_or(inside).to_owned(), closing.is_some()))
            }
            TagForm::Open => Some((self.buffer[self.start + 1..end].to_owned(), false)),
            TagForm::Named => Some((named(&self.buffer[after..end])?.to_owned(), false)),
            TagForm::Whole { .. } => None,
        }
    }

    fn is_thinking(&self, tag: &str) -> bool {
        let Dialect { think_open, think_close, .. } = self.dialect;
        self.watch == Watch::TagsAndThinking && (tag == *think_open || tag == *think_close)
    }

    fn whole_tag(&mut self, name: String, is_closing: bool, end: usize) -> Lexeme {
        let is_marked = self.buffer[self.start..end].starts_with(NAMESPACE);
        let source = (!is_marked).then(|| self.buffer[self.start..end].to_owned());
        self.start = end;
        self.in_tag = None;
        self.rescan_from(end);
        Lexeme::Tag(Tag { name, is_closing, source })
    }

    /// The output has ended: what is left.
    pub(super) fn finish(&mut self) -> Option<Remainder> {
        let rest = self.buffer.split_off(self.start);
        self.buffer.clear();
        self.start = 0;
        self.rescan_from(0);
        let was_tag = self.in_tag.take().is_some();
        match rest {
            rest if rest.is_empty() => None,
            rest if was_tag => Some(Remainder::CutTag(rest)),
            rest => Some(Remainder::Text(rest)),
        }
    }
}
