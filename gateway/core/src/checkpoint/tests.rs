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

/// A copy of the built-in checkpoint's small files, with some of them changed.
struct Checkpoint(tempfile::TempDir);

impl Checkpoint {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(tiny_dir()).unwrap() {
            let file = file.unwrap();
            if file.file_name() != "model.safetensors" {
                std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
            }
        }
        Self(dir)
    }

    fn edit(&self, file: &str, from: &str, to: &str) {
        let path = self.0.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file} has no {from}");
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
    }

    fn remove(&self, file: &str) {
        std::fs::remove_file(self.0.path().join(file)).unwrap();
    }

    fn refusal(&self) -> String {
        match open(self.0.path(), OPTIONS) {
            Ok(_) => panic!("opened"),
            Err(error) => error.to_string(),
        }
    }
}

#[test]
fn missing_files_are_named() {
    for file in ["config.json", "tokenizer.json", "chat_template.jinja"] {
        let checkpoint = Checkpoint::new();
        checkpoint.remove(file);
        let message = checkpoint.refusal();
        assert!(message.ends_with(&format!("{file} is missing")), "{message}");
    }
    // the others have defaults
    let checkpoint = Checkpoint::new();
    for file in
        ["generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
    {
        checkpoint.remove(file);
    }
    let model = open(checkpoint.0.path(), OPTIONS).unwrap();
    assert_eq!(model.spec.facts(), tiny_model().spec.facts());
    let defaults = &model.defaults;
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (1.0, 0.95, 40));
}

#[test]
fn the_generation_config_says_what_requests_leave_open() {
    let checkpoint = Checkpoint::new();
    checkpoint.edit(
        "generation_config.json",
        "\"temperature\": 1.0",
        "\"min_p\": 0.125, \"temperature\": 0.5",
    );
    checkpoint.edit("generation_config.json", "\"top_p\": 0.95", "\"top_p\": 0.75");
    checkpoint.edit("generation_config.json", "\"top_k\": 40", "\"top_k\": 7");
    let defaults = open(checkpoint.0.path(), OPTIONS).unwrap().defaults;
    let found = (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p);
    assert_eq!(found, (0.5, 0.75, 7, 0.125));
}

#[test]
fn contradictions_and_wrong_values_are_named() {
    for (file, from, to, parts) in [
        ("config.json", "\"minimax_m3_vl\"", "\"llama\"", ["\"llama\"", "minimax_m3_vl"]),
        (
            "config.json",
            "\"image_token_index\"",
            "\"image_token\"",
            ["config.json", "image_token_index is missing"],
        ),
        (
            "config.json",
            "\"image_token_index\": ",
            "\"image_token_index\": 1",
            ["image_token_index is 1", "]<]image[>["],
        ),
        ("config.json", "\"eos_token_id\": ", "\"eos_token_id\": 1", ["eos_token_id is 1", "[e~["]),
        (
            "config.json",
            "\"vocab_size\": ",
            "\"vocab_size\": -",
            ["text_config.vocab_size is -", "whole number above 0"],
        ),
        ("config.json", "{", "", ["config.json", "not valid JSON"]),
        (
            "preprocessor_config.json",
            "\"patch_size\": 14",
            "\"patch_size\": 16",
            ["preprocessor_config.json", "patch_size"],
        ),
        (
            "generation_config.json",
            "\"top_p\": 0.95",
            "\"top_p\": 1.95",
            ["generation_config.json", "top_p is 1.95"],
        ),
        (
            "generation_config.json",
            "\"temperature\": 1.0",
            "\"temperature\": \"hot\"",
            ["temperature is \"hot\"", "from 0 to 2"],
        ),
        ("tokenizer.json", "<mm:think>", "<think-mm>", ["<mm:think>", "missing"]),
        ("chat_template.jinja", "{%- set", "{%- st", ["chat_template.jinja", "cannot be read"]),
    ] {
        let checkpoint = Checkpoint::new();
        checkpoint.edit(file, from, to);
        if file == "tokenizer.json" {
            checkpoint.edit("tokenizer_config.json", from, to);
        }
        let message = checkpoint.refusal();
        for part in parts {
            assert!(message.contains(part), "{file} {to}: {message}");
        }
    }
}

#[test]
fn added_tokens_of_the_second_file_count_too_and_must_agree() {
    let checkpoint = Checkpoint::new();
    let path = checkpoint.0.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let listed = tokenizer["added_tokens"].as_array_mut().unwrap();
    listed.retain(|token| token["content"] != "<mm:think>");
    std::fs::write(&path, serde_json::to_vec(&tokenizer).unwrap()).unwrap();
    let model = open(checkpoint.0.path(), OPTIONS).unwrap();
    let ids = model.prompt_builder.encode_text("<mm:think>", false).unwrap();
    let id = tiny_model().prompt_builder.tokenizer().added().by_content("<mm:think>").unwrap().id;
    assert_eq!(ids, [id]);
    checkpoint.edit("tokenizer_config.json", "]<]minimax[>[", "]<]maximin[>[");
    let message = checkpoint.refusal();
    assert!(message.contains("tokenizer_config.json") && message.contains("maximin"), "{message}");
}

#[test]
fn the_template_may_stand_in_the_tokenizers_file() {
    let checkpoint = Checkpoint::new();
    checkpoint.remove("chat_template.jinja");
    let path = checkpoint.0.path().join("tokenizer_config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for template in [
        serde_json::json!("inline"),
        serde_json::json!([{"name": "rag", "template": "no"}, {"name": "default", "template": "inline"}]),
    ] {
        config["chat_template"] = template;
        std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
        assert_eq!(ModelFiles::read(checkpoint.0.path()).unwrap().chat_template, "inline");
    }
}

#[test]
fn the_fingerprint_is_that_of_the_agreed_lines() {
    let facts = model::ModelFacts {
        model_type: "minimax_m3_vl".to_owned(),
        vocab_size: 200_064,
        image_token_id: 200_025,
        video_token_id: 200_026,
        eos_token_id: 200_020,
        patch_size: 14,
        temporal_patch_size: 2,
        merge_size: 2,
        max_position_embeddings: 1_048_576,
    };
    let hex: String = facts.fingerprint().iter().map(|byte| format!("{byte:02x}")).collect();
    // made with Python's hashlib over the same nine lines
    assert_eq!(hex, "bdda9f40b33cb9b2f0db88af94de28faccb6fdd09bc40000f24599ec61e830a9");
}
