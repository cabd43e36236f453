//! Declared tools, which of them may be called, and the form of the answer.

use super::Limits;
use super::fields::{Fields, excerpt, wrong_type};
use crate::constraint::{ResponseFormat, ToolChoice};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::ToolSchema;

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
        schemas.push(schema(&function, "parameters")?);
        tools.push(shown(&function));
    }
    for (index, function) in body.array("functions")?.unwrap_or(&[]).iter().enumerate() {
        let function = Fields::of(function, format!("functions[{index}]"))?;
        schemas.push(schema(&function, "parameters")?);
        tools.push(shown(&function));
    }
    let choice = choice(body, &schemas)?;
    if choice == ToolChoice::None {
        tools.clear();
    }
    Ok(DeclaredTools { tools, schemas, choice })
}

fn shown(function: &Fields) -> Json {
    let function = Json::Object(function.members().clone());
    Json::object([("type", "function".into()), ("function", function)])
}

/// Name and schema of a function; `key` is what the protocol calls its parameters.
pub(crate) fn schema(function: &Fields, key: &str) -> Result<ToolSchema, RequestError> {
    let path = function.path("name");
    match function.string("name")? {
        Some(name) if !name.is_empty() => {
            let parameters = function.object(key)?;
            Ok(ToolSchema {
                name: name.to_owned(),
                parameters: parameters.map(|fields| Json::Object(fields.members().clone())),
                strict: function.boolean("strict")?.unwrap_or(false),
                param: function.path(key),
            })
        }
        _ => Err(RequestError::invalid(path.clone(), format!("{path} is missing or empty"))),
    }
}

/// Reads `tool_choice`, or the older `function_call`.
pub(crate) fn choice(body: &Fields, schemas: &[ToolSchema]) -> Result<ToolChoice, RequestError> {
    let (key, value) = match (body.get("tool_choice"), body.get("function_call")) {
        (Some(value), _) => ("tool_choice", value),
        (None, Some(value)) => ("function_call", value),
        (None, None) => return Ok(ToolChoice::Auto),
    };
    let unknown = || {
        RequestError::invalid(
            key,
            format!("{key} is {}; use none, auto, required or a named function", excerpt(value)),
        )
    };
    match value {
        Json::String(word) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => required(key, schemas),
            _ => Err(unknown()),
        },
        Json::Object(_) => {
            let fields = Fields::of(value, key.into())?;
            if fields.string("type")? == Some("allowed_tools") {
                // the chat protocol puts it one level deeper than the other one
                let inner = fields.object("allowed_tools")?.unwrap_or(fields);
                return allowed(key, &inner, schemas);
            }
            match name_of(&fields)? {
                Some(name) => named(key, &name, schemas).map(ToolChoice::Named),
                None => Err(unknown()),
            }
        }
        other => Err(wrong_type(key.into(), "a string or an object", other)),
    }
}

fn required(key: &str, schemas: &[ToolSchema]) -> Result<ToolChoice, RequestError> {
    if schemas.is_empty() {
        let message = format!("{key} is \"required\", but tools is empty");
        return Err(RequestError::invalid(key, message));
    }
    Ok(ToolChoice::Required)
}

/// The name by which the model knows a function, which may be one of a namespace.
pub(crate) fn spaced_name(space: Option<&str>, name: &str) -> String {
    space.map_or_else(|| name.to_owned(), |space| format!("{space}.{name}"))
}

fn name_of(fields: &Fields) -> Result<Option<String>, RequestError> {
    Ok(match fields.object("function")? {
        Some(function) => function.string("name")?.map(str::to_owned),
        None => {
            let space = fields.string("namespace")?;
            fields.string("name")?.map(|name| spaced_name(space, name))
        }
    })
}

fn named(key: &str, name: &str, schemas: &[ToolSchema]) -> Result<String, RequestError> {
    if schemas.iter().any(|schema| schema.name == name) {
        return Ok(name.to_owned());
    }
    let message = format!("{key} names the function {name:?}, which tools does not declare");
    Err(RequestError::invalid(key, message))
}

fn allowed(key: &str, fields: &Fields, schemas: &[ToolSchema]) -> Result<ToolChoice, RequestError> {
    let mut names = Vec::new();
    for (index, tool) in fields.array("tools")?.unwrap_or(&[]).iter().enumerate() {
        let tool = Fields::of(tool, format!("{}[{index}]", fields.path("tools")))?;
        match name_of(&tool)? {
            Some(name) => names.push(named(key, &name, schemas)?),
            None => {
                let path = tool.path("name");
                return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
            }
        }
    }
    if names.is_empty() {
        return Err(RequestError::invalid(key, format!("{} is empty", fields.path("tools"))));
    }
    let required = match fields.string("mode")? {
        None | Some("auto") => false,
        Some("required") => true,
        Some(other) => {
            let path = fields.path("mode");
            let message = format!("{path} is {other:?}; use auto or required");
            return Err(RequestError::invalid(path, message));
        }
    };
    Ok(ToolChoice::Allowed { names, required })
}

