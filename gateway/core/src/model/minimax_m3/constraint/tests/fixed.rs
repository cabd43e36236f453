//! One case a rule.

use super::*;
use crate::model::minimax_m3::output::tests::{block, call, element};
use engine::Walk;

const WEATHER: &str = r#"{"type":"object","properties":{"city":{"type":"string"},
    "days":{"type":"integer","minimum":1,"maximum":14}},"required":["city"],
    "additionalProperties":false}"#;

fn demanded(rules: &OutputRules) -> Constraint {
    constraint(rules, IDS).unwrap().unwrap()
}

fn engine_of(rules: &OutputRules) -> Engine {
    Engine::new(&demanded(rules)).unwrap()
}

fn json_format(schema: &str, strict: bool) -> ResponseFormat {
    ResponseFormat::JsonSchema { name: "response".to_owned(), schema: parse(schema), strict }
}

#[test]
fn nothing_is_demanded_of_a_free_reply() {
    let free = OutputRules { parallel: true, ..OutputRules::default() };
    let tools = OutputRules { tools: vec![tool("f", WEATHER, false)].into(), ..free.clone() };
    let none = OutputRules { choice: ToolChoice::None, ..tools.clone() };
    for rules in [&free, &tools, &none] {
        assert_eq!(constraint(rules, IDS), Ok(None));
    }
    assert!(banned(&tools, IDS).is_empty());
    assert_eq!(banned(&none, IDS), vec![IDS.namespace]);
}

#[test]
fn a_forced_reply_is_one_block_of_calls_of_the_tools_it_may_use() {
    let tools = vec![tool("weather", WEATHER, false), tool("now", "{}", false)];
    let required = forced(tools.clone());
    let one = OutputRules { parallel: false, ..required.clone() };
    let named = OutputRules { choice: ToolChoice::Named("now".to_owned()), ..required.clone() };
    let choice = ToolChoice::Allowed { names: vec!["now".to_owned()], required: true };
    let allowed = OutputRules { choice, ..required.clone() };
    let (weather, now) = (call("weather", &element("city", "Köln\n<b>")), call("now", ""));
    let cases = [
        (block(&weather), [true, true, false, false]),
        (block(&now), [true, true, true, true]),
        (block(&format!("{weather}{now}")), [true, false, false, false]),
        (block(&format!("{now}{now}")), [true, false, false, true]),
        (block(""), [false; 4]),
        (format!("Sure. {}", block(&now)), [false; 4]),
        ("Sure.".to_owned(), [false; 4]),
        (String::new(), [false; 4]),
    ];
    for (place, rules) in [&required, &one, &named, &allowed].into_iter().enumerate() {
        let engine = engine_of(rules);
        for (text, accepted) in &cases {
            assert_eq!(engine.accepts(text), accepted[place], "{:?}: {text}", rules.choice);
        }
    }
    assert_eq!(demanded(&required).param, "tool_choice");
}

#[test]
fn arguments_keep_to_their_schema() {
    let engine = engine_of(&forced(vec![tool("weather", WEATHER, true)]));
    let accepts = |elements: &str| engine.accepts(&block(&call("weather", elements)));
    let city = element("city", "Bonn");
    assert!(accepts(&city) && accepts(&format!("{city}{}", element("days", "14"))));
    for wrong in [
        String::new(),
        element("days", "3"),
        format!("{city}{}", element("days", "15")),
        format!("{city}{}", element("days", "three")),
        format!("{city}{}", element("hours", "3")),
        format!("{city}{city}"),
    ] {
        assert!(!accepts(&wrong), "{wrong}");
    }
}

