//! Deltas of a reply as events of output items; the whole response is what they add up to.

use std::collections::HashMap;

use crate::openai::{Delta, FinishReason, ToolCallDelta, Usage};
use serde_json::{Value, json};

/// What a response has become when its stream is over.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Why.
    pub reason: FinishReason,
    /// Token counts.
    pub usage: Usage,
}

/// Turns deltas into items: one is open at a time, and each opens, grows and closes once.
#[derive(Clone, Debug)]
pub struct ResponseFolder {
    /// The response but for status, output and usage.
    frame: Value,
    id: String,
    /// Functions of namespaces, by the names under which the model knows them.
    spaced: HashMap<String, CallName>,
    sequence: u64,
    output: Vec<Value>,
    open: Option<Open>,
}

#[derive(Clone, Debug)]
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Words,
    Thinking,
    /// Number in the reply, id and name.
    Call(usize, String, CallName),
}

/// What is called, as its tool was declared.
#[derive(Clone, Debug, PartialEq)]
struct CallName {
    namespace: Option<String>,
    name: String,
}

fn spaced_functions(tools: &Value) -> HashMap<String, CallName> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut found = HashMap::new();
    for space in list(tools).iter().filter(|tool| tool["type"] == "namespace") {
        for tool in &list(&space["tools"]) {
            if let (Some(space), Some(name)) = (space["name"].as_str(), tool["name"].as_str()) {
                let called = CallName { namespace: Some(space.to_owned()), name: name.to_owned() };
                found.insert(super::spaced_name(Some(space), name), called);
            }
        }
    }
    found
}

impl ResponseFolder {
    /// At the beginning of the response `id`, made at `created_at` by `model`; `echo` are the
    /// request's parameters.
    pub fn new(id: &str, created_at: u64, model: &str, echo: Value) -> Self {
        let mut frame = json!({
            "id": id, "object": "response", "created_at": created_at, "model": model,
            "error": null, "incomplete_details": null,
        });
        if let (Value::Object(frame), Value::Object(echo)) = (&mut frame, echo) {
            frame.extend(echo);
        }
        let spaced = spaced_functions(&frame["tools"]);
        Self { frame, id: id.to_owned(), spaced, sequence: 0, output: Vec::new(), open: None }
    }

