//! An open element of a call's arguments, and how its value is written.

use super::element::{Element, List};
use super::lexer::Tag;
use super::object::ObjectState;
use crate::json::escape_into;
use crate::schema::{Schema, Types, View};

/// An open element.
#[derive(Debug)]
pub(super) struct Frame {
    /// The element's name; none for the call itself and for an item without tags.
    pub(super) name: Option<String>,
    pub(super) view: View,
    pub(super) kind: Kind,
}

/// How an element's value is written.
#[derive(Debug)]
pub(super) enum Kind {
    Object(ObjectState),
    /// A list, and the text since the last tag.
    List(List, String),
    /// A string that is on its way; tags inside are text, their names are kept for the closing.
    Text(Vec<String>),
    /// A string or another scalar, undecided.
    Leaf(String),
    /// Something that is written when it is complete: elements of the same name that came before,
    /// and the open ones, outermost first.
    Tree {
        before: Vec<Element>,
        open: Vec<Element>,
    },
    /// A second value of a member that takes one.
    Ignored(Vec<String>),
}

impl Frame {
    /// Whether an element of that name is open here.
    pub(super) fn has_open(&self, name: &str) -> bool {
        self.name.as_deref() == Some(name)
            || match &self.kind {
                Kind::Text(inner) | Kind::Ignored(inner) => inner.iter().any(|open| open == name),
                Kind::Tree { open, .. } => open.iter().skip(1).any(|open| open.name == name),
                _ => false,
            }
    }

    /// Closes an element inside this one; false if there is none of that name.
    pub(super) fn close_inner(&mut self, name: &str, out: &mut String) -> bool {
        match &mut self.kind {
            Kind::Text(inner) => {
                let Some(at) = inner.iter().rposition(|open| open == name) else { return false };
                inner.truncate(at);
                escape_into(&Tag::new(name, true).plain(), out);
                true
            }
            Kind::Ignored(inner) => {
                let Some(at) = inner.iter().rposition(|open| open == name) else { return false };
                inner.truncate(at);
                true
            }
            Kind::Tree { open, .. } => {
                let at = open.iter().skip(1).rposition(|open| open.name == name);
                let Some(at) = at else { return false };
                fold(open, at + 1);
                true
            }
            _ => false,
        }
    }

    /// Open elements in here, itself included.
    pub(super) fn depth(&self) -> usize {
        match &self.kind {
            Kind::Text(inner) | Kind::Ignored(inner) => 1 + inner.len(),
            Kind::Tree { open, .. } => open.len(),
            _ => 1,
        }
    }
}

/// Puts open elements into those around them until `num_left` are left.
pub(super) fn fold(open: &mut Vec<Element>, num_left: usize) {
    while open.len() > num_left {
        let Some(child) = open.pop() else { return };
        match open.last_mut() {
            Some(parent) => parent.push_child(child),
            None => open.push(child),
        }
    }
}

/// An element that is written when it is complete.
pub(super) fn tree(before: Vec<Element>, name: &str) -> Kind {
    Kind::Tree { before, open: vec![Element::new(name)] }
}

/// How a value of that place is to be written.
pub(super) fn kind_of_value(schema: &Schema, view: View, name: &str) -> Kind {
    match schema.types(view) {
        Types::STRING => Kind::Text(Vec::new()),
        Types::OBJECT => Kind::Object(ObjectState::default()),
        Types::ARRAY => Kind::List(List::default(), String::new()),
        types if types.has(Types::STRING) && !types.has(Types::ARRAY) => Kind::Leaf(String::new()),
        _ => tree(Vec::new(), name),
    }
}

/// Whether a member is written only when no further one of its name can come.
pub(super) fn waits_for_repetition(schema: &Schema, view: View, kind: &Kind) -> bool {
    matches!(kind, Kind::Tree { .. }) && schema.types(view).has(Types::ARRAY)
}

/// Whether a text may still become a value that is no string.
pub(super) fn may_be_other(text: &str, types: Types) -> bool {
    let begins = |word: &str| word.starts_with(text);
    let may_be_number = |text: &str| {
        text.starts_with(|first: char| first == '-' || first.is_ascii_digit())
            && text.bytes().all(|byte| b"+-.eE".contains(&byte) || byte.is_ascii_digit())
    };
    text.is_empty()
        || (types.has(Types::NULL) && begins("null"))
        || (types.has(Types::BOOLEAN) && (begins("true") || begins("false")))
        || (types.has(Types::NUMBER) && may_be_number(text))
        || (types.has(Types::OBJECT)
            && matches!(text.trim_ascii_start().as_bytes(), [] | [b'{', ..]))
}
