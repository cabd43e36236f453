//! What a JSON schema says about the types of values, through references and combinations.

mod builder;

use crate::json::{Json, Object};
use std::collections::HashMap;

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Types(u8);

impl Types {
    /// `null`
    pub const NULL: Self = Self(1);
    /// `boolean`
    pub const BOOLEAN: Self = Self(2);
    /// `integer`
    pub const INTEGER: Self = Self(4);
    /// `number`, integers included
    pub const NUMBER: Self = Self(12);
    /// `string`
    pub const STRING: Self = Self(16);
    /// `array`
    pub const ARRAY: Self = Self(32);
    /// `object`
    pub const OBJECT: Self = Self(64);
    /// Every type: nothing is said.
    pub const ALL: Self = Self(127);
    const NONE: Self = Self(0);

    /// Whether one of `other`'s types is in here.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether all of `other`'s types are in here.
    pub fn includes(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether numbers need not be whole.
    pub fn allows_fractions(self) -> bool {
        self.0 & 8 != 0
    }

    /// The types that a schema names itself, or that its keywords imply; `None` if it says nothing.
    pub fn of_schema(schema: &Object) -> Option<Self> {
        builder::own_types(schema)
    }

    /// The types of these values.
    pub fn of_values(values: &[Json]) -> Self {
        values.iter().map(Self::of_value).fold(Self::NONE, Self::or)
    }

    /// Their names in a schema; a number includes integers.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let number = if self.allows_fractions() { "number" } else { "integer" };
        let all = [
            (Self::NULL, "null"),
            (Self::BOOLEAN, "boolean"),
            (Self::NUMBER, number),
            (Self::STRING, "string"),
            (Self::ARRAY, "array"),
            (Self::OBJECT, "object"),
        ];
        all.into_iter().filter(move |(kind, _)| self.has(*kind)).map(|(_, name)| name)
    }

    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn of_name(name: &str) -> Self {
        match name {
            "null" => Self::NULL,
            "boolean" => Self::BOOLEAN,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER,
            "string" => Self::STRING,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::ALL,
        }
    }

    /// The type of a value.
    pub fn of_value(value: &Json) -> Self {
        match value {
            Json::Null => Self::NULL,
            Json::Bool(_) => Self::BOOLEAN,
            Json::Number(number) if number.is_integer() => Self::INTEGER,
            Json::Number(_) => Self::NUMBER,
            Json::String(_) => Self::STRING,
            Json::Array(_) => Self::ARRAY,
            Json::Object(_) => Self::OBJECT,
        }
    }
}

/// All that a schema says about one place of a value: the alternatives that may hold there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View(usize);

/// The part of the document that a reference names; only references within it are followed.
pub fn resolve<'a>(root: &'a Json, reference: &str) -> Option<&'a Json> {
    builder::resolve(root, reference)
}

/// A compiled schema. Places are looked up once and remembered.
#[derive(Debug)]
pub struct Schema {
    nodes: Vec<Node>,
    views: Vec<ViewFacts>,
    view_of_nodes: HashMap<Vec<usize>, View>,
    members: HashMap<(View, String), (View, bool)>,
    items: HashMap<(View, usize), View>,
}

#[derive(Debug, Default)]
struct Node {
    types: Option<Types>,
    values: Vec<Json>,
    properties: HashMap<String, usize>,
    other_properties: Option<usize>,
    prefix_items: Vec<usize>,
    items: Option<usize>,
    /// Schemas that hold as well.
    all: Vec<usize>,
    /// Of each group one schema holds as well.
    any: Vec<Vec<usize>>,
}

#[derive(Debug)]
struct ViewFacts {
    /// Every node that may say something here.
    nodes: Vec<usize>,
    types: Types,
}

/// The place about which nothing is said.
pub const OPEN: View = View(0);
/// The schema's own place.
pub const ROOT: View = View(1);

impl Schema {
    /// Compiles a schema; without one nothing is said anywhere.
    pub fn new(schema: Option<&Json>) -> Self {
        let (nodes, root) = builder::compile(schema);
        let mut compiled = Self {
            nodes,
            views: Vec::new(),
            view_of_nodes: HashMap::new(),
            members: HashMap::new(),
            items: HashMap::new(),
        };
        compiled.view(Vec::new());
        compiled.views.push(ViewFacts { nodes: Vec::new(), types: Types::ALL });
        if let Some(root) = root {
            compiled.views[ROOT.0] = compiled.facts(&[root]);
        }
        compiled
    }

    /// Types that may stand at a place; [`Types::ALL`] if nothing is said.
    pub fn types(&self, view: View) -> Types {
        self.views[view.0].types
    }

