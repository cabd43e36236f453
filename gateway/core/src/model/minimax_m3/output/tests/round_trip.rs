//! Random values written as the template writes them come back, and random rubbish does no harm.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// A value with a schema that settles its type.
#[derive(Clone, Debug)]
pub(in super::super::super) struct Typed {
    pub(in super::super::super) schema: String,
    pub(in super::super::super) value: Json,
}

fn texts() -> impl Strategy<Value = String> {
    let pieces = prop_oneof![
        Just("<"),
        Just(">"),
        Just("</a>"),
        Just("]<]"),
        Just("minimax[>["),
        Just("\n"),
        Just(" "),
        Just("\\"),
        Just("\""),
        Just("5"),
        Just("null"),
        Just("{\"k\":"),
        Just("é"),
        Just("🙂"),
        Just("</mm:think>"),
        Just("&lt;"),
        Just("word"),
        Just("[1]"),
        Just("\u{1}"),
    ];
    vec(pieces, 0..8)
        .prop_map(|pieces| pieces.concat())
        // the mark itself is one token to the model: in a value it would be structure
        .prop_filter("no namespace mark", |text| !text.contains(MARK))
}

fn names() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z]{1,3}",
        Just("item".to_owned()),
        Just("-n".to_owned()),
        Just("$filter".to_owned()),
        Just("a.b[]".to_owned()),
        Just("名".to_owned()),
    ]
}

