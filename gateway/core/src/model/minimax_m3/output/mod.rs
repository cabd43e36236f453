//! Reads M3's output as it is generated: thinking, answer and tool calls.

mod arguments;
pub(super) mod dialect;
mod element;
mod frame;
mod grammar;
mod lexer;
mod object;

use super::NAMESPACE;
use crate::model::{OutputOptions, ThinkingMode, ToolSchema};
use crate::output::{OutputEvent, OutputParser, Stretch, TextClass};
use arguments::ArgumentWriter;
use dialect::Dialect;
pub(super) use element::ITEM;
use grammar::{Action, State, Symbol, step};
use lexer::{Lexeme, Lexer, MAX_NAME_BYTES, Remainder, Tag};
use std::sync::Arc;

/// How the dialect without marks names every value where it ends.
const VALUE: &str = "parameter";

/// A symbol with what it stands for.
#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    Think(&'static str),
    Tag(Tag),
}

impl Piece {
    fn raw(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Think(tag) => tag.to_owned(),
            Self::Tag(tag) => tag.raw(),
        }
    }

    fn num_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Think(tag) => tag.len(),
            Self::Tag(tag) => tag.num_bytes(),
        }
    }
}

/// Reads M3's output.
pub(super) struct M3Parser {
    dialect: &'static Dialect,
    lexer: Lexer,
    state: State,
    /// Where the text stood that is kept now.
    origin: State,
    kept: String,
    /// Name of the call whose opening is kept.
    kept_name: String,
    call: Option<ArgumentWriter>,
    /// A closing tag in the dialect without marks, and what stands behind it: text of the value if
    /// a further closing tag comes before the next value or the call's end.
    held_close: Option<String>,
    num_calls: usize,
    tools: Arc<[ToolSchema]>,
    account: Vec<Stretch>,
}

impl M3Parser {
    pub(super) fn new(options: &OutputOptions, dialect: &'static Dialect) -> Self {
        let state = match options.thinking {
            ThinkingMode::Enabled => State::ThinkingStart,
            ThinkingMode::Disabled | ThinkingMode::Adaptive => State::Start,
        };
        Self {
            dialect,
            lexer: Lexer::new(dialect),
            state,
            origin: state,
            kept: String::new(),
            kept_name: String::new(),
            call: None,
            held_close: None,
            num_calls: 0,
            tools: options.tools.clone(),
            account: Vec::new(),
        }
    }

    fn lexeme(&mut self, lexeme: Lexeme, events: &mut Vec<OutputEvent>) {
        match lexeme {
            Lexeme::Text(text) => self.text(text, events),
            Lexeme::ThinkOpen => {
                self.read(Symbol::ThinkOpen, Piece::Think(self.dialect.think_open), events);
            }
            Lexeme::ThinkClose => {
                self.read(Symbol::ThinkClose, Piece::Think(self.dialect.think_close), events);
            }
            Lexeme::Tag(tag) => {
                let symbol = self.symbol(&tag);
                self.read(symbol, Piece::Tag(tag), events);
            }
        }
    }

    fn text(&mut self, mut text: String, events: &mut Vec<OutputEvent>) {
        // in most places white space is text like any other
        if step(self.state, Symbol::Blank) == step(self.state, Symbol::Words) {
            return self.read(Symbol::Words, Piece::Text(text), events);
        }
        let num_blank = text.len() - text.trim_ascii_start().len();
        let words = text.split_off(num_blank);
        if !text.is_empty() {
            self.read(Symbol::Blank, Piece::Text(text), events);
        }
        if !words.is_empty() {
            self.read(Symbol::Words, Piece::Text(words), events);
        }
    }

    /// What a tag is here: in a call the schema may have members named like structure.
    fn symbol(&mut self, tag: &Tag) -> Symbol {
        let call = self.call.as_mut();
        match (tag.name.as_str(), tag.is_closing) {
            (name, true) if call.as_ref().is_some_and(|call| call.has_open(name)) => Symbol::Close,
            ("invoke", true) => Symbol::CallClose,
            ("tool_call", true) => Symbol::BlockClose,
            (name @ "tool_call", false) if call.is_some_and(|call| call.expects(name)) => {
                Symbol::Open
            }
            ("tool_call", false) => Symbol::BlockOpen,
            (name, false) if tool_name(name).is_some() => Symbol::CallOpen,
            (_, false) => Symbol::Open,
            (_, true) => Symbol::Close,
        }
    }

