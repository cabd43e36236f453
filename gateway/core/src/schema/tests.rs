use super::*;

fn schema(text: &str) -> Schema {
    Schema::new(Some(&Json::parse(text.as_bytes()).unwrap()))
}

fn types_at(text: &str, path: &[&str]) -> Types {
    let mut schema = schema(text);
    let view = path.iter().fold(ROOT, |view, key| match key.parse() {
        Ok(index) => schema.item(view, index),
        Err(_) => schema.member(view, key).0,
    });
    schema.types(view)
}

#[test]
fn plain_types_are_read() {
    let text = r#"{"properties":{"a":{"type":"string"},"b":{"type":["integer","null"]},"c":{}}}"#;
    assert_eq!(types_at(text, &[]), Types::OBJECT);
    assert_eq!(types_at(text, &["a"]), Types::STRING);
    assert_eq!(types_at(text, &["b"]), Types::INTEGER.or(Types::NULL));
    assert_eq!(types_at(text, &["c"]), Types::ALL);
    assert_eq!(types_at(text, &["unknown"]), Types::ALL);
}

#[test]
fn no_schema_says_nothing() {
    let mut schema = Schema::new(None);
    assert_eq!(schema.types(ROOT), Types::ALL);
    assert_eq!(schema.member(ROOT, "a"), (OPEN, false));
}

#[test]
fn properties_are_found_in_every_branch() {
    let text = r#"{"oneOf":[{"properties":{"n":{"type":"number"}}},
        {"allOf":[{"anyOf":[{"properties":{"deep":{"type":"boolean"}}}]}]}]}"#;
    assert_eq!(types_at(text, &["n"]), Types::NUMBER);
    assert_eq!(types_at(text, &["deep"]), Types::BOOLEAN);
}

#[test]
fn references_are_followed_also_into_lists_and_through_escapes() {
    let text = r##"{"$defs":{"a/b ~":{"type":"integer"}},"anyOf":[{},{"type":"object",
        "properties":{"x":{"$ref":"#/$defs/a~1b%20~0"}}}],
        "properties":{"y":{"$ref":"#/anyOf/1"},"z":{"$ref":"elsewhere.json"}}}"##;
    assert_eq!(types_at(text, &["y", "x"]), Types::INTEGER);
    assert_eq!(types_at(text, &["z"]), Types::ALL);
}

#[test]
fn cycles_end() {
    let text = r##"{"$ref":"#/$defs/n","$defs":{"n":{"$ref":"#/$defs/n"}}}"##;
    assert_eq!(types_at(text, &[]), Types::ALL);
    let text = r##"{"$defs":{"node":{"type":"object","properties":{"next":{"$ref":"#/$defs/node"},
        "all":{"type":"array","items":{"$ref":"#/$defs/node"}},"v":{"type":"integer"}}}},
        "properties":{"n":{"$ref":"#/$defs/node"}}}"##;
    assert_eq!(types_at(text, &["n", "next", "all", "3", "next", "v"]), Types::INTEGER);
    let itself = r##"{"properties":{"me":{"$ref":"#"},"v":{"type":"null"}}}"##;
    assert_eq!(types_at(itself, &["me", "me", "v"]), Types::NULL);
}

#[test]
fn all_of_narrows_and_any_of_widens() {
    let text = r#"{"properties":{
        "narrow":{"allOf":[{"type":["string","integer"]},{"type":["integer","null"]}]},
        "wide":{"anyOf":[{"type":"string"},{"type":"null"}]},
        "impossible":{"allOf":[{"type":"string"},{"type":"null"}]}}}"#;
    assert_eq!(types_at(text, &["narrow"]), Types::INTEGER);
    assert_eq!(types_at(text, &["wide"]), Types::STRING.or(Types::NULL));
    assert_eq!(types_at(text, &["impossible"]), Types::ALL);
}

#[test]
fn listed_values_give_types_and_are_found_by_their_text() {
    let text = r#"{"properties":{"e":{"enum":["1",2,null]},"c":{"const":true}}}"#;
    let expected = Types::STRING.or(Types::INTEGER).or(Types::NULL);
    assert_eq!(types_at(text, &["e"]), expected);
    assert_eq!(types_at(text, &["c"]), Types::BOOLEAN);
    let mut schema = schema(text);
    let (view, _) = schema.member(ROOT, "e");
    assert_eq!(schema.listed_value(view, "1"), Some(&"1".into()));
    assert_eq!(schema.listed_value(view, "2").map(Json::to_compact).as_deref(), Some("2"));
    assert_eq!(schema.listed_value(view, "3"), None);
}

