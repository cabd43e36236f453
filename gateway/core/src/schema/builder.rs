//! Reads a JSON schema into nodes that refer to each other by number.

use super::{Node, Types};
use crate::json::{Json, Object};
use std::collections::HashMap;

/// The nodes of a schema, and which is its root.
pub(super) fn compile(schema: Option<&Json>) -> (Vec<Node>, Option<usize>) {
    let mut builder =
        Builder { nodes: Vec::new(), references: HashMap::new(), unread: Vec::new(), root: schema };
    let root = schema.map(|schema| builder.node(schema));
    builder.read_references();
    (builder.nodes, root)
}

struct Builder<'a> {
    nodes: Vec<Node>,
    /// Nodes of references by their text, so that cycles end.
    references: HashMap<&'a str, usize>,
    /// Referred-to schemas whose nodes are still empty; a chain of them may be long.
    unread: Vec<(usize, &'a Object)>,
    root: Option<&'a Json>,
}

impl<'a> Builder<'a> {
    fn node(&mut self, schema: &'a Json) -> usize {
        let at = self.nodes.len();
        self.nodes.push(Node::default());
        if let Json::Object(schema) = schema {
            let node = self.read(schema);
            self.nodes[at] = node;
        }
        at
    }

    fn read(&mut self, schema: &'a Object) -> Node {
        let mut node = Node { types: own_types(schema), ..Node::default() };
        match (schema.get("enum"), schema.get("const")) {
            (_, Some(value)) => node.values = vec![value.clone()],
            (Some(Json::Array(values)), None) => node.values = values.clone(),
            _ => {}
        }
        if let Some(Json::Object(properties)) = schema.get("properties") {
            for (key, property) in properties {
                node.properties.insert(key.clone(), self.node(property));
            }
        }
        if let Some(other @ Json::Object(_)) = schema.get("additionalProperties") {
            node.other_properties = Some(self.node(other));
        }
        self.read_items(schema, &mut node);
        if let Some(Json::Array(parts)) = schema.get("allOf") {
            node.all = parts.iter().map(|part| self.node(part)).collect();
        }
        for group in ["anyOf", "oneOf"] {
            if let Some(Json::Array(parts)) = schema.get(group)
                && !parts.is_empty()
            {
                node.any.push(parts.iter().map(|part| self.node(part)).collect());
            }
        }
        if let Some(Json::String(reference)) = schema.get("$ref") {
            node.all.extend(self.reference(reference));
        }
        node
    }

    fn read_items(&mut self, schema: &'a Object, node: &mut Node) {
        if let Some(Json::Array(items)) = schema.get("prefixItems") {
            node.prefix_items = items.iter().map(|item| self.node(item)).collect();
        }
        match schema.get("items") {
            Some(item @ Json::Object(_)) => node.items = Some(self.node(item)),
            // the older form of a tuple
            Some(Json::Array(items)) => {
                node.prefix_items = items.iter().map(|item| self.node(item)).collect();
                if let Some(item @ Json::Object(_)) = schema.get("additionalItems") {
                    node.items = Some(self.node(item));
                }
            }
            _ => {}
        }
    }

    fn reference(&mut self, reference: &'a str) -> Option<usize> {
        if let Some(&known) = self.references.get(reference) {
            return Some(known);
        }
        let target = resolve(self.root?, reference)?;
        let at = self.nodes.len();
        self.references.insert(reference, at);
        self.nodes.push(Node::default());
        if let Json::Object(schema) = target {
            self.unread.push((at, schema));
        }
        Some(at)
    }

    fn read_references(&mut self) {
        while let Some((at, schema)) = self.unread.pop() {
            let node = self.read(schema);
            self.nodes[at] = node;
        }
    }
}

/// Types that a schema names itself, or that its keywords imply.
pub(super) fn own_types(schema: &Object) -> Option<Types> {
    let named = match schema.get("type") {
        Some(Json::String(name)) => Some(Types::of_name(name)),
        Some(Json::Array(names)) => {
            let names = names.iter().filter_map(Json::as_str);
            names.map(Types::of_name).reduce(Types::or)
        }
        _ if schema.contains_key("properties") => Some(Types::OBJECT),
        _ if schema.contains_key("items") || schema.contains_key("prefixItems") => {
            Some(Types::ARRAY)
        }
        _ => None,
    };
    match schema.get("nullable") {
        Some(Json::Bool(true)) => named.map(|types| types.or(Types::NULL)),
        _ => named,
    }
}

/// The part of the document that a reference names; only references within it are followed.
pub(super) fn resolve<'a>(root: &'a Json, reference: &str) -> Option<&'a Json> {
    let pointer = reference.strip_prefix('#')?;
    if pointer.is_empty() {
        return Some(root);
    }
    let mut at = root;
    for step in pointer.strip_prefix('/')?.split('/') {
        let step = percent_decoded(step).replace("~1", "/").replace("~0", "~");
        at = match at {
            Json::Object(object) => object.get(&step)?,
            Json::Array(items) => items.get(step.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(at)
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let code = (first == b'%')
            .then(|| tail.get(..2))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
