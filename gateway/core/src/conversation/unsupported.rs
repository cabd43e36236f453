//! Fields that other servers obey and this one does not: ignoring them would change the answer in
//! silence, so they are refused by name. All else that is unknown is tolerated, as the API does.

use super::fields::{Fields, excerpt};
use crate::error::RequestError;
use crate::json::Json;

/// Name, what it is when it asks for nothing, and what to do instead.
const FIELDS: [(&str, Nothing, &str); 11] = [
    ("audio", Nothing::Absent, "answers are text"),
    ("bad_words", Nothing::Empty, "name tokens in banned_token_ids or logit_bias"),
    ("chat_template", Nothing::Absent, "the checkpoint's own is used; set chat_template_kwargs"),
    ("media_io_kwargs", Nothing::Empty, "set fps or max_long_side_pixel at the clip"),
    ("mm_processor_kwargs", Nothing::Empty, "set detail or max_long_side_pixel at the picture"),
    ("modalities", Nothing::Text, "answers are text"),
    ("prompt_logprobs", Nothing::Empty, "log-probabilities are given of the answer only"),
    (
        "thinking_token_budget",
        Nothing::Empty,
        "limit max_tokens, or set thinking to {\"type\": \"disabled\"}",
    ),
    ("truncate_prompt_tokens", Nothing::Empty, "shorten the prompt"),
    ("use_beam_search", Nothing::Empty, "ask for n samples"),
    ("web_search_options", Nothing::Absent, "declare a tool that searches"),
];

/// Clients send what is off, too: `null` always is.
#[derive(Clone, Copy, PartialEq)]
enum Nothing {
    /// Any other value asks for something.
    Absent,
    /// `false`, or nothing inside.
    Empty,
    /// A list of no more than `"text"`.
    Text,
}

impl Nothing {
    fn is(self, value: &Json) -> bool {
        match (self, value) {
            (Self::Empty | Self::Text, Json::Array(items)) if items.is_empty() => true,
            (Self::Empty, Json::Bool(value)) => !value,
            (Self::Empty, Json::Object(members)) => members.is_empty(),
            (Self::Text, Json::Array(items)) => {
                items.iter().all(|item| item.as_str() == Some("text"))
            }
            _ => false,
        }
    }
}

/// Refuses a request that asks for something that is not built.
pub(super) fn refuse(body: &Fields) -> Result<(), RequestError> {
    for (name, nothing, instead) in FIELDS {
        if let Some(value) = body.get(name).filter(|value| !nothing.is(value)) {
            let message =
                format!("{name} is {}, which is not supported here; {instead}", excerpt(value));
            return Err(RequestError::invalid(name, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{chat, refusal};
    use super::{FIELDS, Nothing};

    fn with(name: &str, value: &str) -> String {
        format!(r#"{{"messages":[{{"role":"user","content":"a"}}],"{name}":{value}}}"#)
    }

    #[test]
    fn what_is_not_built_is_refused_by_name_and_what_is_off_is_not() {
        for (name, nothing, instead) in FIELDS {
            for value in ["true", "[\"a\"]", "1", "\"a\"", "{\"a\":1}", "[\"text\",\"audio\"]"] {
                let (param, message) = refusal(chat(&with(name, value)));
                assert_eq!(param, name);
                assert!(message.contains(name) && message.ends_with(instead), "{message}");
            }
            let off: &[&str] = match nothing {
                Nothing::Absent => &["null"],
                Nothing::Empty => &["null", "false", "[]", "{}"],
                Nothing::Text => &["null", "[]", "[\"text\"]"],
            };
            for value in off {
                assert!(chat(&with(name, value)).is_ok(), "{name}: {value}");
            }
            let asks = chat(&with(name, "{}"));
            assert_eq!(asks.is_err(), nothing != Nothing::Empty, "{name}");
        }
    }
}
