//! The meaning of M3's argument form: elements as JSON, by what the tool's schema says.

use super::lexer::Tag;
use crate::json::{Json, Number, write_string};
use crate::schema::{Schema, Types, View};

/// The name of a list's elements.
pub(in super::super) const ITEM: &str = "item";
/// Member that holds text beside child elements.
pub(super) const TEXT_MEMBER: &str = "$text";

/// An element with everything in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) name: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Child(Element),
}

impl Element {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), parts: Vec::new() }
    }

    pub(super) fn with_text(name: &str, text: &str) -> Self {
        let mut element = Self::new(name);
        element.push_text(text);
        element
    }

    pub(super) fn push_text(&mut self, text: &str) {
        match self.parts.last_mut() {
            Some(Part::Text(last)) => last.push_str(text),
            _ => self.parts.push(Part::Text(text.to_owned())),
        }
    }

    pub(super) fn push_child(&mut self, child: Element) {
        self.parts.push(Part::Child(child));
    }

    fn children(&self) -> impl Iterator<Item = &Element> {
        self.parts.iter().filter_map(|part| match part {
            Part::Child(child) => Some(child),
            Part::Text(_) => None,
        })
    }

    /// Its own text; parts that are only white space between children are layout.
    fn text(&self) -> String {
        let has_children = self.children().next().is_some();
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Text(text) if !has_children || !is_blank(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// Everything as text, children with plain tags: for a place that takes only strings.
    fn plain(&self, out: &mut String) {
        for part in &self.parts {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Child(child) => {
                    let tag = |is_closing| Tag::new(&child.name, is_closing).plain();
                    out.push_str(&tag(false));
                    child.plain(out);
                    out.push_str(&tag(true));
                }
            }
        }
    }
}

/// White space as the template writes it between tags.
pub(super) fn is_blank(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_whitespace())
}

/// Writes one element's value.
pub(super) fn write_element(element: &Element, schema: &mut Schema, view: View, out: &mut String) {
    if element.children().next().is_none() {
        return write_leaf(&element.text(), schema, view, out);
    }
    let types = schema.types(view);
    let is_list = types.has(Types::ARRAY)
        && (!types.has(Types::OBJECT)
            || (element.children().all(|child| child.name == ITEM)
                && !schema.member(view, ITEM).1));
    if is_list {
        let mut list = List::default();
        list.open(out);
        list.add_parts(element, schema, view, out);
        list.close(out);
    } else if types.has(Types::OBJECT) {
        write_object(element, schema, view, out);
    } else {
        let mut text = String::new();
        element.plain(&mut text);
        write_string(&text, out);
    }
}

/// Writes the value of neighbouring elements of one name: a list, if the schema allows one.
pub(super) fn write_run(run: &[Element], schema: &mut Schema, view: View, out: &mut String) {
    match run {
        [] => out.push_str("null"),
        [only] => write_element(only, schema, view, out),
        [first, ..] if !schema.types(view).has(Types::ARRAY) => {
            write_element(first, schema, view, out);
        }
        many => {
            let mut list = List::default();
            list.open(out);
            for element in many {
                list.add_element(element, schema, view, out);
            }
            list.close(out);
        }
    }
}

fn write_object(element: &Element, schema: &mut Schema, view: View, out: &mut String) {
    let mut names: Vec<&str> = Vec::new();
    let children: Vec<&Element> = element.children().collect();
    out.push('{');
    for run in children.chunk_by(|a, b| a.name == b.name) {
        let name = run[0].name.as_str();
        // a name that comes again later cannot be added to; its first value stands
        if names.contains(&name) {
            continue;
        }
        write_key(name, names.is_empty(), out);
        names.push(name);
        let (member, _) = schema.member(view, name);
        let run: Vec<Element> = run.iter().map(|&element| element.clone()).collect();
        write_run(&run, schema, member, out);
    }
    let text = element.text();
    if !text.is_empty() && !names.contains(&TEXT_MEMBER) {
        write_key(TEXT_MEMBER, names.is_empty(), out);
        write_string(&text, out);
    }
    out.push('}');
}

/// Writes a member's key, with the comma before it.
pub(super) fn write_key(name: &str, is_first: bool, out: &mut String) {
    if !is_first {
        out.push(',');
    }
    write_string(name, out);
    out.push(':');
}

/// A list that is being written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct List {
    is_open: bool,
    num_items: usize,
}

impl List {
    pub(super) fn open(&mut self, out: &mut String) {
        if !self.is_open {
            self.is_open = true;
            out.push('[');
        }
    }

    /// Makes room for the next item; gives its place.
    pub(super) fn next_item(&mut self, schema: &mut Schema, view: View, out: &mut String) -> View {
        self.open(out);
        if self.num_items > 0 {
            out.push(',');
        }
        self.num_items += 1;
        schema.item(view, self.num_items - 1)
    }

    pub(super) fn close(&mut self, out: &mut String) {
        self.open(out);
        out.push(']');
    }

    /// Adds what a text in the place of items stands for: JSON items, or one item.
    pub(super) fn add_text(
        &mut self,
        text: &str,
        schema: &mut Schema,
        view: View,
        out: &mut String,
    ) {
        if is_blank(text) {
            return;
        }
        if let Ok(Json::Array(items)) = Json::parse(text.as_bytes()) {
            for item in items {
                self.next_item(schema, view, out);
                item.write_compact(out);
            }
            return;
        }
        let item = self.next_item(schema, view, out);
        if !write_typed(text, schema, item, out) {
            write_string(text, out);
        }
    }

