//! How a tool's schema is read: references, alternatives, and the keywords that count.

use crate::json::{Json, Object};
use crate::schema::{Types, resolve};

/// Why a schema has no grammar, in words that follow "cannot be enforced: ".
pub(super) type Inexpressible = String;
pub(super) type Expressed<T> = Result<T, Inexpressible>;

/// References that refer on to further ones more often than this are taken for a circle.
pub(super) const MAX_CHAIN: usize = 64;

pub(super) static ANYTHING: Json = Json::Bool(true);

/// Keywords that say nothing about which values are right.
const ANNOTATIONS: [&str; 21] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "format",
    "nullable",
    "readOnly",
    "strict",
    "title",
    "writeOnly",
];
/// Keywords that are expressed here, with or without the help of a JSON text.
const EXPRESSED: [&str; 24] = [
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "properties",
    "required",
    "type",
    "maxProperties",
    "minProperties",
    "propertyNames",
];

/// A schema, and how exact its grammar must be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    pub(super) root: &'a Json,
    /// What cannot be expressed is an error.
    pub(super) is_strict: bool,
}

impl<'a> Reading<'a> {
    /// An error of a strict tool, nothing of another.
    pub(super) fn refuse(&self, what: Inexpressible) -> Expressed<()> {
        if self.is_strict { Err(what) } else { Ok(()) }
    }

    /// The schema behind references, and behind an `allOf` of one.
    pub(super) fn follow(&self, node: &'a Json) -> Expressed<&'a Json> {
        let mut at = node;
        for _ in 0..MAX_CHAIN {
            let Json::Object(object) = at else { return Ok(at) };
            let next = match (object.get("$ref"), object.get("allOf")) {
                (Some(Json::String(reference)), _) => resolve(self.root, reference)
                    .ok_or_else(|| format!("the reference {reference:?}, which leads nowhere"))?,
                (_, Some(Json::Array(parts))) if parts.len() == 1 => &parts[0],
                (_, Some(Json::Array(parts))) if !parts.is_empty() => {
                    self.refuse("allOf with more than one schema".to_owned())?;
                    return Ok(at);
                }
                _ => return Ok(at),
            };
            let says_nothing_new = |key: &str| match key {
                "$ref" | "allOf" => true,
                "type" => next.as_object().and_then(Types::of_schema).is_some_and(|types| {
                    Types::of_schema(object).is_some_and(|own| own.includes(types))
                }),
                other => is_annotation(other),
            };
            let beside = object.keys().find(|key| !says_nothing_new(key));
            if let Some(key) = beside {
                // what stands beside says more; without its own type the target says the most
                self.refuse(format!("{key} beside a reference"))?;
                if object.contains_key("type") && object.contains_key("properties") {
                    return Ok(at);
                }
            }
            at = next;
        }
        Err(format!("references that lead in a circle, or on and on more than {MAX_CHAIN} times"))
    }

    pub(super) fn alternatives(&self, object: &'a Object) -> Expressed<Option<&'a [Json]>> {
        let (key, parts) = match (object.get("anyOf"), object.get("oneOf")) {
            (Some(Json::Array(parts)), None) if !parts.is_empty() => ("anyOf", parts),
            (None, Some(Json::Array(parts))) if !parts.is_empty() => ("oneOf", parts),
            (Some(Json::Array(_)), Some(Json::Array(_))) => {
                self.refuse("anyOf beside oneOf".to_owned())?;
                return Ok(None);
            }
            _ => return Ok(None),
        };
        if let Some(beside) = object.keys().find(|other| *other != key && !is_annotation(other)) {
            self.refuse(format!("{beside} beside {key}"))?;
            if object.contains_key("properties") {
                return Ok(None);
            }
        }
        if key == "oneOf" && !super::standalone::are_disjoint(self.root, parts) {
            self.refuse("oneOf with schemas that may hold together".to_owned())?;
        }
        Ok(Some(parts))
    }

    pub(super) fn check_keywords(&self, object: &Object) -> Expressed<()> {
        let is_known = |key: &str| is_annotation(key) || EXPRESSED.contains(&key);
        match object.keys().find(|key| !is_known(key)) {
            Some(key) => self.refuse(format!("the keyword {key:?}")),
            None => Ok(()),
        }
    }
}

/// What members that an object does not name may hold; `None` if there may be none.
pub(super) fn map_values(object: &Object) -> Option<&Json> {
    match object.get("additionalProperties") {
        Some(Json::Bool(false)) => None,
        Some(values) => Some(values),
        None => Some(&ANYTHING),
    }
}

pub(super) fn is_annotation(key: &str) -> bool {
    key.starts_with("x-") || ANNOTATIONS.contains(&key)
}

/// The values that a schema lists.
pub(super) fn listed(object: &Object) -> Option<&[Json]> {
    match (object.get("const"), object.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Json::Array(values))) => Some(values),
        _ => None,
    }
}

pub(super) fn strings(list: Option<&Json>) -> Vec<&str> {
    list.and_then(Json::as_array).unwrap_or(&[]).iter().filter_map(Json::as_str).collect()
}

pub(super) fn count(object: &Object, key: &str) -> Option<u64> {
    match object.get(key) {
        Some(Json::Number(number)) => number.as_u64(),
        _ => None,
    }
}

pub(super) fn says_only_string(node: &Json) -> bool {
    node.as_object().is_some_and(|object| {
        object.get("type").and_then(Json::as_str) == Some("string")
            && object.keys().all(|key| key == "type" || is_annotation(key))
    })
}