#[test]
fn tuples_have_a_place_for_each_item() {
    let new = r#"{"prefixItems":[{"type":"string"},{"type":"integer"}],"items":{"type":"null"}}"#;
    let old =
        r#"{"items":[{"type":"string"},{"type":"integer"}],"additionalItems":{"type":"null"}}"#;
    for text in [new, old] {
        assert_eq!(types_at(text, &[]), Types::ARRAY);
        assert_eq!(types_at(text, &["0"]), Types::STRING);
        assert_eq!(types_at(text, &["1"]), Types::INTEGER);
        assert_eq!(types_at(text, &["2"]), Types::NULL);
    }
}

#[test]
fn a_web_of_references_is_compiled_in_linear_time() {
    // every definition refers to all others: naive expansion would never end
    let names: Vec<String> = (0..60).map(|n| format!("d{n}")).collect();
    let all = names
        .iter()
        .map(|name| format!(r##"{{"$ref":"#/$defs/{name}"}}"##))
        .collect::<Vec<_>>()
        .join(",");
    let defs = names
        .iter()
        .map(|name| format!(r#""{name}":{{"anyOf":[{all}]}}"#))
        .collect::<Vec<_>>()
        .join(",");
    let text = format!(r##"{{"$defs":{{{defs}}},"$ref":"#/$defs/d0"}}"##);
    assert_eq!(types_at(&text, &["x"]), Types::ALL);
}

#[test]
fn a_long_chain_of_references_does_not_exhaust_the_stack() {
    let links = (0..50_000)
        .map(|n| format!(r##""d{n}":{{"$ref":"#/$defs/d{}"}}"##, n + 1))
        .collect::<Vec<_>>()
        .join(",");
    let text =
        format!(r##"{{"$defs":{{{links},"d50000":{{"type":"null"}}}},"$ref":"#/$defs/d0"}}"##);
    assert_eq!(types_at(&text, &[]), Types::ALL);
}

/// A schema of links, the last of which is a string; `more` stands in each beside its reference.
fn chain(links: usize, more: &str) -> Schema {
    let link = |at: usize| format!(r##""a{at}":{{"$ref":"#/$defs/a{}"{more}}}"##, at + 1);
    let defs = (0..links).map(link).collect::<Vec<_>>().join(",");
    schema(&format!(
        r##"{{"$ref":"#/$defs/a0","$defs":{{{defs},"a{links}":{{"properties":{{"s":{{"type":"string"}}}}}}}}}}"##
    ))
}

fn spent(schema: &Schema) -> usize {
    MAX_WORK - schema.work_left.get()
}

#[test]
fn links_that_say_nothing_cost_nothing_later() {
    let mut chain = chain(10_000, "");
    for member in 0..5_000 {
        chain.member(ROOT, &member.to_string());
        chain.item(ROOT, member);
        chain.listed_value(ROOT, "x");
    }
    let (place, is_named) = chain.member(ROOT, "s");
    assert_eq!((chain.types(place), is_named), (Types::STRING, true));
    assert!(spent(&chain) < 30_000, "{}", spent(&chain));
}

#[test]
fn a_schema_on_which_too_much_was_spent_says_no_more() {
    let mut chain = chain(5_000, r#","properties":{"b":{"type":"boolean"}}"#);
    let (known, _) = chain.member(ROOT, "b");
    for member in 0..2_000 {
        chain.member(ROOT, &member.to_string());
    }
    assert_eq!(spent(&chain), MAX_WORK);
    assert_eq!(chain.member(ROOT, "s"), (OPEN, false));
    // what was found before stays
    assert_eq!(chain.member(ROOT, "b"), (known, true));
    assert_eq!(chain.types(known), Types::BOOLEAN);
}

#[test]
fn all_items_behind_a_tuple_have_one_place() {
    let mut schema = schema(r#"{"prefixItems":[{"type":"null"}],"items":{"type":"integer"}}"#);
    let first = schema.item(ROOT, 0);
    let rest = schema.item(ROOT, 1);
    assert_eq!((schema.types(first), schema.types(rest)), (Types::NULL, Types::INTEGER));
    assert!((2..100_000).all(|index| schema.item(ROOT, index) == rest));
    assert_eq!(schema.items.len(), 2);
}