fn scalars() -> impl Strategy<Value = Typed> {
    let typed = |schema: &str, value: Json| Typed { schema: schema.to_owned(), value };
    let number =
        |literal: String| Json::Number(crate::json::Number::from_literal(&literal).unwrap());
    prop_oneof![
        4 => texts().prop_map(move |text| typed(r#"{"type":"string"}"#, text.into())),
        1 => any::<i128>().prop_map(move |value| {
            typed(r#"{"type":"integer"}"#, number(value.to_string()))
        }),
        1 => any::<f64>().prop_filter("finite", |value| value.is_finite()).prop_map(move |value| {
            typed(r#"{"type":"number"}"#, number(format!("{value:?}")))
        }),
        1 => any::<bool>().prop_map(move |value| typed(r#"{"type":"boolean"}"#, value.into())),
        1 => texts()
            .prop_filter("no null", |text| text != "null")
            .prop_map(move |text| typed(r#"{"anyOf":[{"type":"string"},{"type":"null"}]}"#, text.into())),
        // nothing is said, so it is text
        1 => texts().prop_map(move |text| typed("{}", text.into())),
    ]
}

fn members_of(members: Vec<(String, Typed)>) -> Vec<(String, Typed)> {
    let mut kept: Vec<(String, Typed)> = Vec::new();
    for (name, value) in members {
        if kept.iter().all(|(other, _)| *other != name) {
            kept.push((name, value));
        }
    }
    kept
}

fn object(members: Vec<(String, Typed)>, wrap: bool) -> Typed {
    let members = members_of(members);
    let properties = members.iter().map(|(name, member)| {
        let mut text = String::new();
        crate::json::write_string(name, &mut text);
        format!("{text}:{}", member.schema)
    });
    let properties = properties.collect::<Vec<_>>().join(",");
    let schema = format!(r#"{{"type":"object","properties":{{{properties}}}}}"#);
    let schema = if wrap { format!(r#"{{"anyOf":[{schema},{{"type":"null"}}]}}"#) } else { schema };
    let value = members.into_iter().map(|(name, member)| (name, member.value)).collect();
    Typed { schema, value: Json::Object(value) }
}

fn list(item: &Typed, length: usize, wrap: bool) -> Typed {
    let schema = format!(r#"{{"type":"array","items":{}}}"#, item.schema);
    let schema =
        if wrap { format!(r#"{{"allOf":[{schema}],"type":["array","null"]}}"#) } else { schema };
    Typed { schema, value: Json::Array(vec![item.value.clone(); length]) }
}

fn values() -> impl Strategy<Value = Typed> {
    scalars().prop_recursive(4, 40, 5, |inner| {
        prop_oneof![
            (vec((names(), inner.clone()), 0..5), any::<bool>())
                .prop_map(|(members, wrap)| object(members, wrap)),
            (inner, 0..4usize, any::<bool>())
                .prop_map(|(item, length, wrap)| list(&item, length, wrap)),
        ]
    })
}

/// The template's way of writing a value.
pub(in super::super::super) fn write(value: &Json) -> String {
    match value {
        Json::Null => String::new(),
        Json::Bool(value) => value.to_string(),
        Json::Number(number) => number.literal().to_owned(),
        Json::String(text) => text.clone(),
        Json::Array(items) => items.iter().map(|item| element("item", &write(item))).collect(),
        Json::Object(members) => {
            members.iter().map(|(name, value)| element(name, &write(value))).collect()
        }
    }
}

pub(in super::super::super) fn arguments() -> impl Strategy<Value = Typed> {
    vec((names(), values()), 0..5).prop_map(|members| object(members, false))
}

/// Something like output: markers, broken markers, tags, text.
fn rubbish() -> impl Strategy<Value = String> {
    let pieces = prop_oneof![
        4 => prop_oneof![
            Just(format!("{MARK}<tool_call>")),
            Just(format!("{MARK}</tool_call>")),
            Just(format!("{MARK}<invoke name=\"f\">")),
            Just(format!("{MARK}</invoke>")),
            Just(format!("{MARK}<invoke>")),
        ],
        4 => prop_oneof![Just("s"), Just("n"), Just("l"), Just("o"), Just("item"), Just("u"), Just("x")]
            .prop_flat_map(|name| prop_oneof![
                Just(format!("{MARK}<{name}>")),
                Just(format!("{MARK}</{name}>")),
                Just(element(name, "7")),
            ]),
        2 => prop_oneof![Just("<mm:think>"), Just("</mm:think>"), Just(MARK), Just("<mm:th"), Just("]<]mini")]
            .prop_map(str::to_owned),
        3 => texts(),
        1 => "[ \n]{0,3}",
    ];
    vec(pieces, 0..25).prop_map(|pieces| pieces.concat())
}

const RUBBISH_SCHEMA: &str = r##"{"type":"object","properties":{"s":{"type":"string"},
    "n":{"type":["integer","string"]},"l":{"type":"array","items":{"$ref":"#"}},"o":{"$ref":"#"},
    "u":{"anyOf":[{"type":"string"},{"type":"array"},{"type":"object"}]}}}"##;

fn modes() -> impl Strategy<Value = ThinkingMode> {
    prop_oneof![
        Just(ThinkingMode::Enabled),
        Just(ThinkingMode::Disabled),
        Just(ThinkingMode::Adaptive)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arguments_come_back_as_they_were(
        typed in arguments(),
        lengths in vec(1..9usize, 1..5),
    ) {
        let Json::Object(members) = &typed.value else { unreachable!() };
        let elements: String =
            members.iter().map(|(name, value)| element(name, &write(value))).collect();
        let raw = block(&call("f", &elements));
        let options = options(ThinkingMode::Disabled, &[("f", &typed.schema)]);
        for chunks in [vec![raw.as_str()], pieces(&raw, &lengths)] {
            let reply = read(&options, chunks, EngineStop::Stop);
            let found = reply.message.tool_calls[0].function.arguments.as_str();
            let found = Json::parse(found.as_bytes()).map_err(|error| {
                TestCaseError::fail(format!("{error}: {found}"))
            })?;
            prop_assert_eq!(&found, &typed.value, "{}", raw);
        }
    }

    #[test]
    fn no_output_is_an_error_and_chunking_changes_nothing(
        raw in rubbish(),
        mode in modes(),
        lengths in vec(1..9usize, 1..5),
    ) {
        let options = options(mode, &[("f", RUBBISH_SCHEMA)]);
        let whole = read(&options, [raw.as_str()], EngineStop::Stop);
        let split = read(&options, pieces(&raw, &lengths), EngineStop::Stop);
        prop_assert!(same(whole.clone(), split.clone()), "{:#?}\n{:#?}", whole, split);
        let total: usize = whole.account.iter().map(|stretch| stretch.num_bytes).sum();
        prop_assert_eq!(total, raw.len());
        let count = |class| -> usize {
            let stretches = whole.account.iter().filter(|stretch| stretch.class == class);
            stretches.map(|stretch| stretch.num_bytes).sum()
        };
        let message = &whole.message;
        prop_assert_eq!(count(TextClass::Content), message.content.as_ref().map_or(0, String::len));
        let reasoning = message.reasoning_content.as_ref().map_or(0, String::len);
        prop_assert_eq!(count(TextClass::Reasoning), reasoning);
        for call in &message.tool_calls {
            let arguments = Json::parse(call.function.arguments.as_bytes());
            prop_assert!(matches!(arguments, Ok(Json::Object(_))), "{}", call.function.arguments);
        }
    }
}

/// Time that this thread has spent on a processor, whatever else the machine does.
fn own_processor_time() -> std::time::Duration {
    let figures = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let running_ns = figures.split(' ').next().unwrap();
    std::time::Duration::from_nanos(running_ns.parse().unwrap())
}

#[test]
fn reading_takes_linear_time() {
    // if any of these were quadratic, it would take minutes
    let repeats = 5_000;
    for unit in [
        format!("{MARK}<"),
        format!("{MARK}<tool_call>"),
        format!("{MARK}<invoke name=\"f\">"),
        format!("{MARK}<s>"),
        format!("{MARK}</s>"),
        element("u", "1"),
        element("l", "1"),
        element("x", &element("item", "1")),
        format!("{MARK}<u>{MARK}<item>1"),
        "<mm:think>".to_owned(),
        "]<]minimax[>".to_owned(),
        " ".to_owned(),
    ] {
        let flood = unit.repeat(repeats);
        for raw in [flood.clone(), block(&call("f", &flood)), block(&call("unknown", &flood))] {
            let options = options(ThinkingMode::Adaptive, &[("f", RUBBISH_SCHEMA)]);
            let before = own_processor_time();
            read(&options, pieces(&raw, &[11]), EngineStop::Stop);
            let taken = own_processor_time() - before;
            assert!(taken.as_secs() < 10, "{unit}: {taken:?}");
        }
    }
}
