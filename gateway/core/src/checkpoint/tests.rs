use super::*;
use std::path::PathBuf;
use std::sync::OnceLock;

pub(crate) fn tiny_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../worker/m3stack/checkpoints/tiny")
}

pub(crate) const OPTIONS: OpenOptions = OpenOptions { engine: EngineChoice::Auto, clock: || 0 };

/// The built-in checkpoint, opened once.
pub(crate) fn tiny_model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| open(&tiny_dir(), OPTIONS).unwrap_or_else(|error| panic!("{error}")))
}

#[test]
fn the_built_in_checkpoint_opens_with_the_fast_engine() {
    let tokenizer = tiny_model().prompt_builder.tokenizer();
    assert_eq!(tokenizer.fast_engine_refusal(), None);
    assert_eq!(tokenizer.engine_name(), "fastokens");
}