#[test]
fn thinking_comes_before_what_is_demanded() {
    let call = block(&call("now", ""));
    let rules = |thinking| OutputRules { thinking, ..forced(vec![tool("now", "{}", false)]) };
    let enabled = demanded(&rules(ThinkingMode::Enabled));
    assert_eq!(enabled.after_token_id, Some(IDS.think_close));
    assert!(Engine::new(&enabled).unwrap().accepts(&call));
    let adaptive = demanded(&rules(ThinkingMode::Adaptive));
    assert_eq!(adaptive.after_token_id, None);
    let engine = Engine::new(&adaptive).unwrap();
    for (before, is_right) in [
        ("<mm:think>Let me see.\n</mm:think>", true),
        ("<mm:think></mm:think>", true),
        ("</mm:think>", true),
        ("", true),
        ("<mm:think>never ends", false),
        ("words</mm:think>", false),
    ] {
        assert_eq!(engine.accepts(&format!("{before}{call}")), is_right, "{before}");
    }
    let disabled = demanded(&rules(ThinkingMode::Disabled));
    assert_eq!(disabled.after_token_id, None);
    assert!(!Engine::new(&disabled).unwrap().accepts(&format!("</mm:think>{call}")));
}

#[test]
fn a_strict_tool_binds_its_calls_and_leaves_words_free() {
    let rules = OutputRules {
        choice: ToolChoice::Auto,
        ..forced(vec![tool("weather", WEATHER, true), tool("now", "{}", false)])
    };
    let engine = engine_of(&rules);
    let right = block(&call("weather", &element("city", "Bonn")));
    let wrong = block(&call("weather", &element("town", "Bonn")));
    assert!(engine.accepts("Just words, <b>any</b>."));
    assert!(engine.accepts("") && engine.accepts(&right));
    assert!(engine.accepts(&format!("I will look.\n{right}")));
    assert!(!engine.accepts(&wrong) && !engine.accepts(&format!("I will look.\n{wrong}")));
    assert_eq!(demanded(&rules).param, "tools[0].function.parameters of weather");
}

