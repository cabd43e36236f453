//! Writes a call's arguments as JSON while their elements arrive: what the schema settles goes out
//! at once, what it leaves open waits for the end of the element, or of its repetition.

use super::element::{Element, ITEM, is_blank, names_member_of_item, write_leaf, write_run};
use super::frame::{Frame, Kind, fold, kind_of_value, may_be_other, tree, waits_for_repetition};
use super::lexer::Tag;
use super::object::{ObjectState, Waiting};
use crate::json::{Json, MAX_DEPTH, escape_into};
use crate::schema::{ROOT, Schema, Types, View};

/// The writer of one call.
#[derive(Debug)]
pub(super) struct ArgumentWriter {
    schema: Schema,
    /// Open elements, the call's own object first.
    frames: Vec<Frame>,
    out: String,
}

impl ArgumentWriter {
    /// Begins the arguments of a call whose parameters have this schema.
    pub(super) fn new(parameters: Option<&Json>) -> Self {
        let root = Kind::Object(ObjectState::opened());
        Self {
            schema: Schema::new(parameters),
            frames: vec![Frame { name: None, view: ROOT, kind: root }],
            out: "{".to_owned(),
        }
    }

    /// Takes the JSON text that is certain.
    pub(super) fn take_fragment(&mut self) -> String {
        std::mem::take(&mut self.out)
    }

    /// Whether an element of that name is open.
    pub(super) fn has_open(&self, name: &str) -> bool {
        self.frames.iter().any(|frame| frame.has_open(name))
    }

    /// Whether the innermost open element is an object that names a member so.
    pub(super) fn expects(&mut self, name: &str) -> bool {
        let view = self.top().view;
        matches!(self.top().kind, Kind::Object(_)) && self.schema.member(view, name).1
    }

    /// Text of the innermost element.
    pub(super) fn text(&mut self, text: &str) {
        let at = self.frames.len() - 1;
        match &mut self.frames[at].kind {
            Kind::Object(object) => object.push_text(text),
            Kind::List(_, held) => held.push_str(text),
            Kind::Text(_) => escape_into(text, &mut self.out),
            Kind::Leaf(held) => {
                held.push_str(text);
                self.decide_leaf();
            }
            Kind::Tree { open, .. } => {
                if let Some(innermost) = open.last_mut() {
                    innermost.push_text(text);
                }
            }
            Kind::Ignored(_) => {}
        }
    }

    /// An element begins.
    pub(super) fn open(&mut self, name: &str) {
        let tag = Tag::new(name, false);
        if self.frames.iter().map(Frame::depth).sum::<usize>() >= MAX_DEPTH {
            return self.text(&tag.plain());
        }
        self.close_unclosed(name);
        match &mut self.top().kind {
            Kind::Object(_) => self.open_member(name),
            Kind::List(..) => self.open_item(name),
            Kind::Leaf(_) => self.open_in_leaf(name),
            Kind::Text(inner) => {
                inner.push(name.to_owned());
                escape_into(&tag.plain(), &mut self.out);
            }
            Kind::Tree { open, .. } => open.push(Element::new(name)),
            Kind::Ignored(inner) => inner.push(name.to_owned()),
        }
    }

    /// An element ends. A name that is not open ends the innermost element all the same, or, if
    /// text stands where only elements may, was that text's own.
    pub(super) fn close(&mut self, name: &str) {
        if let Some(at) = self.frames.iter().rposition(|frame| frame.has_open(name)) {
            self.close_frames(at + 1);
            let Self { frames, out, .. } = self;
            if !frames[at].close_inner(name, out) {
                self.close_top();
            }
            return;
        }
        let is_root = self.frames.len() == 1;
        let may_be_member = is_root || self.expects(name);
        let text = match &mut self.top().kind {
            Kind::Object(object) if may_be_member => object.take_text(),
            _ => None,
        };
        match text {
            // the opening tag was left out
            Some(text) => {
                let num_frames = self.frames.len();
                self.open_member(name);
                self.text(&text);
                self.close_frames(num_frames);
            }
            None if is_root => {}
            None => self.close_top(),
        }
    }

    /// The call ends; elements that are still open end with it.
    pub(super) fn end(&mut self) {
        self.close_frames(1);
        let Self { frames, schema, out } = self;
        if let Some(Frame { view, kind: Kind::Object(object), .. }) = frames.pop() {
            object.finish(view, true, schema, out);
        }
        *frames = vec![Frame { name: None, view: ROOT, kind: Kind::Ignored(Vec::new()) }];
    }

    fn top(&mut self) -> &mut Frame {
        self.frames.last_mut().expect("invariant: the first frame is never popped for good")
    }

    /// Ends elements whose closing tag was left out: `name` has no place in them, but names a
    /// member of an object around them.
    fn close_unclosed(&mut self, name: &str) {
        let at = self.frames.len() - 1;
        if self.belongs(at, name) {
            return;
        }
        let around = (0..at).rev().find(|&around| {
            let Frame { view, ref kind, .. } = self.frames[around];
            matches!(kind, Kind::Object(_)) && self.schema.member(view, name).1
        });
        match around {
            Some(around) => self.close_frames(around + 1),
            // an item without tags ends where another one begins
            None if at > 0 && self.frames[at].name.is_none() => self.close_top(),
            None => {}
        }
    }

