//! Rules the shared cases leave open, each stated once.

use super::*;
use crate::openai::FinishReason;

const ALL_MODES: [ThinkingMode; 3] =
    [ThinkingMode::Enabled, ThinkingMode::Disabled, ThinkingMode::Adaptive];

fn content(reply: &Reply) -> &str {
    reply.message.content.as_deref().unwrap_or_default()
}

fn reasoning(reply: &Reply) -> &str {
    reply.message.reasoning_content.as_deref().unwrap_or_default()
}

/// Arguments of the calls of `raw` in a block, read whole and by the character.
fn arguments_of(tools: &[(&str, &str)], raw: &str) -> Vec<String> {
    let options = options(ThinkingMode::Disabled, tools);
    let reply = whole(&options, raw);
    let by_character = read(&options, characters(raw), EngineStop::Stop);
    assert!(same(by_character.clone(), reply.clone()), "{by_character:#?} {reply:#?}");
    let calls = reply.message.tool_calls.into_iter();
    let arguments: Vec<String> = calls.map(|call| call.function.arguments).collect();
    for arguments in &arguments {
        Json::parse(arguments.as_bytes()).unwrap_or_else(|error| panic!("{error}: {arguments}"));
    }
    arguments
}

fn arguments(parameters: &str, elements: &str) -> String {
    arguments_of(&[("f", parameters)], &block(&call("f", elements))).remove(0)
}