#[test]
fn an_answer_in_a_form_or_a_call_may_come_where_both_are_wanted() {
    let rules = OutputRules {
        choice: ToolChoice::Auto,
        format: json_format(
            r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}"#,
            true,
        ),
        ..forced(vec![tool("now", "{}", false)])
    };
    let engine = engine_of(&rules);
    assert!(engine.accepts(r#"{"a":1}"#) && engine.accepts("{\n  \"a\": 1\n}"));
    assert!(engine.accepts(&block(&call("now", ""))));
    for wrong in ["", "{}", r#"{"a":"1"}"#, "words", r#" {"a":1} x"#] {
        assert!(!engine.accepts(wrong), "{wrong}");
    }
}

#[test]
fn every_form_of_an_answer_is_kept() {
    let cases = [
        (ResponseFormat::JsonObject, r#"{"any": [1]}"#, "[1]"),
        (json_format(r#"{"type":"array","items":{"type":"integer"}}"#, true), "[1, 2]", "[true]"),
        (json_format(r#"{"enum":["a","b"],"unknown":1}"#, false), "\"a\"", "\"c\""),
        (ResponseFormat::Regex("[ab]/+".to_owned()), "a//", "a"),
        (ResponseFormat::Choice(vec!["yes".into(), "n\"o\n".into()]), "n\"o\n", "maybe"),
        (ResponseFormat::Grammar("start: \"a\"+ B\nB: /b{2}/".to_owned()), "aabb", "aab"),
    ];
    for (format, right, wrong) in cases {
        for thinking in [ThinkingMode::Disabled, ThinkingMode::Adaptive, ThinkingMode::Enabled] {
            let rules = OutputRules { thinking, format: format.clone(), ..OutputRules::default() };
            let demand = demanded(&rules);
            let engine = Engine::new(&demand).unwrap_or_else(|error| panic!("{error}: {demand:?}"));
            assert!(engine.accepts(right), "{demand:?}");
            assert!(!engine.accepts(wrong), "{demand:?}");
            assert_eq!(demand.param, "response_format");
        }
    }
}

#[test]
fn strings_keep_to_patterns_lengths_and_formats() {
    let schema = r#"{"type":"object","properties":{
        "p":{"type":"string","pattern":"^[A-Z]\\d+/$"},"l":{"type":"string","maxLength":3},
        "d":{"type":"string","format":"date"},"t":{"type":"string","format":"date-time"},
        "u":{"type":"string","format":"uuid"},"i":{"type":"string","format":"ipv4"},
        "e":{"type":"string","format":"email"},"o":{"type":"string","format":"unheard-of"}},
        "required":[],"additionalProperties":false}"#;
    let engine = engine_of(&forced(vec![tool("f", schema, true)]));
    let accepts = |name: &str, text: &str| engine.accepts(&block(&call("f", &element(name, text))));
    for (name, right, wrong) in [
        ("p", "A12/", "A12"),
        ("p", "B1/", "B١/"),
        ("l", "äöü", "four"),
        ("d", "2026-02-28", "2026-02-30"),
        ("t", "2026-11-29T23:59:59.5Z", "2026-11-29 23:59"),
        ("u", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("i", "192.168.0.255", "192.168.0.256"),
        ("e", "a.b@example.org", "a.b@"),
        ("o", "anything", "]<]minimax[>[<x>"),
    ] {
        assert!(accepts(name, right), "{name}: {right}");
        assert!(!accepts(name, wrong), "{name}: {wrong}");
    }
}

#[test]
fn values_of_several_types_are_told_apart_as_the_parser_does() {
    let schema = r#"{"type":"object","properties":{"v":{"anyOf":[
        {"type":"string","maxLength":4},{"type":"integer","maximum":9},{"type":"null"},
        {"type":"object","properties":{"k":{"type":"string"}},"additionalProperties":false}]}},
        "required":["v"],"additionalProperties":false}"#;
    let rules = forced(vec![tool("f", schema, true)]);
    let engine = engine_of(&rules);
    for (inside, value) in [
        ("abc", Some(r#""abc""#)),
        ("", Some(r#""""#)),
        ("7", Some("7")),
        ("null", Some("null")),
        ("{}", Some("{}")),
        ("{k}", None),
        ("12", None),
        ("abcde", None),
    ] {
        let text = block(&call("f", &element("v", inside)));
        assert_eq!(engine.accepts(&text), value.is_some(), "{inside}");
        if let Some(value) = value {
            let arguments = read(&rules, &text).calls[0].1.to_compact();
            assert_eq!(arguments, format!("{{\"v\":{value}}}"));
        }
    }
    let nested = block(&call("f", &element("v", &element("k", "12"))));
    assert!(engine.accepts(&nested));
    assert_eq!(read(&rules, &nested).calls[0].1.to_compact(), r#"{"v":{"k":"12"}}"#);
}

#[test]
fn maps_and_tuples_are_written_as_json() {
    let schema = r##"{"type":"object","properties":{
        "m":{"type":"object","additionalProperties":{"$ref":"#/$defs/n"}},
        "t":{"type":"array","prefixItems":[{"type":"integer"},{"type":"string"}],"items":false}},
        "required":["m","t"],"additionalProperties":false,"$defs":{"n":{"type":"integer"}}}"##;
    let rules = forced(vec![tool("f", schema, true)]);
    let engine = engine_of(&rules);
    let text = |map: &str| block(&call("f", &(element("m", map) + &element("t", r#"[1,"x"]"#))));
    assert!(engine.accepts(&text(r#"{"a":1,"b c":2}"#)) && engine.accepts(&text("{}")));
    assert!(!engine.accepts(&text(r#"{"a":"1"}"#)) && engine.accepts(&text("")));
    let read = read(&rules, &text(r#"{"a":1}"#));
    assert_eq!(read.calls[0].1.to_compact(), r#"{"m":{"a":1},"t":[1,"x"]}"#);
}

#[test]
fn what_cannot_be_expressed_is_refused_by_name() {
    let refusal = |name: &str, schema: &str| {
        let error = constraint(&forced(vec![tool(name, schema, true)]), IDS).unwrap_err();
        assert_eq!(
            error.param.as_deref(),
            Some(&*format!("tools[0].function.parameters of {name}"))
        );
        error.message
    };
    let member = |schema: &str| {
        format!(r#"{{"type":"object","properties":{{"v":{schema}}},"required":["v"]}}"#)
    };
    for (schema, word) in [
        (member(r#"{"type":"string","not":{"const":"x"}}"#), "\"not\""),
        (member(r#"{"type":"string","pattern":"^a|b$"}"#), "^a|b$"),
        (member(r##"{"$ref":"#/$defs/none"}"##), "#/$defs/none"),
        (member(r#"{"oneOf":[{"type":"string"},{"type":"string","maxLength":1}]}"#), "oneOf"),
        (r#"{"type":"object","patternProperties":{"^a":{}}}"#.to_owned(), "patternProperties"),
        (r#"{"type":"object","required":["a"],"additionalProperties":false}"#.to_owned(), "\"a\""),
        (r#"{"type":"object","properties":{"<x>":{}},"required":["<x>"]}"#.to_owned(), "<x>"),
    ] {
        assert!(refusal("f", &schema).contains(word), "{schema}: {}", refusal("f", &schema));
    }
    assert!(refusal("a\"b>", "{}").contains("a\\\"b>"));
}

#[test]
fn a_long_chain_of_references_is_no_trouble_and_a_circle_is_refused() {
    let chain: Vec<String> = (0..3000)
        .map(|at| {
            format!(
                r##""d{at}":{{"type":"object","properties":{{"n":{{"$ref":"#/$defs/d{}"}}}}}}"##,
                at + 1
            )
        })
        .collect();
    let schema = format!(
        r##"{{"type":"object","properties":{{"v":{{"$ref":"#/$defs/d0"}}}},"$defs":{{{},"d3000":{{"type":"null"}}}}}}"##,
        chain.join(",")
    );
    let demand = constraint(&forced(vec![tool("f", &schema, true)]), IDS);
    assert!(matches!(demand, Ok(Some(_)) | Err(_)));
    let circle = r##"{"type":"object","properties":{"v":{"$ref":"#/$defs/a"}},"required":["v"],
        "$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}"##;
    let error = constraint(&forced(vec![tool("f", circle, true)]), IDS).unwrap_err();
    assert!(error.message.contains("circle"), "{}", error.message);
}

#[test]
fn an_answer_in_json_has_white_space_within_and_none_around_it() {
    for thinking in [ThinkingMode::Disabled, ThinkingMode::Adaptive] {
        for tools in [vec![], vec![tool("now", "{}", false)]] {
            let rules = OutputRules {
                thinking,
                choice: ToolChoice::Auto,
                format: ResponseFormat::JsonObject,
                ..forced(tools)
            };
            let engine = engine_of(&rules);
            for (text, is_right) in [
                ("{\n  \"a\": [1, {}]\n}", true),
                ("\n{}", false),
                (" {}", false),
                ("{} ", false),
                ("{}\n\n\n\n", false),
            ] {
                assert_eq!(engine.accepts(text), is_right, "{thinking:?}: {text:?}");
            }
        }
    }
}

#[test]
fn a_reply_that_ends_in_the_thinking_has_no_word_yet() {
    let rules = OutputRules {
        thinking: ThinkingMode::Adaptive,
        format: ResponseFormat::JsonObject,
        ..OutputRules::default()
    };
    let engine = engine_of(&rules);
    for seed in 0..20 {
        if let Walk::Whole(text) = engine.walk(seed * 31 + 1, 300) {
            let reply = read(&rules, &text);
            let answer = reply.content.unwrap_or_else(|| panic!("no answer in {text}"));
            assert!(matches!(Json::parse(answer.as_bytes()), Ok(Json::Object(_))), "{text}");
        }
    }
}
