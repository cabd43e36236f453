//! An object of a call's arguments, written member by member.

use super::element::{Element, List, TEXT_MEMBER, is_blank, write_key, write_leaf, write_run};
use crate::json::write_string;
use crate::schema::{Schema, View};
use std::collections::HashSet;

/// What is written of an object, and what waits.
#[derive(Debug, Default)]
pub(super) struct ObjectState {
    is_open: bool,
    num_written: usize,
    /// Names of all members, written or waiting.
    seen: HashSet<String>,
    /// The last member, if it may go on.
    waiting: Option<Waiting>,
    /// Text since the last tag.
    text: String,
    /// Text that belongs to no member.
    stray: String,
}

/// A member that ends only when another begins, or the object ends.
#[derive(Debug)]
pub(super) enum Waiting {
    /// A list, written up to its last item so far.
    List { name: String, view: View, list: List },
    /// Elements of a name that the schema allows to be repeated; nothing of them is written.
    Elements { name: String, view: View, elements: Vec<Element> },
}

impl Waiting {
    fn name(&self) -> &str {
        match self {
            Self::List { name, .. } | Self::Elements { name, .. } => name,
        }
    }

    fn write(self, object: &mut ObjectState, schema: &mut Schema, out: &mut String) {
        match self {
            Self::List { mut list, .. } => list.close(out),
            Self::Elements { name, view, elements } => {
                object.write_key(&name, out);
                write_run(&elements, schema, view, out);
            }
        }
    }
}

impl ObjectState {
    /// The object of a call, whose bracket is out.
    pub(super) fn opened() -> Self {
        Self { is_open: true, ..Self::default() }
    }

    pub(super) fn push_text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Text since the last tag, if there is any but white space.
    pub(super) fn take_text(&mut self) -> Option<String> {
        let text = std::mem::take(&mut self.text);
        (!is_blank(&text)).then_some(text)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.seen.contains(name)
    }

    /// Notes a member; false if there was one of that name.
    pub(super) fn add(&mut self, name: &str) -> bool {
        self.seen.insert(name.to_owned())
    }

    pub(super) fn write_key(&mut self, name: &str, out: &mut String) {
        write_key(name, self.num_written == 0, out);
        self.num_written += 1;
    }

    pub(super) fn wait(&mut self, waiting: Waiting) {
        self.waiting = Some(waiting);
    }

    /// A member of that name begins: the waiting one if it is the same, which goes on; another one
    /// is written now.
    pub(super) fn begin(
        &mut self,
        name: &str,
        schema: &mut Schema,
        out: &mut String,
    ) -> Option<Waiting> {
        if let Some(text) = self.take_text() {
            self.stray.push_str(&text);
        }
        if !self.is_open {
            self.is_open = true;
            out.push('{');
        }
        let waiting = self.waiting.take()?;
        if waiting.name() == name {
            return Some(waiting);
        }
        waiting.write(self, schema, out);
        None
    }

    /// The object ends. Text beside members becomes a member of its own, but not in a call's own
    /// object, where a tool would not know it.
    pub(super) fn finish(
        mut self,
        view: View,
        is_root: bool,
        schema: &mut Schema,
        out: &mut String,
    ) {
        if !self.is_open {
            return write_leaf(&self.text, schema, view, out);
        }
        if let Some(waiting) = self.waiting.take() {
            waiting.write(&mut self, schema, out);
        }
        if let Some(text) = self.take_text() {
            self.stray.push_str(&text);
        }
        if !is_root && !self.stray.is_empty() && !self.has(TEXT_MEMBER) {
            self.write_key(TEXT_MEMBER, out);
            write_string(&self.stray, out);
        }
        out.push('}');
    }
}
