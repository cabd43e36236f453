use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Json {
    Json::parse(text.as_bytes()).unwrap()
}

/// Equal, with numbers as doubles, which is all the other reader keeps, and not to the last bit.
fn equal(ours: &Json, theirs: &serde_json::Value) -> bool {
    match (ours, theirs) {
        (Json::Null, serde_json::Value::Null) => true,
        (Json::Bool(ours), serde_json::Value::Bool(theirs)) => ours == theirs,
        (Json::Number(ours), serde_json::Value::Number(theirs)) => {
            let (ours, theirs) = (ours.as_f64(), theirs.as_f64().unwrap());
            (ours - theirs).abs() <= ours.abs() * 1e-15
        }
        (Json::String(ours), serde_json::Value::String(theirs)) => ours == theirs,
        (Json::Array(ours), serde_json::Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| equal(a, b))
        }
        (Json::Object(ours), serde_json::Value::Object(theirs)) => {
            ours.len() == theirs.len()
                && ours.iter().zip(theirs).all(|((key, a), (other, b))| key == other && equal(a, b))
        }
        _ => false,
    }
}

fn documents() -> impl Strategy<Value = String> {
    let leaves = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        any::<i64>().prop_map(|value| value.to_string()),
        any::<f64>()
            .prop_filter("finite", |v| v.is_finite())
            .prop_map(|value| format!("{value:e}")),
        any::<String>().prop_map(|text| serde_json::to_string(&text).unwrap()),
        Just(r#""\ud83d\ude42\u00e9\/\b""#.to_owned()),
    ];
    leaves.prop_recursive(4, 40, 5, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5)
                .prop_map(|items| format!("[{}]", items.join(" , "))),
            proptest::collection::vec(("[a-c]{0,2}", inner), 0..5).prop_map(|members| {
                let members: Vec<_> =
                    members.iter().map(|(key, value)| format!("\"{key}\":\n{value}")).collect();
                format!("{{{}}}", members.join(","))
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn documents_read_as_the_reference_reads_them(text in documents()) {
        let ours = parse(&text);
        let theirs: serde_json::Value = serde_json::from_str(&text).unwrap();
        prop_assert!(equal(&ours, &theirs), "{}", text);
        prop_assert_eq!(&parse(&ours.to_compact()), &ours);
    }

    #[test]
    fn broken_documents_are_refused_as_the_reference_refuses_them(
        text in documents(),
        at in any::<prop::sample::Index>(),
        insert in "[\\[\\]{},:\"0-9eE+.tn\\\\ \u{1}-]{0,2}",
        num_removed in 0..3usize,
    ) {
        let characters: Vec<char> = text.chars().collect();
        let at = at.index(characters.len() + 1);
        let mut broken: String = characters[..at].iter().collect();
        broken.push_str(&insert);
        broken.extend(&characters[(at + num_removed).min(characters.len())..]);
        let ours = Json::parse(broken.as_bytes());
        let theirs: Result<serde_json::Value, _> = serde_json::from_str(&broken);
        match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) => prop_assert!(equal(ours, theirs), "{}", broken),
            (Err(_), Err(_)) => {}
            // the reference refuses numbers beyond a double
            (Ok(_), Err(error)) => prop_assert!(error.to_string().contains("out of range"), "{broken}: {error}"),
            (Err(error), Ok(_)) => prop_assert!(false, "{broken}: {error}"),
        }
    }

    #[test]
    fn bytes_never_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = Json::parse(&bytes);
    }
}

#[test]
fn digits_and_key_order_are_kept() {
    let text = r#"{"z":123456789012345678901234567890,"a":1.50,"m":-0,"b":1e400}"#;
    assert_eq!(parse(text).to_compact(), text);
}

#[test]
fn a_repeated_key_keeps_its_place_and_its_last_value() {
    assert_eq!(parse(r#"{"a":1,"b":2,"a":3}"#).to_compact(), r#"{"a":3,"b":2}"#);
}

#[test]
fn errors_say_what_and_where() {
    for (text, expected) in [
        ("{\"a\": 1,\n  é}", "expected a quoted key, found 'é' at line 2, column 3"),
        ("", "expected a value, found the end of the text at line 1, column 1"),
        ("[1 2]", "expected ',' or ']', found '2' at line 1, column 4"),
        ("{} x", "unexpected text after the value at line 1, column 4"),
        ("\"a", "unterminated string at line 1, column 3"),
        ("\"\\ud800\"", "lone surrogate in a string at line 1, column 8"),
        ("-", "malformed number at line 1, column 1"),
    ] {
        assert_eq!(Json::parse(text.as_bytes()).unwrap_err().to_string(), expected);
    }
    let error = Json::parse(b"\"\xff\"").unwrap_err();
    assert_eq!(error.to_string(), "text is not UTF-8 at line 1, column 2");
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(Json::parse(nested(MAX_DEPTH).as_bytes()).is_ok());
    let error = Json::parse(nested(MAX_DEPTH + 1).as_bytes()).unwrap_err();
    assert!(error.to_string().starts_with("nested deeper than 128 levels"), "{error}");
    assert!(Json::parse("[".repeat(1_000_000).as_bytes()).is_err());
}

#[test]
fn integers_are_told_from_fractions_by_value() {
    let number = |text| Number::from_literal(text).unwrap();
    assert_eq!(number("5").as_i64(), Some(5));
    assert_eq!(number("5.0").as_i64(), Some(5));
    assert_eq!(number("5e1").as_i64(), Some(50));
    assert_eq!(number("5.5").as_i64(), None);
    assert_eq!(number("1e300").as_i64(), None);
    assert_eq!(number("18446744073709551615").as_u64(), Some(u64::MAX));
    assert_eq!(number("-1").as_u64(), None);
    for text in ["", "+1", "01", "1.", ".5", "1e", "NaN", " 1", "1 ", "0x1", "--1"] {
        assert_eq!(Number::from_literal(text), None, "{text:?}");
    }
}

#[test]
fn a_string_of_any_length_ends_at_its_quote_and_nowhere_else() {
    for length in 0..100 {
        let plain = "é~".repeat(length / 2) + &"x".repeat(length % 2);
        let text = format!("[\"{plain}\\n{plain}\",\"{plain}\"]");
        let theirs: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(equal(&parse(&text), &theirs), "{length}");
        for bad in [format!("\"{plain}"), format!("\"{plain}\u{1f}\"")] {
            assert!(Json::parse(bad.as_bytes()).is_err(), "{length}");
        }
    }
}

#[test]
fn any_character_may_stand_anywhere_in_a_string() {
    for character in ('\0'..='\u{a0}').chain(['\u{7ff}', '\u{2028}', '\u{fffd}', '🙂']) {
        for place in 0..20 {
            let plain = format!("{}{character}{}", "!".repeat(place), "#\u{7f}".repeat(5));
            let text = serde_json::to_string(&plain).unwrap();
            assert_eq!(parse(&text), Json::String(plain), "{text}");
        }
    }
}
