//! The arguments of one tool's calls as a grammar: every word of it is read back by the parser as
//! a value that the tool's schema accepts.

use super::numbers::number_pattern;
use super::reading::{
    ANYTHING, Expressed, MAX_CHAIN, Reading, count, listed, map_values, says_only_string, strings,
};
use super::standalone;
use super::strings::{Look, string_terminal};
use crate::json::{Json, Object};
use crate::lark::{LarkWriter, json, literal, regex};
use crate::model::ToolSchema;
use crate::model::minimax_m3::output::{ITEM, can_be_member};
use crate::schema::{ROOT, Schema, Types, View};
use std::collections::HashMap;

/// A tool whose grammar would have more rules is refused.
const MAX_RULES: usize = 20_000;
/// Writes the rules of a tool's arguments; gives what stands between the tags of a call.
///
/// # Errors
/// What a strict tool's schema demands and no grammar can express. Of other tools it is left out.
pub(super) fn arguments(tool: &ToolSchema, mark: &str, lark: &mut LarkWriter) -> Expressed<String> {
    let Some(root) = &tool.parameters else { return Ok(String::new()) };
    let mut writer = Writer {
        reading: Reading { root, is_strict: tool.strict },
        schema: Schema::new(Some(root)),
        mark,
        lark,
        names: HashMap::new(),
        waiting: Vec::new(),
    };
    let body = writer.root(root, 0)?;
    writer.write_waiting()?;
    Ok(body)
}

struct Writer<'a, 'w> {
    reading: Reading<'a>,
    /// The schema as the parser of calls sees it.
    schema: Schema,
    mark: &'w str,
    lark: &'w mut LarkWriter,
    /// Rules by the address of their schema, and their place in the parser's eyes.
    names: HashMap<(usize, View), String>,
    /// Named and not yet written.
    waiting: Vec<(String, &'a Json, View)>,
}

impl<'a> Writer<'a, '_> {
    fn write_waiting(&mut self) -> Expressed<()> {
        while let Some((name, node, view)) = self.waiting.pop() {
            if self.lark.num_rules() > MAX_RULES {
                return Err(format!("it takes more than {MAX_RULES} rules"));
            }
            let body = match self.value(node, view) {
                Ok(body) => body,
                Err(why) => match self.as_json(node, view) {
                    Some(body) => body,
                    None if self.reading.is_strict => return Err(why),
                    None => self.loose(view),
                },
            };
            self.lark.rule(&name, &body);
        }
        Ok(())
    }

    /// The rule of what `node` allows at a place.
    fn place(&mut self, node: &'a Json, view: View) -> String {
        let key = (std::ptr::from_ref(node).addr(), view);
        if let Some(known) = self.names.get(&key) {
            return known.clone();
        }
        let name = self.lark.fresh_rule();
        self.names.insert(key, name.clone());
        self.waiting.push((name.clone(), node, view));
        name
    }

    /// What stands in a call: always elements.
    fn root(&mut self, node: &'a Json, depth: usize) -> Expressed<String> {
        let Json::Object(object) = self.reading.follow(node)? else { return Ok(String::new()) };
        if let Some(parts) = self.reading.alternatives(object)?
            && depth < MAX_CHAIN
        {
            let parts: Expressed<Vec<String>> =
                parts.iter().map(|part| Ok(grouped(&self.root(part, depth + 1)?))).collect();
            return Ok(parts?.join(" | "));
        }
        self.reading.check_keywords(object)?;
        if let Some(problem) = JSON_ONLY.iter().find(|key| object.contains_key(**key)) {
            self.reading.refuse(format!("{problem} of the arguments themselves"))?;
        }
        let members = self.members(object, ROOT)?;
        if members.is_empty()
            && let Some(values) = map_values(object)
        {
            return self.root_map(values);
        }
        Ok(sequence(&members))
    }

    /// Any names at all, with values that hold no tags: a closing tag then ends its element
    /// whatever it says.
    fn root_map(&mut self, values: &'a Json) -> Expressed<String> {
        let (view, _) = self.schema.member(ROOT, "");
        let value = match self.schema.types(view) {
            Types::ALL | Types::STRING => string_terminal(&Look::default(), None)?,
            _ => {
                self.reading.refuse("a map whose values are no strings".to_owned())?;
                return Ok(String::new());
            }
        };
        if self.reading.is_strict
            && !matches!(values, Json::Bool(true))
            && !says_only_string(values)
        {
            return Err("a map whose values are no plain strings".to_owned());
        }
        let value = self.lark.terminal(&value);
        let name = self.lark.terminal(r"/[A-Za-z0-9_.-]{1,64}/ & ~/invoke|tool_call|item/");
        let mark = self.mark;
        Ok(format!("({mark} \"<\" {name} \">\" {value} {mark} \"</\" {name} \">\")*"))
    }