    fn read(&mut self, symbol: Symbol, piece: Piece, events: &mut Vec<OutputEvent>) {
        let (action, next) = step(self.state, symbol);
        let before = std::mem::replace(&mut self.state, next);
        match action {
            Action::Think => self.show(TextClass::Reasoning, piece.raw(), events),
            Action::Say => self.show(TextClass::Content, piece.raw(), events),
            Action::Drop => {
                self.drop_kept();
                self.note(TextClass::Markup, piece.num_bytes());
            }
            Action::Keep => self.keep(before, symbol, piece),
            Action::Refuse => {
                self.refuse(events);
                self.read(symbol, piece, events);
            }
            Action::Begin => {
                self.drop_kept();
                self.note(TextClass::Call, piece.num_bytes());
                if let Piece::Tag(tag) = piece {
                    self.begin(tool_name(&tag.name).unwrap_or_default(), events);
                }
            }
            Action::Accept => {
                self.drop_kept();
                let name = std::mem::take(&mut self.kept_name);
                self.begin(&name, events);
                self.read(symbol, piece, events);
            }
            Action::Argue => self.argue(piece, events),
            Action::End => {
                self.note(TextClass::Call, piece.num_bytes());
                self.end(events);
            }
            Action::EndBefore => {
                self.end(events);
                self.read(symbol, piece, events);
            }
        }
    }

    fn keep(&mut self, before: State, symbol: Symbol, piece: Piece) {
        if !matches!(before, State::BlockOpening | State::CallOpening) {
            self.origin = before;
        }
        if let (Symbol::CallOpen, Piece::Tag(tag)) = (symbol, &piece) {
            self.kept_name = tool_name(&tag.name).unwrap_or_default().to_owned();
        }
        self.kept.push_str(&piece.raw());
    }

    fn refuse(&mut self, events: &mut Vec<OutputEvent>) {
        self.state = self.origin.after_text();
        let class = match self.state {
            State::Thinking => TextClass::Reasoning,
            _ => TextClass::Content,
        };
        self.show(class, String::new(), events);
    }

    /// Shows what was kept, and `text`.
    fn show(&mut self, class: TextClass, text: String, events: &mut Vec<OutputEvent>) {
        let text = match std::mem::take(&mut self.kept) {
            kept if kept.is_empty() => text,
            kept => kept + &text,
        };
        self.note(class, text.len());
        match (class, events.last_mut()) {
            _ if text.is_empty() => {}
            (TextClass::Reasoning, Some(OutputEvent::Reasoning(last)))
            | (TextClass::Content, Some(OutputEvent::Content(last))) => last.push_str(&text),
            (TextClass::Reasoning, _) => events.push(OutputEvent::Reasoning(text)),
            _ => events.push(OutputEvent::Content(text)),
        }
    }

    fn drop_kept(&mut self) {
        let num_bytes = self.kept.len();
        self.kept.clear();
        self.note(TextClass::Markup, num_bytes);
    }

    fn note(&mut self, class: TextClass, num_bytes: usize) {
        match self.account.last_mut() {
            _ if num_bytes == 0 => {}
            Some(last) if last.class == class => last.num_bytes += num_bytes,
            _ => self.account.push(Stretch { class, num_bytes }),
        }
    }

    fn begin(&mut self, name: &str, events: &mut Vec<OutputEvent>) {
        let declared = self.tools.iter().find(|tool| tool.name == name);
        let parameters = declared.and_then(|tool| tool.parameters.as_ref());
        self.call = Some(ArgumentWriter::new(parameters));
        events.push(OutputEvent::CallStart { index: self.num_calls, name: name.to_owned() });
        self.num_calls += 1;
        self.send_arguments(events);
    }

    fn argue(&mut self, piece: Piece, events: &mut Vec<OutputEvent>) {
        self.note(TextClass::Call, piece.num_bytes());
        if let Some(call) = &mut self.call {
            match (piece, &mut self.held_close) {
                (Piece::Tag(tag), Some(held)) if tag.is_closing => {
                    call.text(&std::mem::replace(held, tag.raw()));
                }
                (Piece::Tag(tag), Some(_)) => {
                    self.held_close = None;
                    call.close(VALUE);
                    call.open(&tag.name);
                }
                (piece, Some(held)) => held.push_str(&piece.raw()),
                (Piece::Tag(tag), None) if tag.is_closing && tag.name == VALUE => {
                    match self.dialect == &dialect::M2 {
                        true => self.held_close = Some(tag.raw()),
                        false => call.close(&tag.name),
                    }
                }
                (Piece::Text(text), None) => call.text(&text),
                (Piece::Think(tag), None) => call.text(tag),
                (Piece::Tag(tag), None) if tag.is_closing => call.close(&tag.name),
                (Piece::Tag(tag), None) => call.open(&tag.name),
            }
        }
        self.send_arguments(events);
    }

