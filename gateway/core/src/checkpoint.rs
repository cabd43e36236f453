//! Opens a checkpoint directory: its spec, its prompt builder, its defaults.

use crate::conversation::Limits;
use crate::model::{self, GenerationDefaults, ModelFiles, ModelLoadError, ModelSpec};
use crate::prompt::PromptBuilder;
use crate::template::UnixClock;
use crate::tokenizer::{EngineChoice, Tokenizer};
use std::path::Path;
use std::sync::Arc;

/// How to open a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// The tokenizer engine.
    pub engine: EngineChoice,
    /// The time, for chat templates that print the date.
    pub clock: UnixClock,
}

/// Everything the gateway knows of a model.
pub struct Model {
    /// Facts and grammar.
    pub spec: Arc<dyn ModelSpec>,
    /// Conversations to token ids.
    pub prompt_builder: PromptBuilder,
    /// Sampling where a request is silent.
    pub defaults: GenerationDefaults,
}

impl Model {
    /// Usual bounds of requests to this model.
    pub fn limits(&self) -> Limits {
        let facts = self.spec.facts();
        Limits::new(facts.vocab_size, facts.max_position_embeddings, self.defaults.clone())
    }
}

/// Opens the checkpoint in `dir`.
///
/// # Errors
/// The first file that is missing, malformed or contradicts another.
pub fn open(dir: &Path, options: OpenOptions) -> Result<Model, ModelLoadError> {
    let files = ModelFiles::read(dir)?;
    let spec = model::load(&files)?;
    with_spec(&files, spec, options)
}

/// Puts a model together from a spec that is not in [`model::load`]'s list.
///
/// # Errors
/// As [`open`].
pub fn with_spec(
    files: &ModelFiles,
    spec: Arc<dyn ModelSpec>,
    options: OpenOptions,
) -> Result<Model, ModelLoadError> {
    let tokenizer = Tokenizer::open(files, options.engine)?;
    let prompt_builder = PromptBuilder::new(files, spec.clone(), tokenizer, options.clock)?;
    let defaults = spec.generation_defaults().clone();
    Ok(Model { spec, prompt_builder, defaults })
}

#[cfg(test)]
pub(crate) mod tests;