    fn value(&mut self, node: &'a Json, view: View) -> Expressed<String> {
        let node = self.reading.follow(node)?;
        let object = match node {
            Json::Object(object) => object,
            Json::Bool(false) => return Err("a place where no value is allowed".to_owned()),
            _ => return self.anything(view),
        };
        self.reading.check_keywords(object)?;
        if let Some(parts) = self.reading.alternatives(object)? {
            let parts: Vec<String> = parts.iter().map(|part| self.place(part, view)).collect();
            return Ok(parts.join(" | "));
        }
        if let Some(values) = listed(object) {
            return self.listed(values, object, view);
        }
        let types = Types::of_schema(object).unwrap_or(Types::ALL);
        if types == Types::ALL {
            return self.anything(view);
        }
        if self.schema.types(view) == Types::ALL && types != Types::STRING && self.reading.is_strict
        {
            // the parser takes every text for a string here
            return Err("values that nothing tells apart from strings".to_owned());
        }
        let mut parts = Vec::new();
        if types.has(Types::STRING) {
            parts.push(self.string(object, view)?);
        }
        if types.has(Types::NULL) {
            parts.push(literal("null"));
        }
        if types.has(Types::BOOLEAN) {
            parts.push("\"true\" | \"false\"".to_owned());
        }
        if types.has(Types::NUMBER) {
            parts.push(self.number(object, !types.allows_fractions())?);
        }
        if types.has(Types::ARRAY) {
            parts.push(self.array(object, view)?);
        }
        if types.has(Types::OBJECT) {
            parts.push(self.object(object, view)?);
        }
        Ok(parts.join(" | "))
    }

    /// A place about which nothing is said: text, or a list of such.
    fn anything(&mut self, view: View) -> Expressed<String> {
        if self.schema.types(view) != Types::ALL {
            return Err("a value of any type beside values of some".to_owned());
        }
        let text = string_terminal(&Look::default(), None)?;
        Ok(self.lark.terminal(&text))
    }

    fn listed(&mut self, values: &[Json], object: &Object, view: View) -> Expressed<String> {
        let types = Types::of_schema(object).unwrap_or(Types::ALL);
        let is_untyped = self.schema.types(view) == Types::ALL;
        let mut words = Vec::new();
        for value in values.iter().filter(|value| types.has(Types::of_value(value))) {
            let text = value.as_str().map_or_else(|| value.to_compact(), str::to_owned);
            if text.contains(super::super::NAMESPACE) {
                self.reading.refuse("a listed value with the mark of tags in it".to_owned())?;
                continue;
            }
            if is_untyped && self.schema.listed_value(view, &text) != Some(value) {
                self.reading.refuse("listed values that are spelled alike".to_owned())?;
            }
            words.push(literal(&text));
        }
        if words.is_empty() {
            return Err("a list of values of which none can be written".to_owned());
        }
        Ok(words.join(" | "))
    }

    fn string(&mut self, object: &Object, view: View) -> Expressed<String> {
        let others = self.schema.types(view);
        let look = match others {
            Types::ALL | Types::STRING => Look::default(),
            types => Look::of(types),
        };
        let rules = string_terminal(&look, Some(object));
        let terminal = match rules {
            Err(_) if !self.reading.is_strict => string_terminal(&look, None)?,
            other => other?,
        };
        Ok(self.lark.terminal(&terminal))
    }

    fn number(&mut self, object: &Object, is_integer: bool) -> Expressed<String> {
        let pattern = match number_pattern(object, is_integer) {
            Err(_) if !self.reading.is_strict => number_pattern(&Object::new(), is_integer)?,
            other => other?,
        };
        Ok(self.lark.terminal(&regex(&pattern)))
    }

    fn array(&mut self, object: &'a Object, view: View) -> Expressed<String> {
        let types = self.schema.types(view);
        let reads_as_object = types.has(Types::OBJECT) && self.schema.member(view, ITEM).1;
        if reads_as_object || JSON_ONLY.iter().any(|key| object.contains_key(*key)) {
            return self.typed_json("array", object, view);
        }
        let item = match object.get("items") {
            None => &ANYTHING,
            Some(items) => items,
        };
        if matches!(item, Json::Bool(false)) {
            return self.typed_json("array", object, view);
        }
        let least = count(object, "minItems").unwrap_or(0);
        let most = count(object, "maxItems");
        let item_view = self.schema.item(view, 0);
        let item = self.place(item, item_view);
        let element = self.element(ITEM, &item);
        let some = |least: u64| match most {
            Some(most) if most < least => {
                Err("a list with more items at least than at most".to_owned())
            }
            Some(most) => Ok(format!("({element}){{{least},{most}}}")),
            None => Ok(format!("({element}){{{least},}}")),
        };
        if most == Some(0) && least == 0 {
            return Ok(if types.has(Types::STRING) { literal("[]") } else { String::new() });
        }
        if least > 0 || !types.has(Types::STRING) {
            return some(least);
        }
        // an empty element would be a string here
        Ok(format!("{} | {}", some(1)?, literal("[]")))
    }