    /// No further closing tag can come.
    fn close_held(&mut self) {
        if let (Some(_), Some(call)) = (self.held_close.take(), &mut self.call) {
            call.close(VALUE);
        }
    }

    fn end(&mut self, events: &mut Vec<OutputEvent>) {
        self.close_held();
        if let Some(call) = &mut self.call {
            call.end();
        }
        self.send_arguments(events);
        self.call = None;
        events.push(OutputEvent::CallEnd { index: self.num_calls.saturating_sub(1) });
    }

    /// Whether a tag that was cut off would have been markup here.
    fn is_structure(&self, cut: &str) -> bool {
        let tag = cut.strip_prefix(NAMESPACE).unwrap_or(cut);
        let may_open = ["<tool_call>", "<invoke "]
            .iter()
            .any(|structure| structure.starts_with(tag) || tag.starts_with(structure));
        may_open || !matches!(self.state.after_text(), State::Thinking | State::Answer)
    }

    fn send_arguments(&mut self, events: &mut Vec<OutputEvent>) {
        let Some(call) = &mut self.call else { return };
        let fragment = call.take_fragment();
        let index = self.num_calls - 1;
        match events.last_mut() {
            _ if fragment.is_empty() => {}
            Some(OutputEvent::CallArguments { index: last_index, fragment: last })
                if *last_index == index =>
            {
                last.push_str(&fragment);
            }
            _ => events.push(OutputEvent::CallArguments { index, fragment }),
        }
    }
}

impl OutputParser for M3Parser {
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        self.lexer.feed(text);
        while let Some(lexeme) = self.lexer.next(self.state.watch()) {
            self.lexeme(lexeme, events);
        }
    }

    fn finish(&mut self, events: &mut Vec<OutputEvent>) {
        match self.lexer.finish() {
            // in a call the beginning of a mark is the end of the output, not of the value
            Some(Remainder::Text(text)) if self.state == State::Call => {
                self.note(TextClass::Call, text.len());
            }
            Some(Remainder::Text(text)) => self.text(text, events),
            Some(Remainder::CutTag(text)) if self.is_structure(&text) => {
                self.drop_kept();
                self.note(TextClass::Markup, text.len());
            }
            Some(Remainder::CutTag(text)) => {
                self.read(Symbol::Words, Piece::Text(text), events);
            }
            None => {}
        }
        self.close_held();
        self.send_arguments(events);
        match self.state {
            // nothing but white space was said
            State::Start => self.show(TextClass::Content, String::new(), events),
            _ => self.drop_kept(),
        }
    }

    fn take_account(&mut self) -> Vec<Stretch> {
        std::mem::take(&mut self.account)
    }

    fn add_account(&mut self, account: &mut Vec<Stretch>) {
        account.append(&mut self.account);
    }
}

/// The tool that an opening tag's inside calls: `invoke name="NAME"`, quoted either way or not.
fn tool_name(inside: &str) -> Option<&str> {
    let rest = inside.strip_prefix("invoke")?;
    if rest.trim_ascii_start().len() == rest.len() {
        return None;
    }
    named(rest)
}

/// The value of the attribute `name`, quoted either way or not.
fn named(attribute: &str) -> Option<&str> {
    let attribute = attribute.trim_ascii_start();
    let value = attribute.strip_prefix("name")?.trim_ascii_start().strip_prefix('=')?.trim_ascii();
    let quoted = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    let name = quoted('"').or_else(|| quoted('\'')).unwrap_or(value);
    (!name.is_empty()).then_some(name)
}

/// Whether a call of a tool of that name is read as one.
pub(super) fn can_be_called(name: &str) -> bool {
    let inside = format!("invoke name=\"{name}\"");
    is_tag(&inside) && tool_name(&inside) == Some(name)
}

/// Whether a member of that name is read as one wherever its schema names it.
pub(super) fn can_be_member(name: &str) -> bool {
    is_tag(name) && !name.starts_with('/') && tool_name(name).is_none() && name != "tool_call"
}

fn is_tag(inside: &str) -> bool {
    !inside.is_empty() && inside.len() + 1 < MAX_NAME_BYTES && !inside.contains(['<', '>', '\n'])
}

#[cfg(test)]
pub(super) mod tests;
