//! Any bytes as JSON: what is read is what another reader reads, and stays itself when written.
#![no_main]

use gateway_core::json::Json;
use libfuzzer_sys::fuzz_target;

fn is_same(ours: &Json, theirs: &serde_json::Value) -> bool {
    use serde_json::Value;
    match (ours, theirs) {
        (Json::Null, Value::Null) => true,
        (Json::Bool(ours), Value::Bool(theirs)) => ours == theirs,
        (Json::Number(ours), Value::Number(theirs)) => {
            let (ours, theirs) = (ours.as_f64(), theirs.as_f64().unwrap_or(f64::NAN));
            (ours - theirs).abs() <= ours.abs() * 1e-15
        }
        (Json::String(ours), Value::String(theirs)) => ours == theirs,
        (Json::Array(ours), Value::Array(theirs)) => {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| is_same(a, b))
        }
        (Json::Object(ours), Value::Object(theirs)) => {
            ours.len() == theirs.len()
                && ours.iter().all(|(key, a)| theirs.get(&**key).is_some_and(|b| is_same(a, b)))
        }
        _ => false,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let theirs = serde_json::from_slice::<serde_json::Value>(bytes);
    match (Json::parse(bytes), theirs) {
        (Ok(ours), theirs) => {
            match theirs {
                Ok(theirs) => assert!(is_same(&ours, &theirs), "{ours:?} {theirs:?}"),
                Err(error) => {
                    // it holds no number beyond a double, and nests less deeply
                    let words = error.to_string();
                    let is_limit = words.contains("out of range") || words.contains("recursion");
                    assert!(is_limit, "{words}");
                }
            }
            let written = ours.to_compact();
            let again = Json::parse(written.as_bytes());
            assert_eq!(again.as_ref(), Ok(&ours));
        }
        (Err(error), Ok(theirs)) => panic!("{error} refuses {theirs}"),
        (Err(_), Err(_)) => {}
    }
});