    fn object(&mut self, object: &'a Object, view: View) -> Expressed<String> {
        let types = self.schema.types(view);
        let names = object.get("properties").and_then(Json::as_object);
        let reads_as_list =
            types.has(Types::ARRAY) && names.is_some_and(|names| names.contains_key(ITEM));
        let is_map = names.is_none_or(|names| names.is_empty()) && map_values(object).is_some();
        let is_never_empty = !strings(object.get("required")).is_empty();
        if is_map && !types.has(Types::STRING) && !types.has(Types::ARRAY) && !is_never_empty {
            // the template's way to write an empty one
            return Ok(format!("\"\" | {}", self.typed_json("object", object, view)?));
        }
        if reads_as_list || is_map || JSON_ONLY.iter().any(|key| object.contains_key(*key)) {
            return self.typed_json("object", object, view);
        }
        let members = self.members(object, view)?;
        let is_empty_object = !types.has(Types::STRING) && !types.has(Types::ARRAY);
        if is_empty_object || members.iter().any(|member| member.is_required) {
            return Ok(sequence(&members));
        }
        // an empty element would be something else here
        let mut parts: Vec<String> = (0..members.len())
            .map(|first| {
                let rest = sequence(&members[first + 1..]);
                format!("{} {rest}", members[first].rule)
            })
            .collect();
        parts.push(literal("{}"));
        Ok(parts.join(" | "))
    }

    fn members(&mut self, object: &'a Object, view: View) -> Expressed<Vec<Member>> {
        let required = strings(object.get("required"));
        let properties = object.get("properties").and_then(Json::as_object);
        let mut all: Vec<(&'a str, &'a Json)> =
            properties.into_iter().flatten().map(|(name, node)| (name.as_str(), node)).collect();
        for name in &required {
            if properties.is_some_and(|properties| properties.contains_key(*name)) {
                continue;
            }
            match map_values(object) {
                Some(values) => all.push((name, values)),
                None => return Err(format!("{name:?}, which is required and not allowed")),
            }
        }
        let mut members = Vec::with_capacity(all.len());
        for (name, node) in all {
            let is_required = required.contains(&name);
            if !can_be_member(name) {
                if is_required {
                    self.reading.refuse(format!("the name {name:?}, which no tag can hold"))?;
                }
                continue;
            }
            if !is_required && matches!(node, Json::Bool(false)) {
                continue;
            }
            let (member_view, _) = self.schema.member(view, name);
            let value = self.place(node, member_view);
            members.push(Member { rule: self.element(name, &value), is_required });
        }
        Ok(members)
    }

    fn element(&self, name: &str, value: &str) -> String {
        let (open, close) = (literal(&format!("<{name}>")), literal(&format!("</{name}>")));
        let mark = self.mark;
        format!("{mark} {open} {value} {mark} {close}")
    }

    /// One kind of value as a JSON text, which the parser reads where a list or object may stand.
    fn typed_json(&self, kind: &str, object: &Object, view: View) -> Expressed<String> {
        if self.schema.types(view) == Types::ALL {
            return Err("an object or list that nothing tells apart from a string".to_owned());
        }
        let mut object = object.clone();
        object.insert("type".to_owned(), kind.into());
        let node = Json::Object(object);
        Ok(json(&standalone::document(self.reading.root, &node, self.reading.is_strict)?))
    }

    /// Anything but strings as a JSON text, where all of it is read as such.
    fn as_json(&self, node: &Json, view: View) -> Option<String> {
        if self.schema.types(view).has(Types::STRING) {
            return None;
        }
        let document =
            standalone::document(self.reading.root, node, self.reading.is_strict).ok()?;
        Some(json(&document))
    }

    /// Some value of a type that the place allows, of a tool that need not be exact.
    fn loose(&mut self, view: View) -> String {
        let types = self.schema.types(view);
        if types.has(Types::STRING) {
            let text = string_terminal(&Look::default(), None).unwrap_or_default();
            return self.lark.terminal(&text);
        }
        json(&Json::object([("type", Json::Array(types.names().map(Into::into).collect()))]))
    }
}

/// Keywords that only a JSON text can keep to.
const JSON_ONLY: [&str; 4] = ["minProperties", "maxProperties", "propertyNames", "prefixItems"];

struct Member {
    rule: String,
    is_required: bool,
}

fn sequence(members: &[Member]) -> String {
    let parts = members.iter().map(|member| match member.is_required {
        true => member.rule.clone(),
        false => format!("({})?", member.rule),
    });
    parts.collect::<Vec<_>>().join(" ")
}

fn grouped(body: &str) -> String {
    if body.is_empty() { "\"\"".to_owned() } else { format!("({body})") }
}
