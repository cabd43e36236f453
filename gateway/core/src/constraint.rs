//! The form a reply must have, and its expression as a language that workers enforce.

use crate::json::Json;
use crate::model::{ThinkingMode, ToolSchema};
use std::sync::Arc;

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
    /// Calls of these functions only.
    Allowed {
        /// Names of declared functions; never empty.
        names: Vec<String>,
        /// At least one call.
        required: bool,
    },
}

impl ToolChoice {
    /// Whether a reply without a call would be wrong.
    pub fn is_forced(&self) -> bool {
        matches!(self, Self::Required | Self::Named(_) | Self::Allowed { required: true, .. })
    }

    /// Whether a function of that name may be called.
    pub fn admits(&self, name: &str) -> bool {
        match self {
            Self::Auto | Self::Required => true,
            Self::None => false,
            Self::Named(only) => only == name,
            Self::Allowed { names, .. } => names.iter().any(|allowed| allowed == name),
        }
    }
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
        /// What cannot be enforced is refused; else it is left out.
        strict: bool,
    },
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts; never empty.
    Choice(Vec<String>),
    /// A word of a grammar, in the dialect of the workers.
    Grammar(String),
}

/// Everything that decides which output is right.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutputRules {
    /// How the reply begins.
    pub thinking: ThinkingMode,
    /// Declared tools.
    pub tools: Arc<[ToolSchema]>,
    /// Whether calls are wanted.
    pub choice: ToolChoice,
    /// Whether more than one call is wanted.
    pub parallel: bool,
    /// What form the answer must have.
    pub format: ResponseFormat,
}

/// A language that the output must belong to; workers choose only tokens that can still lead to a
/// word of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    /// The language.
    pub spec: ConstraintSpec,
    /// It begins behind the first token with this id; without one, with the first token.
    pub after_token_id: Option<u32>,
    /// The parameter of the request that asked for it, as a chat names it.
    pub param: String,
}

/// A language, in one of the ways to write it down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConstraintSpec {
    /// A JSON schema, as text.
    JsonSchema(String),
    /// A regular expression over the whole output.
    Regex(String),
    /// A grammar in llguidance's Lark dialect.
    Lark(String),
}
