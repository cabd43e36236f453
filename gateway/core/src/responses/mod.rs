//! OpenAI's Responses protocol, without stored state, as a translation: its input items become the
//! same [`Conversation`] as a chat's, and the deltas of the reply become its events.

mod events;
mod input;

pub use events::{Ending, ResponseFolder};

use std::collections::HashMap;

use crate::constraint::{ResponseFormat, ToolChoice};
use crate::conversation::fields::{Fields, excerpt};
use crate::conversation::generation::read_responses;
use crate::conversation::tools::{choice, json_schema, schema, spaced_name};
use crate::conversation::{Conversation, Limits, Standing, StreamWish};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::{ThinkingMode, ToolSchema};
use crate::openai::RequestBody;
use serde_json::{Value, json};

/// Body of `POST /v1/responses`.
pub type ResponsesRequest = RequestBody;

/// A checked responses request.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponsesTask {
    /// What every protocol asks for.
    pub conversation: Conversation,
    /// Parameters that the response repeats.
    pub echo: Value,
}

/// Checks a responses request.
///
/// # Errors
/// `InvalidRequest` naming the field, its value and what is allowed.
pub fn check_responses(
    request: ResponsesRequest,
    limits: &Limits,
) -> Result<ResponsesTask, RequestError> {
    let body = Fields::new(&request.0, "");
    refuse_state(&body)?;
    let (messages, media) = input::read(&body, limits)?;
    let (tools, schemas) = tools(&body, limits)?;
    let tool_choice = choice(&body, &schemas)?;
    let hides_tools = tool_choice == ToolChoice::None;
    let conversation = Conversation {
        model: body.string("model")?.map(str::to_owned),
        messages,
        tools: if hides_tools { Vec::new() } else { tools },
        tool_schemas: schemas.into(),
        tool_choice,
        parallel_tool_calls: body.boolean("parallel_tool_calls")?.unwrap_or(true),
        response_format: response_format(&body)?,
        thinking: thinking(&body)?,
        template_variables: Object::new(),
        media,
        generation: read_responses(&body, limits)?,
        standing: Standing::read(&body)?,
        stream: StreamWish::plain(body.boolean("stream")?.unwrap_or(false)),
        continue_final_message: false,
        add_generation_prompt: true,
    };
    let echo = echo(&body, &conversation);
    Ok(ResponsesTask { conversation, echo })
}

/// Nothing is kept between requests here; a wish that needs it is refused, not ignored.
fn refuse_state(body: &Fields) -> Result<(), RequestError> {
    for key in ["store", "background"] {
        if body.boolean(key)? == Some(true) {
            let message = format!("{key} is true, but this gateway keeps no responses; use false");
            return Err(RequestError::invalid(key, message));
        }
    }
    for key in ["previous_response_id", "conversation", "prompt"] {
        if body.get(key).is_some() {
            let message = format!(
                "{key} is not supported: this gateway keeps no responses; send the whole input"
            );
            return Err(RequestError::invalid(key, message));
        }
    }
    Ok(())
}

fn tools(body: &Fields, limits: &Limits) -> Result<(Vec<Json>, Vec<ToolSchema>), RequestError> {
    let mut declared = Declared { most: limits.max_tools, ..Declared::default() };
    for (index, item) in body.array("tools")?.unwrap_or(&[]).iter().enumerate() {
        let tool = Fields::of(item, format!("tools[{index}]"))?;
        if tool.string("type")? != Some("namespace") {
            declared.function(&tool, None)?;
            continue;
        }
        let space = tool.string("name")?.filter(|name| !name.is_empty()).ok_or_else(|| {
            let path = tool.path("name");
            RequestError::invalid(path.clone(), format!("{path} is missing or empty"))
        })?;
        for (place, item) in tool.array("tools")?.unwrap_or(&[]).iter().enumerate() {
            let path = format!("{}[{place}]", tool.path("tools"));
            declared.function(&Fields::of(item, path)?, Some(space))?;
        }
    }
    Ok((declared.tools, declared.schemas))
}