    /// Adds an element of a run: what it holds, or itself.
    fn add_element(
        &mut self,
        element: &Element,
        schema: &mut Schema,
        view: View,
        out: &mut String,
    ) {
        let types = schema.types(view);
        let is_leaf = element.children().next().is_none();
        if types == Types::ARRAY
            || (is_leaf && types != Types::ALL)
            || (!is_leaf && element.children().all(|child| child.name == ITEM))
        {
            return self.add_parts(element, schema, view, out);
        }
        let item = self.next_item(schema, view, out);
        write_element(element, schema, item, out);
    }

    /// Adds everything in an element. Each child is an item, whatever its name; but members of an
    /// item without the item's own tags make one item together.
    fn add_parts(&mut self, element: &Element, schema: &mut Schema, view: View, out: &mut String) {
        let mut members = Element::default();
        for part in &element.parts {
            match part {
                Part::Text(text) if is_blank(text) => {}
                Part::Text(text) => {
                    self.add_members(&mut members, schema, view, out);
                    self.add_text(text, schema, view, out);
                }
                Part::Child(child) if is_bare_member(child, self.num_items, schema, view) => {
                    if members.children().any(|member| member.name == child.name) {
                        self.add_members(&mut members, schema, view, out);
                    }
                    members.push_child(child.clone());
                }
                Part::Child(child) => {
                    self.add_members(&mut members, schema, view, out);
                    let item = self.next_item(schema, view, out);
                    write_element(child, schema, item, out);
                }
            }
        }
        self.add_members(&mut members, schema, view, out);
    }

    fn add_members(
        &mut self,
        members: &mut Element,
        schema: &mut Schema,
        view: View,
        out: &mut String,
    ) {
        if !members.parts.is_empty() {
            let item = self.next_item(schema, view, out);
            write_object(&std::mem::take(members), schema, item, out);
        }
    }

    pub(super) fn num_items(self) -> usize {
        self.num_items
    }
}

fn is_bare_member(child: &Element, index: usize, schema: &mut Schema, view: View) -> bool {
    let item = schema.item(view, index);
    names_member_of_item(schema, item, &child.name)
}

/// Whether a child of a list is a member of its item, the item's own tags left out.
pub(super) fn names_member_of_item(schema: &mut Schema, item: View, name: &str) -> bool {
    name != ITEM && schema.types(item) == Types::OBJECT && schema.member(item, name).1
}

/// Writes the value that a text stands for. The schema decides the type, never the look of the
/// text; a text that cannot be of any declared type is handed on as a string.
pub(super) fn write_leaf(text: &str, schema: &mut Schema, view: View, out: &mut String) {
    if write_typed(text, schema, view, out) {
        return;
    }
    let types = schema.types(view);
    if types.has(Types::ARRAY) && !types.has(Types::STRING) {
        // a list of one, its brackets left out
        let mut list = List::default();
        list.open(out);
        list.add_text(text, schema, view, out);
        return list.close(out);
    }
    write_string(text, out);
}

/// Writes the value if the text can be of a declared type; strings only where they are declared.
fn write_typed(text: &str, schema: &Schema, view: View, out: &mut String) -> bool {
    let types = schema.types(view);
    // white space is part of a string, but not of other values
    let bare = if types.has(Types::STRING) { text } else { text.trim_ascii() };
    if let Some(value) = schema.listed_value(view, bare) {
        value.write_compact(out);
        return true;
    }
    if types == Types::ALL {
        write_string(text, out);
        return true;
    }
    if let Some(value) = scalar(bare, types) {
        out.push_str(value);
        return true;
    }
    if bare.is_empty() && !types.has(Types::STRING) {
        let empty = [(Types::ARRAY, "[]"), (Types::OBJECT, "{}"), (Types::NULL, "null")];
        if let Some((_, value)) = empty.iter().find(|(kind, _)| types.has(*kind)) {
            out.push_str(value);
            return true;
        }
    }
    if types.has(Types::ARRAY) || types.has(Types::OBJECT) {
        match Json::parse(bare.as_bytes()) {
            Ok(value @ Json::Array(_)) if types.has(Types::ARRAY) => {
                value.write_compact(out);
                return true;
            }
            Ok(value @ Json::Object(_)) if types.has(Types::OBJECT) => {
                value.write_compact(out);
                return true;
            }
            _ => {}
        }
    }
    if types.has(Types::STRING) {
        write_string(text, out);
        return true;
    }
    false
}

/// The JSON text of a null, boolean or number.
fn scalar(text: &str, types: Types) -> Option<&str> {
    match text {
        "null" if types.has(Types::NULL) => return Some(text),
        "true" | "false" if types.has(Types::BOOLEAN) => return Some(text),
        // Python's spelling, where nothing else could be meant
        "True" if types == Types::BOOLEAN => return Some("true"),
        "False" if types == Types::BOOLEAN => return Some("false"),
        _ => {}
    }
    if !types.has(Types::NUMBER) {
        return None;
    }
    let number = Number::from_literal(text)?;
    let is_allowed = types.allows_fractions() || number.is_integer() || number.as_i64().is_some();
    is_allowed.then_some(text)
}
