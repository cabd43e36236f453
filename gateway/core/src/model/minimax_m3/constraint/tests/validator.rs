//! Whether a value fits a schema, by the plain reading of the keywords that the tests use.

use crate::json::Json;
use crate::schema::resolve;

pub(super) fn fits(root: &Json, schema: &Json, value: &Json) -> bool {
    let Json::Object(object) = schema else { return *schema != Json::Bool(false) };
    object.iter().all(|(key, rule)| match (key.as_str(), rule) {
        ("$ref", Json::String(reference)) => fits(root, resolve(root, reference).unwrap(), value),
        ("type", Json::String(name)) => is_of(name, value),
        ("type", Json::Array(names)) => {
            names.iter().any(|name| is_of(name.as_str().unwrap(), value))
        }
        ("const", only) => only == value,
        ("enum", Json::Array(values)) => values.contains(value),
        ("anyOf", Json::Array(parts)) => parts.iter().any(|part| fits(root, part, value)),
        ("oneOf", Json::Array(parts)) => {
            parts.iter().filter(|part| fits(root, part, value)).count() == 1
        }
        ("allOf", Json::Array(parts)) => parts.iter().all(|part| fits(root, part, value)),
        _ => fits_kind(root, schema, (key, rule), value),
    })
}

fn fits_kind(root: &Json, schema: &Json, (key, rule): (&str, &Json), value: &Json) -> bool {
    let limit = || match rule {
        Json::Number(number) => number.as_f64(),
        other => panic!("{key} is {other:?}"),
    };
    match value {
        Json::String(text) => match key {
            "minLength" => text.chars().count() as f64 >= limit(),
            "maxLength" => text.chars().count() as f64 <= limit(),
            _ => true,
        },
        Json::Number(number) => match key {
            "minimum" => number.as_f64() >= limit(),
            "maximum" => number.as_f64() <= limit(),
            _ => true,
        },
        Json::Array(items) => match key {
            "minItems" => items.len() as f64 >= limit(),
            "maxItems" => items.len() as f64 <= limit(),
            "items" => items.iter().all(|item| fits(root, rule, item)),
            _ => true,
        },
        Json::Object(members) => match key {
            "required" => rule
                .as_array()
                .unwrap()
                .iter()
                .all(|name| members.contains_key(name.as_str().unwrap())),
            "properties" => rule.as_object().unwrap().iter().all(|(name, part)| {
                members.get(name).is_none_or(|member| fits(root, part, member))
            }),
            "additionalProperties" => members.iter().all(|(name, member)| {
                let properties = schema.get("properties").and_then(Json::as_object);
                properties.is_some_and(|properties| properties.contains_key(name))
                    || fits(root, rule, member)
            }),
            _ => true,
        },
        _ => true,
    }
}

fn is_of(name: &str, value: &Json) -> bool {
    match value {
        Json::Number(number) => {
            name == "number"
                || (name == "integer" && number.as_i64().is_some())
                || (name == "integer" && number.is_integer())
        }
        Json::Null => name == "null",
        Json::Bool(_) => name == "boolean",
        Json::String(_) => name == "string",
        Json::Array(_) => name == "array",
        Json::Object(_) => name == "object",
    }
}