    /// The first events.
    pub fn begin(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.event(kind, json!({"response": response}), &mut events);
        }
        events
    }

    /// The events of the next deltas.
    pub fn add(&mut self, deltas: Vec<Delta>) -> Vec<Value> {
        let mut events = Vec::new();
        for delta in deltas {
            if let Some(text) = delta.reasoning_content.or(delta.reasoning) {
                self.grow(Kind::Thinking, &text, &mut events);
            }
            if let Some(text) = delta.content {
                self.grow(Kind::Words, &text, &mut events);
            }
            for call in delta.tool_calls {
                self.call(call, &mut events);
            }
        }
        events
    }

    /// The last events; the last of them holds the whole response.
    pub fn end(&mut self, ending: &Ending) -> Vec<Value> {
        let mut events = Vec::new();
        let is_cut = ending.reason == FinishReason::Length;
        self.close(if is_cut { "incomplete" } else { "completed" }, &mut events);
        let status = if is_cut { "incomplete" } else { "completed" };
        let mut response = self.response(status);
        if is_cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let usage = &ending.usage;
        response["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens,
            },
            "total_tokens": usage.total_tokens,
        });
        self.event(&format!("response.{status}"), json!({"response": response}), &mut events);
        events
    }

    /// The only event after a failure.
    pub fn fail(&mut self, code: &str, message: &str) -> Vec<Value> {
        let mut events = Vec::new();
        let mut response = self.response("failed");
        response["error"] = json!({"code": code, "message": message});
        self.event("response.failed", json!({"response": response}), &mut events);
        events
    }

    fn response(&self, status: &str) -> Value {
        let mut response = self.frame.clone();
        response["status"] = json!(status);
        response["output"] = json!(self.output);
        response["usage"] = Value::Null;
        response
    }

    fn call(&mut self, call: ToolCallDelta, events: &mut Vec<Value>) {
        if let (Some(id), Some(name)) = (call.id, call.function.name) {
            let name = self.call_name(name);
            self.start(Kind::Call(call.index, id, name), events);
        }
        let kind = self.open.as_ref().map(|open| open.kind.clone());
        if let Some(kind @ Kind::Call(index, ..)) = kind
            && index == call.index
        {
            self.grow(kind, &call.function.arguments, events);
        }
    }

    fn call_name(&self, name: String) -> CallName {
        self.spaced.get(&name).cloned().unwrap_or(CallName { namespace: None, name })
    }

    fn start(&mut self, kind: Kind, events: &mut Vec<Value>) {
        self.close("completed", events);
        let prefix = match kind {
            Kind::Words => "msg",
            Kind::Thinking => "rs",
            Kind::Call(..) => "fc",
        };
        let tail = self.id.trim_start_matches("resp_");
        let id = format!("{prefix}_{tail}{:03}", self.output.len());
        let open = Open { kind, id, text: String::new() };
        let place = json!({"output_index": self.output.len()});
        let item = open.item("in_progress");
        self.event("response.output_item.added", with(place, json!({"item": item})), events);
        if let Some(part) = open.part() {
            let place = self.place(&open);
            self.event("response.content_part.added", with(place, json!({"part": part})), events);
        }
        self.open = Some(open);
    }

    fn grow(&mut self, kind: Kind, text: &str, events: &mut Vec<Value>) {
        if text.is_empty() {
            return;
        }
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.start(kind, events);
        }
        let Some(mut open) = self.open.take() else { return };
        open.text.push_str(text);
        let mut news = json!({"delta": text});
        if open.kind == Kind::Words {
            news["logprobs"] = json!([]);
        }
        let name = format!("response.{}.delta", open.event_name());
        self.event(&name, with(self.place(&open), news), events);
        self.open = Some(open);
    }

    fn close(&mut self, status: &str, events: &mut Vec<Value>) {
        let Some(open) = self.open.take() else { return };
        let key = if matches!(open.kind, Kind::Call(..)) { "arguments" } else { "text" };
        let mut news = json!({});
        news[key] = json!(open.text);
        match &open.kind {
            Kind::Words => news["logprobs"] = json!([]),
            Kind::Call(_, _, called) => news["name"] = json!(called.name),
            Kind::Thinking => {}
        }
        let name = format!("response.{}.done", open.event_name());
        self.event(&name, with(self.place(&open), news), events);
        if let Some(part) = open.part() {
            let place = self.place(&open);
            self.event("response.content_part.done", with(place, json!({"part": part})), events);
        }
        let item = open.item(status);
        let place = json!({"output_index": self.output.len()});
        self.event("response.output_item.done", with(place, json!({"item": item})), events);
        self.output.push(item);
    }

    fn place(&self, open: &Open) -> Value {
        let mut place = json!({"item_id": open.id, "output_index": self.output.len()});
        if !matches!(open.kind, Kind::Call(..)) {
            place["content_index"] = json!(0);
        }
        place
    }

    fn event(&mut self, kind: &str, members: Value, events: &mut Vec<Value>) {
        let head = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        events.push(with(head, members));
    }
}

impl Open {
    fn event_name(&self) -> &'static str {
        match self.kind {
            Kind::Words => "output_text",
            Kind::Thinking => "reasoning_text",
            Kind::Call(..) => "function_call_arguments",
        }
    }

    fn part(&self) -> Option<Value> {
        let text = &self.text;
        match self.kind {
            Kind::Words => Some(json!({
                "type": "output_text", "text": text, "annotations": [], "logprobs": [],
            })),
            Kind::Thinking => Some(json!({"type": "reasoning_text", "text": text})),
            Kind::Call(..) => None,
        }
    }

    fn item(&self, status: &str) -> Value {
        let content: Vec<Value> =
            if self.text.is_empty() { Vec::new() } else { self.part().into_iter().collect() };
        match &self.kind {
            Kind::Words => json!({
                "id": self.id, "type": "message", "role": "assistant", "status": status,
                "content": content,
            }),
            Kind::Thinking => json!({
                "id": self.id, "type": "reasoning", "summary": [], "content": content,
                "status": status,
            }),
            Kind::Call(_, call_id, called) => {
                let mut item = json!({
                    "id": self.id, "type": "function_call", "call_id": call_id,
                    "name": called.name, "arguments": self.text, "status": status,
                });
                if let Some(namespace) = &called.namespace {
                    item["namespace"] = json!(namespace);
                }
                item
            }
        }
    }
}

fn with(mut object: Value, members: Value) -> Value {
    if let (Value::Object(object), Value::Object(members)) = (&mut object, members) {
        object.extend(members);
    }
    object
}
