//! Roles that M3's template has no place for, put where their text is shown.

use std::borrow::Cow;

use crate::json::{Json, Object};

/// The template shows one leading `root`, then one leading `system` or `developer`, and silently
/// leaves out any that come later. So leading ones are joined, and later ones become user turns in
/// their place, which also keeps the prompt before them as it was (for the prefix cache).
pub(super) fn arrange(messages: &[Json]) -> Cow<'_, [Json]> {
    let is_instruction = |message| matches!(role(message), "root" | "system" | "developer");
    if !messages.iter().skip(1).any(is_instruction) {
        return Cow::Borrowed(messages);
    }
    let mut arranged: Vec<Json> = Vec::with_capacity(messages.len());
    let mut is_leading = true;
    for message in messages.iter().cloned() {
        let role = role(&message);
        match role {
            "root" | "system" | "developer" if is_leading => lead(message, &mut arranged),
            "root" | "system" | "developer" => arranged.push(with_role(message, "user")),
            _ => {
                is_leading = false;
                arranged.push(message);
            }
        }
    }
    Cow::Owned(arranged)
}

/// Adds an instruction to the leading ones: at most a `root` and, after it, a `developer`.
fn lead(message: Json, arranged: &mut Vec<Json>) {
    let is_root = role(&message) == "root";
    match arranged.last_mut() {
        None => arranged.push(message),
        // a root after other instructions counts as one more of them
        Some(last) if is_root == (role(last) == "root") || is_root => join(last, &message),
        Some(_) => arranged.push(message),
    }
}

fn role(message: &Json) -> &str {
    message.get("role").and_then(Json::as_str).unwrap_or_default()
}

fn with_role(mut message: Json, role: &str) -> Json {
    if let Json::Object(object) = &mut message {
        object.insert("role".to_owned(), role.into());
    }
    message
}

/// Appends the text of `message` to that of `first`, an empty line between them.
fn join(first: &mut Json, message: &Json) {
    let added = message.get("content").cloned().unwrap_or_default();
    let Json::Object(object) = first else { return };
    let content = object.get("content").cloned().unwrap_or_default();
    let joined = match (content, added) {
        (Json::String(content), Json::String(added)) if content.is_empty() => added.into(),
        (content, Json::String(added)) if added.is_empty() => content,
        (Json::String(content), Json::String(added)) => format!("{content}\n\n{added}").into(),
        (content, added) => {
            let mut parts = parts(content);
            parts.push(text_part("\n\n"));
            parts.extend(self::parts(added));
            Json::Array(parts)
        }
    };
    object.insert("content".to_owned(), joined);
}

fn parts(content: Json) -> Vec<Json> {
    match content {
        Json::Array(parts) => parts,
        Json::String(text) => vec![text_part(&text)],
        _ => Vec::new(),
    }
}

fn text_part(text: &str) -> Json {
    Json::Object(Object::from([
        ("type".to_owned(), "text".into()),
        ("text".to_owned(), text.into()),
    ]))
}
