//! Fields that other servers obey and this one does not: ignoring them would change the answer in
//! silence, so they are refused by name. All else that is unknown is tolerated, as the API does.

use super::fields::{Fields, excerpt};
use crate::error::RequestError;
use crate::json::Json;

/// Name, and what to do instead.
const FIELDS: [(&str, &str); 5] = [
    ("bad_words", "name tokens in banned_token_ids or logit_bias"),
    ("prompt_logprobs", "log-probabilities are given of the answer only"),
    ("thinking_token_budget", "limit max_tokens, or set thinking to {\"type\": \"disabled\"}"),
    ("truncate_prompt_tokens", "shorten the prompt"),
    ("use_beam_search", "ask for n samples"),
];

/// Refuses a request that asks for something that is not built.
pub(super) fn refuse(body: &Fields) -> Result<(), RequestError> {
    for (name, instead) in FIELDS {
        if let Some(value) = body.get(name).filter(|value| asks_for_something(value)) {
            let message =
                format!("{name} is {}, which is not supported here; {instead}", excerpt(value));
            return Err(RequestError::invalid(name, message));
        }
    }
    Ok(())
}

/// Clients send what is off, too.
fn asks_for_something(value: &Json) -> bool {
    match value {
        Json::Bool(value) => *value,
        Json::Array(items) => !items.is_empty(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{chat, refusal};
    use super::FIELDS;

    fn with(name: &str, value: &str) -> String {
        format!(r#"{{"messages":[{{"role":"user","content":"a"}}],"{name}":{value}}}"#)
    }

    #[test]
    fn what_is_not_built_is_refused_by_name_and_what_is_off_is_not() {
        for (name, instead) in FIELDS {
            for value in ["true", "[\"a\"]", "1", "\"a\""] {
                let (param, message) = refusal(chat(&with(name, value)));
                assert_eq!(param, name);
                assert!(message.contains(name) && message.ends_with(instead), "{message}");
            }
            for value in ["null", "false", "[]"] {
                assert!(chat(&with(name, value)).is_ok(), "{name}: {value}");
            }
        }
    }
}