fn property(schema: &str, inside: &str) -> String {
    let parameters = format!(r#"{{"type":"object","properties":{{"p":{schema}}}}}"#);
    arguments(&parameters, &element("p", inside))
}

#[test]
fn a_leading_closer_is_swallowed_in_every_mode_that_opened_nothing() {
    for mode in [ThinkingMode::Disabled, ThinkingMode::Adaptive] {
        let reply = whole(&options(mode, &[]), "\n</mm:think>\nYes.");
        assert_eq!((reasoning(&reply), content(&reply)), ("", "\nYes."));
    }
}

#[test]
fn thinking_though_disabled_is_still_thinking() {
    let reply = whole(&options(ThinkingMode::Disabled, &[]), "<mm:think>hm</mm:think>Yes.");
    assert_eq!((reasoning(&reply), content(&reply)), ("hm", "Yes."));
}

#[test]
fn a_repeated_opener_at_the_start_is_no_text() {
    let reply = whole(&options(ThinkingMode::Enabled, &[]), "<mm:think>hm</mm:think>Yes.");
    assert_eq!((reasoning(&reply), content(&reply)), ("hm", "Yes."));
}

#[test]
fn an_opener_inside_the_thinking_is_text() {
    let reply = whole(&options(ThinkingMode::Enabled, &[]), "a <mm:think> b</mm:think>c");
    assert_eq!((reasoning(&reply), content(&reply)), ("a <mm:think> b", "c"));
}

#[test]
fn tags_in_the_answer_are_the_models_own_words() {
    let raw = "I use <mm:think> and </mm:think> tags.";
    for mode in [ThinkingMode::Disabled, ThinkingMode::Adaptive] {
        assert_eq!(content(&whole(&options(mode, &[]), raw)), raw);
    }
}

#[test]
fn white_space_between_thinking_and_a_call_is_layout() {
    let raw = format!("hm</mm:think>\n\n{}\n", block(&call("f", "")));
    let reply = whole(&options(ThinkingMode::Enabled, &[]), &raw);
    assert_eq!(reply.message.content, None);
    assert_eq!(reply.message.tool_calls.len(), 1);
}

#[test]
fn white_space_before_the_answer_is_kept() {
    let reply = whole(&options(ThinkingMode::Adaptive, &[]), "  \n  indented");
    assert_eq!(content(&reply), "  \n  indented");
    assert_eq!(content(&whole(&options(ThinkingMode::Adaptive, &[]), " \n")), " \n");
}

#[test]
fn talk_about_calls_inside_the_thinking_stays_thinking() {
    let raw = format!("I could write {MARK}<tool_call> here.</mm:think>ok");
    let reply = whole(&options(ThinkingMode::Enabled, &[]), &raw);
    assert_eq!(reasoning(&reply), format!("I could write {MARK}<tool_call> here."));
    assert_eq!(content(&reply), "ok");
    let raw = format!("Or {MARK}<tool_call>{MARK}</tool_call> so.</mm:think>ok");
    let reply = whole(&options(ThinkingMode::Enabled, &[]), &raw);
    assert_eq!(reasoning(&reply), format!("Or {MARK}<tool_call>{MARK}</tool_call> so."));
}

#[test]
fn the_mark_without_a_tag_is_text() {
    for raw in ["a ]<]minimax[>[ b", "a ]<]minimax[>[<b", "a ]<]minimax[>[<b\nc> d"] {
        let reply = whole(&options(ThinkingMode::Disabled, &[]), &format!("{raw} end"));
        assert_eq!(content(&reply), format!("{raw} end"));
    }
}

#[test]
fn structure_that_is_cut_off_is_no_text() {
    for cut in ["", "<", "<tool", "<tool_call>", "<tool_call>\n", "<invoke name=\"f"] {
        let reply = whole(&options(ThinkingMode::Disabled, &[]), &format!("Yes. {MARK}{cut}"));
        assert_eq!(content(&reply), "Yes. ", "{cut}");
    }
}

#[test]
fn a_mark_that_follows_a_failed_one_is_seen() {
    let raw = format!("{MARK}<tool_call>{MARK}<a {MARK}{MARK}<tool_call>\n{}", call("f", ""));
    let reply = whole(&options(ThinkingMode::Disabled, &[]), &raw);
    assert_eq!(reply.message.tool_calls.len(), 1, "{reply:#?}");
}

#[test]
fn a_call_without_its_block_is_a_call_if_elements_follow() {
    let raw = format!("So: {}", call("f", &element("a", "1")));
    let reply = whole(&options(ThinkingMode::Disabled, &[]), &raw);
    assert_eq!(content(&reply), "So: ");
    assert_eq!(reply.message.tool_calls[0].function.arguments, r#"{"a":"1"}"#);
    let raw = format!("The tag {MARK}<invoke name=\"f\"> begins a call.");
    assert_eq!(content(&whole(&options(ThinkingMode::Disabled, &[]), &raw)), raw);
}

#[test]
fn text_behind_a_block_that_was_not_closed_is_answer() {
    let raw = format!("{MARK}<tool_call>\n{}Now wait.{MARK}</tool_call> Yes.", call("f", ""));
    let reply = whole(&options(ThinkingMode::Disabled, &[]), &raw);
    assert_eq!(content(&reply), "Now wait. Yes.");
    assert_eq!(reply.message.tool_calls.len(), 1);
}

#[test]
fn a_call_without_a_name_is_left_out_and_the_next_one_read() {
    for broken in [
        format!("{MARK}<invoke>{}{MARK}</invoke>\n", element("a", "1")),
        format!("{MARK}<invoke name=\"\">{}{MARK}</invoke>\n", element("a", "1")),
        element("a", "1"),
        format!("{MARK}</a>"),
    ] {
        let raw = block(&format!("{broken}{}", call("f", &element("b", "2"))));
        assert_eq!(arguments_of(&[], &raw), [r#"{"b":"2"}"#], "{broken}");
        let raw = block(&format!("{}{broken}{}", call("f", ""), call("g", "")));
        assert_eq!(arguments_of(&[], &raw), ["{}", "{}"], "{broken}");
    }
}

#[test]
fn a_call_without_its_closing_tag_ends_before_the_next() {
    let open = format!("{MARK}<invoke name=\"f\">{}", element("a", "1"));
    let raw = block(&format!("{open}{}", call("g", "")));
    assert_eq!(arguments_of(&[], &raw), [r#"{"a":"1"}"#, "{}"]);
    let raw = format!("{MARK}<tool_call>{open}{MARK}</tool_call>");
    assert_eq!(arguments_of(&[], &raw), [r#"{"a":"1"}"#]);
}

#[test]
fn names_may_be_quoted_either_way_or_not_at_all() {
    for header in ["name=\"my tool\"", "name='my tool'", "name=my tool", " name = \"my tool\" "] {
        let raw = block(&format!("{MARK}<invoke {header}>{MARK}</invoke>"));
        let reply = whole(&options(ThinkingMode::Disabled, &[]), &raw);
        assert_eq!(reply.message.tool_calls[0].function.name, "my tool", "{header}");
    }
}

#[test]
fn a_cut_call_is_not_completed() {
    let parameters = r#"{"type":"object","properties":{"a":{"type":"string"},"n":{"type":"integer"},
        "l":{"type":"array","items":{"type":"integer"}}}}"#;
    let elements = format!(
        "{}{}{}",
        element("a", "x\"y"),
        element("n", "12"),
        element("l", &format!("{}{}", element("item", "3"), element("item", "4")))
    );
    let raw = block(&call("f", &elements));
    let options = options(ThinkingMode::Disabled, &[("f", parameters)]);
    let full = whole(&options, &raw).arguments.remove(0);
    let end = raw.find(&format!("{MARK}</invoke>")).unwrap() + MARK.len() + "</invoke>".len();
    for cut in (0..end).filter(|&cut| raw.is_char_boundary(cut)) {
        let reply = read(&options, [&raw[..cut]], EngineStop::Length);
        assert_eq!(reply.message.tool_calls, [], "cut at {cut}");
        assert_eq!(reply.finish_reason, FinishReason::Length);
        // what went out is the beginning of the right arguments, never a repaired end
        for arguments in &reply.arguments {
            assert!(full.starts_with(arguments.as_str()), "cut at {cut}: {arguments}");
            assert!(Json::parse(arguments.as_bytes()).is_err(), "cut at {cut}: {arguments}");
        }
    }
}

#[test]
fn nothing_is_held_back_that_cannot_become_a_marker() {
    for mode in ALL_MODES {
        let mut parser = M3Parser::new(&options(mode, &[]), &dialect::M3);
        for text in ["a", "<", " b ]", "c]", "<]mini", "x", " ]<]minimax[>[", "y"] {
            let mut events = Vec::new();
            parser.push(text, &mut events);
            let held = match text {
                "<" => mode == ThinkingMode::Enabled,
                " b ]" | "c]" | "<]mini" | " ]<]minimax[>[" => true,
                _ => false,
            };
            let shown: usize = parser.take_account().iter().map(|stretch| stretch.num_bytes).sum();
            assert!(shown > 0 || held, "{text:?} was held back");
        }
    }
}

#[test]
fn the_first_argument_goes_out_at_its_first_character() {
    let parameters =
        r#"{"type":"object","properties":{"a":{"anyOf":[{"type":"string"},{"type":"null"}]}}}"#;
    let mut parser =
        M3Parser::new(&options(ThinkingMode::Disabled, &[("f", parameters)]), &dialect::M3);
    let mut events = Vec::new();
    parser.push(&format!("{MARK}<tool_call>\n{MARK}<invoke name=\"f\">{MARK}<a>H"), &mut events);
    let fragments = events.iter().filter_map(|event| match event {
        OutputEvent::CallArguments { fragment, .. } => Some(fragment.as_str()),
        _ => None,
    });
    assert_eq!(fragments.collect::<String>(), r#"{"a":"H"#);
}

#[test]
fn the_schema_decides_the_type() {
    for (schema, text, expected) in [
        (r#"{"type":"string"}"#, "5", r#""5""#),
        (r#"{"type":"integer"}"#, " 5\n", "5"),
        (r#"{"type":"integer"}"#, "5.0", "5.0"),
        (r#"{"type":"integer"}"#, "5.5", r#""5.5""#),
        (r#"{"type":"number"}"#, "-0.50e+3", "-0.50e+3"),
        (r#"{"type":"number"}"#, "+5", r#""+5""#),
        (r#"{"type":"number"}"#, "NaN", r#""NaN""#),
        (r#"{"type":"boolean"}"#, "True", "true"),
        (r#"{"type":"boolean"}"#, "yes", r#""yes""#),
        (r#"{"type":"null"}"#, "", "null"),
        (r#"{"type":"array"}"#, "", "[]"),
        (r#"{"type":"object"}"#, " ", "{}"),
        (r#"{"type":"object"}"#, r#"{"k": [1, 2]}"#, r#"{"k":[1,2]}"#),
        (r#"{"type":"object"}"#, "no object", r#""no object""#),
        (r#"{"type":"array","items":{"type":"integer"}}"#, "7", "[7]"),
        (r#"{"type":["array","null"],"items":{"type":"string"}}"#, "a", r#"["a"]"#),
        (r#"{"type":["array","null"]}"#, "null", "null"),
        (r#"{"type":["string","null"]}"#, "nullify", r#""nullify""#),
        (r#"{"type":["integer","string"]}"#, "5", "5"),
        (r#"{"type":["integer","string"]}"#, "05", r#""05""#),
        (r#"{"type":["boolean","string"]}"#, "tru", r#""tru""#),
        (r#"{"type":["boolean","string"]}"#, "true", "true"),
        (r#"{"type":["object","string"]}"#, "{\"a\":1}", r#"{"a":1}"#),
        (r#"{"type":["object","string"]}"#, "{a", r#""{a""#),
        (r#"{"enum":["1",2,null]}"#, "1", r#""1""#),
        (r#"{"enum":["1",2,null]}"#, "2", "2"),
        (r#"{"enum":["1",2,null]}"#, "null", "null"),
        (r#"{"enum":["none","yes"]}"#, "none", r#""none""#),
        ("{}", "5", r#""5""#),
        ("true", "null", r#""null""#),
    ] {
        assert_eq!(property(schema, text), format!(r#"{{"p":{expected}}}"#), "{schema} {text:?}");
    }
}

#[test]
fn children_become_what_the_schema_says_or_what_they_look_like() {
    let items = format!("{}{}", element("item", "1"), element("item", "a"));
    let members = format!("{}{}", element("item", "1"), element("b", "2"));
    for (schema, inside, expected) in [
        ("{}", items.as_str(), r#"["1","a"]"#),
        ("{}", &members, r#"{"item":"1","b":"2"}"#),
        (r#"{"type":"object"}"#, &items, r#"{"item":["1","a"]}"#),
        (r#"{"type":"array"}"#, &members, r#"["1","2"]"#),
        (r#"{"type":"string"}"#, &items, r#""<item>1</item><item>a</item>""#),
        (r#"{"type":"integer"}"#, &items, r#""<item>1</item><item>a</item>""#),
        (r#"{"type":["object","string"]}"#, &members, r#"{"item":"1","b":"2"}"#),
        (r#"{"type":["object","array"]}"#, &items, r#"["1","a"]"#),
    ] {
        assert_eq!(property(schema, inside), format!(r#"{{"p":{expected}}}"#), "{schema}");
    }
}

#[test]
fn text_beside_children_is_kept() {
    let inside = format!("one {} two", element("k", "v"));
    for schema in ["{}", r#"{"type":"object"}"#] {
        assert_eq!(property(schema, &inside), r#"{"p":{"k":"v","$text":"one  two"}}"#);
    }
    let inside = format!("\n  {}\n", element("k", "v"));
    assert_eq!(property(r#"{"type":"object"}"#, &inside), r#"{"p":{"k":"v"}}"#);
    let inside = format!("x{}y", element("item", "v"));
    assert_eq!(property(r#"{"type":"array"}"#, &inside), r#"{"p":["x","v","y"]}"#);
}

#[test]
fn members_of_an_item_without_its_tags_make_one_item() {
    let schema = r#"{"type":"array","items":{"type":"object",
        "properties":{"name":{"type":"string"},"age":{"type":"integer"}}}}"#;
    let person = |name, age| format!("{}{}", element("name", name), element("age", age));
    let inside = format!("{}{}", person("Ann", "3"), person("Bo", "4"));
    let expected = r#"{"p":[{"name":"Ann","age":3},{"name":"Bo","age":4}]}"#;
    assert_eq!(property(schema, &inside), expected);
    let inside = format!("{}{}", person("Ann", "3"), element("item", &person("Bo", "4")));
    assert_eq!(property(schema, &inside), expected);
    // the same in a place that is written only when it is complete
    let nullable = format!(r#"{{"anyOf":[{schema},{{"type":"null"}}]}}"#);
    assert_eq!(property(&nullable, &inside), expected);
}

#[test]
fn neighbours_of_one_name_are_a_list_where_one_may_be() {
    let twice = format!("{}{}", element("p", "1"), element("p", "2"));
    let lists = format!(
        "{}{}",
        element("p", &element("item", "1")),
        element("p", &format!("{}{}", element("item", "2"), element("item", "3")))
    );
    for (schema, elements, expected) in [
        ("{}", &twice, r#"{"p":["1","2"]}"#),
        ("{}", &lists, r#"{"p":["1","2","3"]}"#),
        (r#"{"type":"array","items":{"type":"integer"}}"#, &twice, r#"{"p":[1,2]}"#),
        (r#"{"type":"array"}"#, &lists, r#"{"p":["1","2","3"]}"#),
        (r#"{"type":["array","null"]}"#, &lists, r#"{"p":["1","2","3"]}"#),
        // one value is declared, so the first one stands
        (r#"{"type":"string"}"#, &twice, r#"{"p":"1"}"#),
        (r#"{"type":"integer"}"#, &twice, r#"{"p":1}"#),
    ] {
        let parameters = format!(r#"{{"type":"object","properties":{{"p":{schema}}}}}"#);
        assert_eq!(arguments(&parameters, elements), expected, "{schema}");
        let nested = format!(r#"{{"properties":{{"o":{parameters}}}}}"#);
        let inside = element("o", elements);
        assert_eq!(arguments(&nested, &inside), format!(r#"{{"o":{expected}}}"#), "{schema}");
    }
}

#[test]
fn left_out_tags_are_supplied() {
    let parameters = r#"{"type":"object","properties":{"id":{"type":"string"},"e":{"type":"array"},
        "o":{"type":"object","properties":{"k":{"type":"string"}}},"n":{"type":"integer"}}}"#;
    // the opening tag of the first one
    let elements = format!("3{MARK}</id>{}", element("n", "1"));
    assert_eq!(arguments(parameters, &elements), r#"{"id":"3","n":1}"#);
    // a closing tag with another name
    let elements = format!("{MARK}<id>3{MARK}</ident>{}", element("n", "1"));
    assert_eq!(arguments(parameters, &elements), r#"{"id":"3","n":1}"#);
    // the closing tag of an empty list, of an object, of a string
    for (open, written) in [("e", "[]"), ("o", "{}"), ("id", r#""""#)] {
        let elements = format!("{MARK}<{open}>{}", element("n", "1"));
        assert_eq!(arguments(parameters, &elements), format!(r#"{{"{open}":{written},"n":1}}"#));
        let last = format!("{}{MARK}<{open}>", element("n", "1"));
        assert_eq!(arguments(parameters, &last), format!(r#"{{"n":1,"{open}":{written}}}"#));
    }
    let elements = format!("{MARK}<o>{}{}", element("k", "v"), element("n", "1"));
    assert_eq!(arguments(parameters, &elements), r#"{"o":{"k":"v"},"n":1}"#);
    let elements = format!("{MARK}<o>v{MARK}</k>{MARK}</o>{}", element("n", "1"));
    assert_eq!(arguments(parameters, &elements), r#"{"o":{"k":"v"},"n":1}"#);
}

#[test]
fn parameters_may_be_named_like_structure() {
    let parameters = r#"{"type":"object","properties":{"invoke":{"type":"string"},
        "tool_call":{"type":"object","properties":{"item":{"type":"integer"}}}}}"#;
    let elements =
        format!("{}{}", element("invoke", "x"), element("tool_call", &element("item", "1")));
    assert_eq!(arguments(parameters, &elements), r#"{"invoke":"x","tool_call":{"item":1}}"#);
}

#[test]
fn deep_nesting_neither_overflows_nor_fails() {
    let depth = 5000;
    let raw = format!("{MARK}<a>").repeat(depth) + &format!("{MARK}</a>").repeat(depth);
    for schema in ["{}", r##"{"properties":{"a":{"$ref":"#"}}}"##, r#"{"type":"object"}"#] {
        let options = options(ThinkingMode::Disabled, &[("f", schema)]);
        let reply = whole(&options, &block(&call("f", &raw)));
        assert_eq!(reply.message.tool_calls.len(), 1);
    }
}
