//! What a JSON schema says about the types of values, through references and combinations.

mod builder;

use crate::json::{Json, Object};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};

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

/// A compiled schema. Places are looked up once and remembered; a schema on which more than
/// [`MAX_WORK`] was spent says nothing of further ones.
#[derive(Debug)]
pub struct Schema {
    nodes: Vec<Node>,
    views: Vec<ViewFacts>,
    view_of_nodes: HashMap<Vec<usize>, View>,
    members: HashMap<(View, String), (View, bool)>,
    items: HashMap<(View, usize), View>,
    /// Nodes, and values they list, that may still be looked at.
    work_left: Cell<usize>,
}

/// Thousands of nodes that say something of one place, and a reply with thousands of members there,
/// would be millions of looks: so many take a tenth of a second.
const MAX_WORK: usize = 4_000_000;

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
    /// Every node that says something here of members, items or values.
    nodes: Vec<usize>,
    types: Types,
    /// From here on items are all alike.
    longest_prefix: usize,
    names_members: bool,
    lists_values: bool,
}

impl ViewFacts {
    /// Nothing is said.
    fn open() -> Self {
        let (types, longest_prefix) = (Types::ALL, 0);
        Self { nodes: Vec::new(), types, longest_prefix, names_members: false, lists_values: false }
    }
}

impl Node {
    /// Whether it says anything but the type.
    fn says_more(&self) -> bool {
        !(self.properties.is_empty()
            && self.other_properties.is_none()
            && self.prefix_items.is_empty()
            && self.items.is_none()
            && self.values.is_empty())
    }
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
            work_left: Cell::new(MAX_WORK),
        };
        compiled.view(Vec::new());
        compiled.views.push(ViewFacts::open());
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
        let nodes = &self.views[view.0].nodes;
        if !self.may_look_at(nodes.len()) {
            return (OPEN, false);
        }
        let nodes = nodes.iter().map(|&node| &self.nodes[node]);
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
        self.views[view.0].names_members
    }

    /// The place of a list's item.
    pub fn item(&mut self, view: View, index: usize) -> View {
        let facts = &self.views[view.0];
        let index = index.min(facts.longest_prefix);
        if let Some(&known) = self.items.get(&(view, index)) {
            return known;
        }
        if !self.may_look_at(facts.nodes.len()) {
            return OPEN;
        }
        let nodes = facts.nodes.iter().map(|&node| &self.nodes[node]);
        let found: Vec<usize> =
            nodes.filter_map(|node| node.prefix_items.get(index).copied().or(node.items)).collect();
        let item = self.view(found);
        self.items.insert((view, index), item);
        item
    }

    /// Whether the values at a place are listed.
    pub fn lists_values(&self, view: View) -> bool {
        self.views[view.0].lists_values
    }

    /// The listed value at a place that `text` spells: a string as it is, others as JSON.
    pub fn listed_value(&self, view: View, text: &str) -> Option<&Json> {
        let nodes = &self.views[view.0].nodes;
        let values = nodes.iter().flat_map(|&node| &self.nodes[node].values);
        let mut spelled = None;
        for value in values {
            if !self.may_look_at(1) {
                break;
            }
            match value {
                Json::String(string) if string == text => return Some(value),
                Json::String(_) => {}
                other if other.to_compact() == text => spelled = Some(value),
                _ => {}
            }
        }
        spelled
    }

    /// Whether so much may still be looked at.
    fn may_look_at(&self, count: usize) -> bool {
        let left = self.work_left.get().checked_sub(count);
        self.work_left.set(left.unwrap_or(0));
        left.is_some()
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
        let mut facts = ViewFacts::open();
        let mut is_seen = HashSet::new();
        let mut open: Vec<usize> = alternatives.to_vec();
        while let Some(at) = open.pop() {
            if !is_seen.insert(at) {
                continue;
            }
            if !self.may_look_at(1) {
                return ViewFacts::open();
            }
            let node = &self.nodes[at];
            open.extend(node.all.iter().chain(node.any.iter().flatten()));
            if node.says_more() {
                facts.nodes.push(at);
                facts.longest_prefix = facts.longest_prefix.max(node.prefix_items.len());
                facts.names_members |= !node.properties.is_empty();
                facts.lists_values |= !node.values.is_empty();
            }
        }
        facts.nodes.sort_unstable();
        let mut known = HashMap::new();
        facts.types = alternatives
            .iter()
            .map(|&node| self.node_types(node, &mut known, MAX_CHAIN))
            .reduce(Types::or)
            .unwrap_or(Types::ALL);
        facts
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