    /// The place of a member, and whether the schema names it.
    pub fn member(&mut self, view: View, key: &str) -> (View, bool) {
        if let Some(&known) = self.members.get(&(view, key.to_owned())) {
            return known;
        }
        let nodes = self.views[view.0].nodes.iter().map(|&node| &self.nodes[node]);
        let mut found: Vec<usize> =
            nodes.clone().filter_map(|node| node.properties.get(key)).copied().collect();
        let is_named = !found.is_empty();
        if !is_named {
            found.extend(nodes.filter_map(|node| node.other_properties));
        }
        let member = (self.view(found), is_named);
        self.members.insert((view, key.to_owned()), member);
        member
    }

    /// Whether any member of a place is named.
    pub fn names_members(&self, view: View) -> bool {
        self.views[view.0].nodes.iter().any(|&node| !self.nodes[node].properties.is_empty())
    }

    /// The place of a list's item.
    pub fn item(&mut self, view: View, index: usize) -> View {
        if let Some(&known) = self.items.get(&(view, index)) {
            return known;
        }
        let nodes = self.views[view.0].nodes.iter().map(|&node| &self.nodes[node]);
        let found: Vec<usize> =
            nodes.filter_map(|node| node.prefix_items.get(index).copied().or(node.items)).collect();
        let item = self.view(found);
        // lists without a tuple part have one place for all items; do not remember each
        if index < 64 {
            self.items.insert((view, index), item);
        }
        item
    }

    /// Whether the values at a place are listed.
    pub fn lists_values(&self, view: View) -> bool {
        self.views[view.0].nodes.iter().any(|&node| !self.nodes[node].values.is_empty())
    }

    /// The listed value at a place that `text` spells: a string as it is, others as JSON.
    pub fn listed_value(&self, view: View, text: &str) -> Option<&Json> {
        let values = self.views[view.0].nodes.iter().flat_map(|&node| &self.nodes[node].values);
        let mut spelled = None;
        for value in values {
            match value {
                Json::String(string) if string == text => return Some(value),
                Json::String(_) => {}
                other if other.to_compact() == text => spelled = Some(value),
                _ => {}
            }
        }
        spelled
    }

    fn view(&mut self, mut nodes: Vec<usize>) -> View {
        nodes.sort_unstable();
        nodes.dedup();
        if let Some(&view) = self.view_of_nodes.get(&nodes) {
            return view;
        }
        let view = View(self.views.len());
        let facts = self.facts(&nodes);
        self.views.push(facts);
        self.view_of_nodes.insert(nodes, view);
        view
    }

    fn facts(&self, alternatives: &[usize]) -> ViewFacts {
        let mut nodes = Vec::new();
        let mut is_seen = vec![false; self.nodes.len()];
        let mut open: Vec<usize> = alternatives.to_vec();
        while let Some(at) = open.pop() {
            if std::mem::replace(&mut is_seen[at], true) {
                continue;
            }
            nodes.push(at);
            let node = &self.nodes[at];
            open.extend(node.all.iter().chain(node.any.iter().flatten()));
        }
        nodes.sort_unstable();
        let mut known = HashMap::new();
        let types = alternatives
            .iter()
            .map(|&node| self.node_types(node, &mut known, MAX_CHAIN))
            .reduce(Types::or)
            .unwrap_or(Types::ALL);
        ViewFacts { nodes, types }
    }

    /// `known` also ends cycles: a node that is being asked says nothing more.
    fn node_types(&self, at: usize, known: &mut HashMap<usize, Types>, chain: usize) -> Types {
        if let Some(&types) = known.get(&at) {
            return types;
        }
        let Some(chain) = chain.checked_sub(1) else { return Types::ALL };
        known.insert(at, Types::ALL);
        let node = &self.nodes[at];
        let mut types = node.types.unwrap_or(Types::ALL);
        if !node.values.is_empty() {
            types = types.and(Types::of_values(&node.values));
        }
        for &part in &node.all {
            types = types.and(self.node_types(part, known, chain));
        }
        for group in &node.any {
            let mut allowed = Types::NONE;
            for &part in group {
                allowed = allowed.or(self.node_types(part, known, chain));
            }
            types = types.and(allowed);
        }
        // a schema that allows nothing says nothing useful
        if types == Types::NONE {
            types = Types::ALL;
        }
        known.insert(at, types);
        types
    }
}

/// Schemas that refer on to further ones more often than this say nothing.
const MAX_CHAIN: usize = 256;

#[cfg(test)]
mod tests;