/// Reads `response_format`, or `structured_outputs`, which names further forms, or the fields that
/// named them before it.
pub(super) fn response_format(body: &Fields) -> Result<ResponseFormat, RequestError> {
    let older = older_forms(body);
    let structured = match body.object("structured_outputs")? {
        Some(_) if !older.is_empty() => {
            let key = older.keys().next().map_or("", String::as_str);
            let message = format!("guided_{key} cannot stand beside structured_outputs");
            return Err(RequestError::invalid(format!("guided_{key}"), message));
        }
        Some(wish) => structured_outputs(&wish)?,
        None => structured_outputs(&Fields::new(&older, "guided")).map_err(older_name)?,
    };
    let Some(format) = body.object("response_format")? else {
        return Ok(structured.unwrap_or_default());
    };
    let form = match format.string("type")? {
        Some("text") => return Ok(structured.unwrap_or_default()),
        Some("json_object") => ResponseFormat::JsonObject,
        Some("json_schema") => {
            let Some(inner) = format.object("json_schema")? else {
                let path = format.path("json_schema");
                return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
            };
            json_schema(&inner)?
        }
        other => {
            let found = other.map_or("missing".to_owned(), |word| format!("{word:?}"));
            let message =
                format!("response_format.type is {found}; use text, json_object or json_schema");
            return Err(RequestError::invalid("response_format.type", message));
        }
    };
    if structured.is_some() {
        let message = "structured_outputs cannot stand beside response_format";
        return Err(RequestError::invalid("structured_outputs", message));
    }
    Ok(form)
}

/// A named schema.
pub(crate) fn json_schema(fields: &Fields) -> Result<ResponseFormat, RequestError> {
    let Some(schema) = fields.object("schema")? else {
        let path = fields.path("schema");
        return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
    };
    Ok(ResponseFormat::JsonSchema {
        name: fields.string("name")?.unwrap_or("response").to_owned(),
        schema: Json::Object(schema.members().clone()),
        strict: fields.boolean("strict")?.unwrap_or(false),
    })
}

/// What `guided_json` and its like ask for, under the names of `structured_outputs`.
fn older_forms(body: &Fields) -> Object {
    let forms = ["json", "json_object", "regex", "choice", "grammar"];
    let given = forms.map(|form| (form, body.get(&format!("guided_{form}"))));
    let given =
        given.into_iter().filter_map(|(form, value)| Some((form.to_owned(), value?.clone())));
    given.collect()
}

fn older_name(error: RequestError) -> RequestError {
    let renamed = |text: &str| text.replace("guided.", "guided_");
    let param = error.param.as_deref().map(renamed);
    RequestError { message: renamed(&error.message), param, ..error }
}

fn structured_outputs(wish: &Fields) -> Result<Option<ResponseFormat>, RequestError> {
    let mut forms = Vec::new();
    match wish.get("json") {
        Some(schema @ Json::Object(_)) => forms.push(ResponseFormat::JsonSchema {
            name: "response".to_owned(),
            schema: schema.clone(),
            strict: true,
        }),
        Some(other) => return Err(wrong_type(wish.path("json"), "an object", other)),
        None => {}
    }
    if wish.boolean("json_object")? == Some(true) {
        forms.push(ResponseFormat::JsonObject);
    }
    if let Some(pattern) = wish.string("regex")? {
        forms.push(ResponseFormat::Regex(pattern.to_owned()));
    }
    if let Some(grammar) = wish.string("grammar")? {
        forms.push(ResponseFormat::Grammar(grammar.to_owned()));
    }
    if let Some(choices) = wish.array("choice")? {
        let texts = choices.iter().map(|choice| match choice {
            Json::String(text) if !text.is_empty() => Ok(text.clone()),
            other => Err(wrong_type(wish.path("choice"), "a list of texts, none empty", other)),
        });
        forms.push(ResponseFormat::Choice(texts.collect::<Result<_, _>>()?));
    }
    let path = || wish.here().to_owned();
    match (forms.pop(), forms.len()) {
        (Some(ResponseFormat::Choice(texts)), _) if texts.is_empty() => {
            Err(RequestError::invalid(path(), format!("{}.choice is empty", path())))
        }
        (form @ Some(_), 0) => Ok(form),
        (None, _) if wish.members().is_empty() => Ok(None),
        _ => Err(RequestError::invalid(
            path(),
            format!("{} must name one of json, json_object, regex, choice and grammar", path()),
        )),
    }
}
