//! Declared tools and which of them may be called, in Anthropic's words.

use crate::constraint::ToolChoice;
use crate::conversation::Limits;
use crate::conversation::fields::Fields;
use crate::conversation::tools::schema;
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::ToolSchema;

/// Tools of a request.
pub(super) struct DeclaredTools {
    /// In the form of templates.
    pub(super) tools: Vec<Json>,
    pub(super) schemas: Vec<ToolSchema>,
    pub(super) choice: ToolChoice,
    pub(super) parallel: bool,
}

/// Reads `tools` and `tool_choice`.
pub(super) fn read(body: &Fields, limits: &Limits) -> Result<DeclaredTools, RequestError> {
    let items = body.array("tools")?.unwrap_or(&[]);
    if items.len() > limits.max_tools {
        let (count, most) = (items.len(), limits.max_tools);
        let message = format!("tools has {count} entries; at most {most} are allowed");
        return Err(RequestError::invalid("tools", message));
    }
    let mut tools = Vec::with_capacity(items.len());
    let mut schemas = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let (tool, schema) = tool(&Fields::of(item, format!("tools[{index}]"))?)?;
        tools.push(tool);
        schemas.push(schema);
    }
    let (choice, parallel) = choice(body, &schemas)?;
    Ok(DeclaredTools { tools, schemas, choice, parallel })
}

fn tool(tool: &Fields) -> Result<(Json, ToolSchema), RequestError> {
    if let Some(kind) = tool.string("type")?
        && kind != "custom"
    {
        let path = tool.path("type");
        let message = format!("{path} is {kind:?}; only tools with an input_schema are supported");
        return Err(RequestError::invalid(path, message));
    }
    let schema = schema(tool, "input_schema")?;
    let Some(parameters) = schema.parameters.clone() else {
        let path = tool.path("input_schema");
        return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
    };
    let mut function = Object::new();
    function.insert("name".to_owned(), schema.name.as_str().into());
    if let Some(description) = tool.string("description")? {
        function.insert("description".to_owned(), description.into());
    }
    function.insert("parameters".to_owned(), parameters);
    let shown = Json::object([("type", "function".into()), ("function", Json::Object(function))]);
    Ok((shown, schema))
}

/// The choice, and whether several calls at once are wanted.
fn choice(body: &Fields, schemas: &[ToolSchema]) -> Result<(ToolChoice, bool), RequestError> {
    let Some(choice) = body.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let kind = choice.string("type")?;
    let refuse = |message: String| Err(RequestError::invalid("tool_choice", message));
    let wanted = match kind {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") if schemas.is_empty() => {
            return refuse("tool_choice is \"any\", but tools is empty".to_owned());
        }
        Some("any") => ToolChoice::Required,
        Some("tool") => match choice.string("name")? {
            Some(name) if schemas.iter().any(|schema| schema.name == name) => {
                ToolChoice::Named(name.to_owned())
            }
            Some(name) => {
                return refuse(format!(
                    "tool_choice names the tool {name:?}, which tools does not declare"
                ));
            }
            None => return refuse("tool_choice.name is missing".to_owned()),
        },
        other => {
            let found = other.map_or("missing".to_owned(), |word| format!("{word:?}"));
            return refuse(format!("tool_choice.type is {found}; use auto, any, tool or none"));
        }
    };
    Ok((wanted, parallel))
}
