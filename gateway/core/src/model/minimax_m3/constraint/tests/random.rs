//! Random schemas: what their grammars allow is read back as values that fit, and what the
//! template writes is allowed.

use super::validator::fits;
use super::*;
use crate::model::minimax_m3::output::tests::round_trip;
use crate::model::minimax_m3::output::tests::{block, call, element};
use engine::Walk;
use proptest::collection::vec;
use proptest::prelude::*;

fn schemas() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        4 => Just(r#"{"type":"string"}"#.to_owned()),
        2 => (0..3usize, 0..4usize).prop_map(|(least, more)| {
            format!(r#"{{"type":"string","minLength":{least},"maxLength":{}}}"#, least + more)
        }),
        2 => (-20..20i64, 0..50i64).prop_map(|(least, more)| {
            format!(r#"{{"type":"integer","minimum":{least},"maximum":{}}}"#, least + more)
        }),
        1 => Just(r#"{"type":"number"}"#.to_owned()),
        1 => Just(r#"{"type":"boolean"}"#.to_owned()),
        1 => Just(r#"{"type":"null"}"#.to_owned()),
        2 => Just(r#"{"enum":["a","b c","null","1"]}"#.to_owned()),
        1 => Just(r#"{"enum":["x",1,null,true,{"k":[1]}]}"#.to_owned()),
        1 => Just(r#"{"const":"only"}"#.to_owned()),
        2 => Just(r#"{"type":["string","null"]}"#.to_owned()),
        2 => Just(r#"{"type":["string","integer"],"maximum":5,"maxLength":3}"#.to_owned()),
        1 => Just("{}".to_owned()),
        1 => Just(r##"{"$ref":"#/$defs/leaf"}"##.to_owned()),
        1 => Just(r##"{"$ref":"#/$defs/node"}"##.to_owned()),
        1 => Just(r#"{"type":"object","additionalProperties":{"type":"integer"}}"#.to_owned()),
        1 => Just(r#"{"type":"string","not":{"const":"x"}}"#.to_owned()),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let name = prop_oneof!["[a-c]", Just("item".to_owned()), Just("tool_call".to_owned()), Just("a b".to_owned())];
        let members = vec((name, inner.clone(), any::<bool>()), 0..4);
        prop_oneof![
            3 => (members, any::<bool>()).prop_map(|(members, is_closed)| object(members, is_closed)),
            2 => (inner.clone(), 0..3usize, prop::option::of(0..3usize)).prop_map(|(item, least, more)| {
                let most = more.map_or(String::new(), |more| format!(r#","maxItems":{}"#, least + more));
                format!(r#"{{"type":"array","items":{item},"minItems":{least}{most}}}"#)
            }),
            2 => vec(inner.clone(), 1..4).prop_map(|parts| format!(r#"{{"anyOf":[{}]}}"#, parts.join(","))),
            1 => vec(inner, 1..3).prop_map(|parts| format!(r#"{{"oneOf":[{}]}}"#, parts.join(","))),
        ]
    })
}

fn object(members: Vec<(String, String, bool)>, is_closed: bool) -> String {
    let mut seen: Vec<(String, String, bool)> = Vec::new();
    for member in members {
        if seen.iter().all(|(name, ..)| *name != member.0) {
            seen.push(member);
        }
    }
    let properties: Vec<_> =
        seen.iter().map(|(name, part, _)| format!("\"{name}\":{part}")).collect();
    let required: Vec<_> =
        seen.iter().filter(|(.., is)| *is).map(|(name, ..)| format!("\"{name}\"")).collect();
    let closed = if is_closed { r#","additionalProperties":false"# } else { "" };
    format!(
        r#"{{"type":"object","properties":{{{}}},"required":[{}]{closed}}}"#,
        properties.join(","),
        required.join(",")
    )
}

fn roots() -> impl Strategy<Value = String> {
    vec(("[a-e]", schemas(), any::<bool>()), 0..4).prop_map(|members| {
        let root = object(members, true);
        let definitions = r##""$defs":{"leaf":{"type":"boolean"},"node":{"type":"object",
            "properties":{"next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]},
            "v":{"type":"integer","minimum":0,"maximum":9}},"required":["v"],
            "additionalProperties":false}}"##;
        format!("{},{definitions}}}", &root[..root.len() - 1])
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_a_strict_grammar_allows_is_read_as_arguments_that_fit(
        schema in roots(),
        seed in any::<u64>(),
    ) {
        let rules = forced(vec![tool("f", &schema, true)]);
        // what cannot be expressed, here or by the engine, is refused
        let Ok(Some(constraint)) = constraint(&rules, IDS) else { return Ok(()) };
        let Ok(engine) = Engine::new(&constraint) else { return Ok(()) };
        let root = parse(&schema);
        for round in 0..4 {
            let Walk::Whole(text) = engine.walk(seed.wrapping_add(round * 7919), 400) else { continue };
            let reply = read(&rules, &text);
            prop_assert_eq!(&reply.content, &None, "{}", text);
            prop_assert!(!reply.calls.is_empty(), "{}", text);
            for (name, arguments) in reply.calls {
                prop_assert_eq!(name, "f");
                prop_assert!(
                    fits(&root, &root, &arguments),
                    "{}\n{}\n{}", schema, text, arguments.to_compact()
                );
            }
        }
    }

    #[test]
    fn a_tool_that_is_not_strict_always_has_a_grammar_and_calls_that_are_read(
        schema in roots(),
        seed in any::<u64>(),
    ) {
        let rules = forced(vec![tool("f", &schema, false)]);
        let constraint = constraint(&rules, IDS);
        let constraint = constraint.map_err(|error| TestCaseError::fail(error.message))?.unwrap();
        let engine = Engine::new(&constraint)
            .map_err(|error| TestCaseError::fail(format!("{schema}\n{constraint:?}\n{error}")))?;
        if let Walk::Whole(text) = engine.walk(seed, 400) {
            let reply = read(&rules, &text);
            prop_assert!(!reply.calls.is_empty(), "{}", text);
        }
    }

    #[test]
    fn calls_as_the_template_writes_them_are_allowed(typed in round_trip::arguments()) {
        let Json::Object(members) = &typed.value else { unreachable!() };
        let rules = forced(vec![tool("f", &typed.schema, true)]);
        let engine = Engine::new(&constraint(&rules, IDS).unwrap().unwrap()).unwrap();
        let elements: String =
            members.iter().map(|(name, value)| element(name, &round_trip::write(value))).collect();
        let text = block(&call("f", &elements));
        prop_assert!(engine.accepts(&text), "{}\n{}", typed.schema, text);
        prop_assert_eq!(&read(&rules, &text).calls[0].1, &typed.value);
    }
}
