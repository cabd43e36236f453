//! Renders a conversation through the checkpoint's chat template, as Jinja2 in Python would.

mod functions;
mod python;
mod values;

pub(crate) use functions::SENTINEL_VARIABLE;
pub(crate) use values::scalar_value;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, ErrorKind};

/// Gives the time as Unix seconds, for templates that print the date.
pub type UnixClock = fn() -> i64;

/// Steps that one rendering may take; a conversation of a million tokens needs a fraction.
const FUEL: u64 = 50_000_000;
/// Nested calls and includes.
const MAX_RECURSION: usize = 200;
const NAME: &str = "chat_template";

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
}

/// Why a template was refused or could not be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The source is not a template.
    #[error("the chat template cannot be read: {0}")]
    Syntax(String),
    /// The template itself refused the conversation with `raise_exception`.
    #[error("{0}")]
    Raised(String),
    /// Rendering takes too many steps.
    #[error("the conversation needs more than {FUEL} template steps")]
    TooLong,
    /// Anything else that went wrong while rendering.
    #[error("the chat template cannot render this conversation: {0}")]
    Failed(String),
}

impl ChatTemplate {
    /// Compiles `source`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] with the line.
    pub fn new(source: String, clock: UnixClock) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| TemplateError::Syntax(describe(&error)))?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        functions::install(&mut environment, clock);
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| TemplateError::Syntax(describe(&error)))?;
        Ok(Self { environment })
    }

    /// Renders with these variables.
    ///
    /// # Errors
    /// The template's own refusal, or what went wrong and where.
    pub fn render(&self, variables: Value) -> Result<String, TemplateError> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| TemplateError::Failed(describe(&error)))?;
        template.render(variables).map_err(|error| {
            if let Some(message) = functions::raised_message(&error) {
                return TemplateError::Raised(message);
            }
            match error.kind() {
                ErrorKind::OutOfFuel => TemplateError::TooLong,
                _ => TemplateError::Failed(describe(&error)),
            }
        })
    }
}

fn describe(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

#[cfg(test)]
mod tests;
