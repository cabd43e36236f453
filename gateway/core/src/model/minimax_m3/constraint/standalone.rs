//! A part of a schema as a document of its own, and whether parts exclude each other.

use super::reading::{Inexpressible, is_annotation, listed};
use crate::json::{Json, Object};
use crate::schema::{Types, resolve};
use indexmap::IndexSet;

/// A part with all it refers to, for the workers' own JSON grammars: written without white space;
/// with `is_strict` what cannot be enforced is an error there, else it is left out.
///
/// # Errors
/// A reference that leads nowhere.
pub(super) fn document(root: &Json, part: &Json, is_strict: bool) -> Result<Json, Inexpressible> {
    let mut references = IndexSet::new();
    let mut whole = match detached(part, &mut references) {
        Json::Object(object) => object,
        Json::Bool(false) => Object::from([("not".to_owned(), Json::Object(Object::new()))]),
        _ => Object::new(),
    };
    let mut definitions = Object::new();
    let mut at = 0;
    while let Some(reference) = references.get_index(at).cloned() {
        let target = resolve(root, &reference)
            .ok_or_else(|| format!("the reference {reference:?}, which leads nowhere"))?;
        definitions.insert(format!("d{at}"), detached(target, &mut references));
        at += 1;
    }
    if !definitions.is_empty() {
        whole.insert("$defs".to_owned(), Json::Object(definitions));
    }
    whole.insert("x-guidance".to_owned(), options(is_strict, "whitespace_flexible", false.into()));
    Ok(Json::Object(whole))
}

/// What the workers' JSON grammars are told besides the schema.
pub(super) fn options(is_strict: bool, name: &str, value: Json) -> Json {
    Json::object([
        (name, value),
        ("lenient", (!is_strict).into()),
        ("coerce_one_of", (!is_strict).into()),
    ])
}

/// A schema without remarks, its references led to `$defs` by their number.
fn detached(schema: &Json, references: &mut IndexSet<String>) -> Json {
    let Json::Object(object) = schema else { return schema.clone() };
    let mut own = Object::new();
    for (key, value) in object {
        let value = match (key.as_str(), value) {
            ("$ref", Json::String(reference)) => {
                let (number, _) = references.insert_full(reference.clone());
                format!("#/$defs/d{number}").into()
            }
            ("format", _) => value.clone(),
            (key, _) if is_annotation(key) => continue,
            ("properties" | "patternProperties" | "dependentSchemas", Json::Object(members)) => {
                let members = members.iter();
                let members =
                    members.map(|(name, part)| (name.clone(), detached(part, references)));
                Json::Object(members.collect())
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Json::Array(parts)) => {
                Json::Array(parts.iter().map(|part| detached(part, references)).collect())
            }
            ("enum" | "const" | "required" | "type", _) => value.clone(),
            (_, Json::Object(_)) => detached(value, references),
            _ => value.clone(),
        };
        own.insert(key.clone(), value);
    }
    Json::Object(own)
}

/// Whether no value fits two of these: their types differ, or a member that both require does.
pub(super) fn are_disjoint(root: &Json, parts: &[Json]) -> bool {
    let parts: Vec<&Json> = parts.iter().map(|part| target(root, part)).collect();
    (0..parts.len())
        .all(|one| parts[one + 1..].iter().all(|other| exclude(root, parts[one], other)))
}

fn target<'a>(root: &'a Json, part: &'a Json) -> &'a Json {
    let reference = part.get("$ref").and_then(Json::as_str);
    reference.and_then(|reference| resolve(root, reference)).unwrap_or(part)
}

fn exclude(root: &Json, one: &Json, other: &Json) -> bool {
    if !types(one).has(types(other)) {
        return true;
    }
    if let (Some(one), Some(other)) = (values(one), values(other)) {
        return one.iter().all(|value| !other.contains(value));
    }
    let requires = |part: &Json, name: &str| {
        let names = part.get("required").and_then(Json::as_array).unwrap_or(&[]);
        names.iter().any(|required| required.as_str() == Some(name))
    };
    let properties = |part: &Json| part.get("properties").and_then(Json::as_object).cloned();
    let (Some(mine), Some(theirs)) = (properties(one), properties(other)) else { return false };
    mine.iter().any(|(name, member)| {
        let Some(their_member) = theirs.get(name) else { return false };
        let (member, their_member) = (target(root, member), target(root, their_member));
        let differs = match (values(member), values(their_member)) {
            (Some(one), Some(other)) => one.iter().all(|value| !other.contains(value)),
            _ => !types(member).has(types(their_member)),
        };
        differs && requires(one, name) && requires(other, name)
    })
}

fn values(part: &Json) -> Option<&[Json]> {
    part.as_object().and_then(listed)
}

fn types(part: &Json) -> Types {
    let Some(object) = part.as_object() else { return Types::ALL };
    match (Types::of_schema(object), listed(object)) {
        (Some(types), _) => types,
        (None, Some(values)) => Types::of_values(values),
        _ => Types::ALL,
    }
}
