//! Declared tools, which of them may be called, and the form of the answer.

use super::Limits;
use super::fields::{Fields, excerpt, wrong_type};
use crate::error::RequestError;
use crate::json::Json;
use crate::model::ToolSchema;

/// Whether calls are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls.
    None,
    /// At least one call.
    Required,
    /// A call of that function.
    Named(String),
}

/// What form the answer must have.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema {
        /// The schema's name.
        name: String,
        /// The schema.
        schema: Json,
        /// Whether it must hold exactly.
        strict: bool,
    },
}

/// Tools of a request.
pub(super) struct DeclaredTools {
    pub(super) tools: Vec<Json>,
    pub(super) schemas: Vec<ToolSchema>,
    pub(super) choice: ToolChoice,
}

/// Reads `tools`, the older `functions`, and `tool_choice`.
pub(super) fn read(body: &Fields, limits: &Limits) -> Result<DeclaredTools, RequestError> {
    let mut tools = Vec::new();
    let mut schemas = Vec::new();
    let declared = body.array("tools")?.unwrap_or(&[]);
    if declared.len() > limits.max_tools {
        return Err(RequestError::invalid(
            "tools",
            format!(
                "tools has {} entries; at most {} are allowed",
                declared.len(),
                limits.max_tools
            ),
        ));
    }
    for (index, tool) in declared.iter().enumerate() {
        let tool_fields = Fields::of(tool, format!("tools[{index}]"))?;
        // some clients send the function object alone
        let function = match tool_fields.object("function")? {
            Some(function) => function,
            None if tool_fields.get("name").is_some() => tool_fields.clone(),
            None => {
                let path = tool_fields.path("function");
                return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
            }
        };
        schemas.push(schema(&function)?);
        tools.push(Json::object([
            ("type", "function".into()),
            ("function", Json::Object(function.members().clone())),
        ]));
    }
    for (index, function) in body.array("functions")?.unwrap_or(&[]).iter().enumerate() {
        let function = Fields::of(function, format!("functions[{index}]"))?;
        schemas.push(schema(&function)?);
        tools.push(Json::object([
            ("type", "function".into()),
            ("function", Json::Object(function.members().clone())),
        ]));
    }
    let choice = choice(body, &schemas)?;
    if choice == ToolChoice::None {
        tools.clear();
    }
    Ok(DeclaredTools { tools, schemas, choice })
}

fn schema(function: &Fields) -> Result<ToolSchema, RequestError> {
    let path = function.path("name");
    match function.string("name")? {
        Some(name) if !name.is_empty() => {
            let parameters = function.object("parameters")?;
            Ok(ToolSchema {
                name: name.to_owned(),
                parameters: parameters.map(|fields| Json::Object(fields.members().clone())),
            })
        }
        _ => Err(RequestError::invalid(path.clone(), format!("{path} is missing or empty"))),
    }
}

/// Reads `tool_choice`.
pub(crate) fn choice(body: &Fields, schemas: &[ToolSchema]) -> Result<ToolChoice, RequestError> {
    let Some(value) = body.get("tool_choice") else { return Ok(ToolChoice::Auto) };
    let unknown = |value: &Json| {
        RequestError::invalid(
            "tool_choice",
            format!(
                "tool_choice is {}; use none, auto, required or a named function",
                excerpt(value)
            ),
        )
    };
    match value {
        Json::String(word) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" if schemas.is_empty() => Err(RequestError::invalid(
                "tool_choice",
                "tool_choice is \"required\", but tools is empty",
            )),
            "required" => Ok(ToolChoice::Required),
            _ => Err(unknown(value)),
        },
        Json::Object(_) => {
            let fields = Fields::of(value, "tool_choice".into())?;
            let name = match fields.object("function")? {
                Some(function) => function.string("name")?,
                None => fields.string("name")?,
            };
            let Some(name) = name else { return Err(unknown(value)) };
            if !schemas.iter().any(|schema| schema.name == name) {
                return Err(RequestError::invalid(
                    "tool_choice",
                    format!(
                        "tool_choice names the function {name:?}, which tools does not declare"
                    ),
                ));
            }
            Ok(ToolChoice::Named(name.to_owned()))
        }
        other => Err(wrong_type("tool_choice".into(), "a string or an object", other)),
    }
}

/// Reads `response_format`.
pub(super) fn response_format(body: &Fields) -> Result<ResponseFormat, RequestError> {
    let Some(format) = body.object("response_format")? else { return Ok(ResponseFormat::Text) };
    match format.string("type")? {
        None | Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(ResponseFormat::JsonObject),
        Some("json_schema") => {
            let Some(inner) = format.object("json_schema")? else {
                let path = format.path("json_schema");
                return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
            };
            let Some(schema) = inner.object("schema")? else {
                let path = inner.path("schema");
                return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
            };
            Ok(ResponseFormat::JsonSchema {
                name: inner.string("name")?.unwrap_or("response").to_owned(),
                schema: Json::Object(schema.members().clone()),
                strict: inner.boolean("strict")?.unwrap_or(false),
            })
        }
        Some(other) => Err(RequestError::invalid(
            "response_format.type",
            format!("response_format.type is {other:?}; use text, json_object or json_schema"),
        )),
    }
}