/// The functions of a request.
#[derive(Default)]
struct Declared {
    most: usize,
    /// Namespaces, by the names under which the model knows their functions.
    spaces: HashMap<String, Option<String>>,
    tools: Vec<Json>,
    schemas: Vec<ToolSchema>,
}

impl Declared {
    fn function(&mut self, tool: &Fields, space: Option<&str>) -> Result<(), RequestError> {
        let kind = tool.string("type")?.unwrap_or("missing");
        if kind != "function" {
            let path = tool.path("type");
            let message = format!("{path} is {kind:?}; only function tools are supported");
            return Err(RequestError::invalid(path, message));
        }
        if self.schemas.len() == self.most {
            let message = format!("tools has more than {} functions, the limit here", self.most);
            return Err(RequestError::invalid("tools", message));
        }
        let mut schema = schema(tool, "parameters")?;
        schema.name = spaced_name(space, &schema.name);
        let before = self.spaces.insert(schema.name.clone(), space.map(str::to_owned));
        if before.is_some_and(|before| before.as_deref() != space) {
            let path = tool.path("name");
            let message =
                format!("{path} makes a second function that is called {:?}", schema.name);
            return Err(RequestError::invalid(path, message));
        }
        let mut function = Object::new();
        function.insert("name".to_owned(), schema.name.as_str().into());
        if let Some(description) = tool.string("description")? {
            function.insert("description".to_owned(), description.into());
        }
        if let Some(parameters) = &schema.parameters {
            function.insert("parameters".to_owned(), parameters.clone());
        }
        self.tools.push(Json::object([
            ("type", "function".into()),
            ("function", Json::Object(function)),
        ]));
        self.schemas.push(schema);
        Ok(())
    }
}

fn thinking(body: &Fields) -> Result<Option<ThinkingMode>, RequestError> {
    let Some(reasoning) = body.object("reasoning")? else { return Ok(None) };
    Ok(match reasoning.string("effort")? {
        Some("none") => Some(ThinkingMode::Disabled),
        Some("minimal" | "low" | "medium") => Some(ThinkingMode::Adaptive),
        Some("high" | "xhigh" | "max") => Some(ThinkingMode::Enabled),
        _ => None,
    })
}

fn response_format(body: &Fields) -> Result<ResponseFormat, RequestError> {
    let Some(text) = body.object("text")? else { return Ok(ResponseFormat::Text) };
    let Some(format) = text.object("format")? else { return Ok(ResponseFormat::Text) };
    match format.string("type")? {
        Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(ResponseFormat::JsonObject),
        Some("json_schema") => json_schema(&format),
        _ => {
            let path = format.path("type");
            let found = excerpt(format.get("type").unwrap_or(&Json::Null));
            let message = format!("{path} is {found}; use text, json_object or json_schema");
            Err(RequestError::invalid(path, message))
        }
    }
}

/// The parameters in force, as clients expect to find them in the response.
fn echo(body: &Fields, conversation: &Conversation) -> Value {
    let given = |key: &str, default: Value| match body.get(key) {
        Some(value) => serde_json::from_str(&value.to_compact()).unwrap_or(default),
        None => default,
    };
    json!({
        "background": false,
        "instructions": given("instructions", Value::Null),
        "max_output_tokens": conversation.generation.max_tokens,
        "metadata": given("metadata", json!({})),
        "parallel_tool_calls": conversation.parallel_tool_calls,
        "previous_response_id": null,
        "reasoning": given("reasoning", json!({"effort": null, "summary": null})),
        "service_tier": "default",
        "store": false,
        "temperature": conversation.generation.temperature,
        "text": given("text", json!({"format": {"type": "text"}})),
        "tool_choice": given("tool_choice", json!("auto")),
        "tools": given("tools", json!([])),
        "top_logprobs": 0,
        "top_p": conversation.generation.top_p,
        "truncation": "disabled",
        "user": given("user", Value::Null),
    })
}

#[cfg(test)]
mod tests;