    fn belongs(&mut self, at: usize, name: &str) -> bool {
        let Self { schema, frames, .. } = self;
        let Frame { view, ref kind, name: ref own_name } = frames[at];
        match kind {
            Kind::Object(object) if at > 0 && own_name.is_none() => {
                schema.member(view, name).1 && !object.has(name)
            }
            Kind::Object(_) => {
                at == 0 || schema.member(view, name).1 || !schema.names_members(view)
            }
            Kind::List(list, _) => {
                let item = schema.item(view, list.num_items());
                name == ITEM || names_member_of_item(schema, item, name)
            }
            // an object after all
            Kind::Leaf(held) => {
                is_blank(held)
                    && schema.types(view).has(Types::OBJECT)
                    && schema.member(view, name).1
            }
            Kind::Text(_) => false,
            Kind::Tree { .. } | Kind::Ignored(_) => true,
        }
    }

    fn open_member(&mut self, name: &str) {
        let Self { schema, frames, out } = self;
        let Some(Frame { view, kind: Kind::Object(object), .. }) = frames.last_mut() else {
            return;
        };
        let (kind, view) = match object.begin(name, schema, out) {
            Some(Waiting::List { view, list, .. }) => (Kind::List(list, String::new()), view),
            Some(Waiting::Elements { view, elements, .. }) => (tree(elements, name), view),
            None if !object.add(name) => (Kind::Ignored(Vec::new()), *view),
            None => {
                let (member, _) = schema.member(*view, name);
                let kind = kind_of_value(schema, member, name);
                if !waits_for_repetition(schema, member, &kind) {
                    object.write_key(name, out);
                }
                (kind, member)
            }
        };
        self.push_frame(Some(name), view, kind);
    }

    fn open_item(&mut self, name: &str) {
        let Self { schema, frames, out } = self;
        let Some(Frame { view, kind: Kind::List(list, held), .. }) = frames.last_mut() else {
            return;
        };
        list.add_text(&std::mem::take(held), schema, *view, out);
        let item = list.next_item(schema, *view, out);
        if names_member_of_item(schema, item, name) {
            self.push_frame(None, item, Kind::Object(ObjectState::default()));
            return self.open_member(name);
        }
        let kind = kind_of_value(schema, item, name);
        self.push_frame(Some(name), item, kind);
    }

    fn push_frame(&mut self, name: Option<&str>, view: View, kind: Kind) {
        if matches!(kind, Kind::Text(_)) {
            self.out.push('"');
        }
        self.frames.push(Frame { name: name.map(str::to_owned), view, kind });
    }

    /// A child in a scalar: an object after all if the schema allows one, else text.
    fn open_in_leaf(&mut self, name: &str) {
        let at = self.frames.len() - 1;
        let allows_object = self.schema.types(self.frames[at].view).has(Types::OBJECT);
        let Frame { name: own_name, kind, .. } = &mut self.frames[at];
        let Kind::Leaf(held) = kind else { return };
        let held = std::mem::take(held);
        if allows_object {
            let own_name = own_name.as_deref().unwrap_or_default();
            let open = vec![Element::with_text(own_name, &held), Element::new(name)];
            *kind = Kind::Tree { before: Vec::new(), open };
            return;
        }
        self.start_string(&held);
        self.open(name);
    }

    /// Turns an undecided scalar into a string as soon as it can be nothing else.
    fn decide_leaf(&mut self) {
        let at = self.frames.len() - 1;
        let view = self.frames[at].view;
        let Kind::Leaf(held) = &mut self.frames[at].kind else { return };
        if self.schema.lists_values(view) || may_be_other(held, self.schema.types(view)) {
            return;
        }
        let held = std::mem::take(held);
        self.start_string(&held);
    }

    fn start_string(&mut self, text: &str) {
        self.out.push('"');
        escape_into(text, &mut self.out);
        self.top().kind = Kind::Text(Vec::new());
    }

    fn close_frames(&mut self, num_left: usize) {
        while self.frames.len() > num_left {
            self.close_top();
        }
    }

    fn close_top(&mut self) {
        let Self { schema, frames, out } = self;
        let Some(Frame { name, view, kind }) = frames.pop() else { return };
        let parent = match frames.last_mut() {
            Some(Frame { kind: Kind::Object(object), .. }) => Some(object),
            _ => None,
        };
        let waits = waits_for_repetition(schema, view, &kind);
        let name = name.unwrap_or_default();
        match (kind, parent) {
            (Kind::Text(_), _) => out.push('"'),
            (Kind::Leaf(held), _) => write_leaf(&held, schema, view, out),
            (Kind::Object(object), _) => object.finish(view, false, schema, out),
            (Kind::List(mut list, held), parent) => {
                list.add_text(&held, schema, view, out);
                match parent {
                    Some(parent) => parent.wait(Waiting::List { name, view, list }),
                    None => list.close(out),
                }
            }
            (Kind::Tree { mut before, mut open }, parent) => {
                fold(&mut open, 1);
                before.extend(open);
                match parent {
                    Some(parent) if waits => {
                        parent.wait(Waiting::Elements { name, view, elements: before });
                    }
                    _ => write_run(&before, schema, view, out),
                }
            }
            (Kind::Ignored(_), _) => {}
        }
    }
}
