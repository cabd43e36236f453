//! The files of a checkpoint directory that the gateway reads, and what can be wrong with them.

use crate::json::Json;
use crate::tokenizer::AddedToken;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelLoadError {
    /// A file that must be there is not.
    #[error("{} is missing", path.display())]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file does not say what it must.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the value and what was expected.
        message: String,
    },
    /// No model folder knows this type.
    #[error("model_type is {model_type:?}; this build serves {known}")]
    UnknownModel {
        /// What config.json says.
        model_type: String,
        /// What is known.
        known: &'static str,
    },
}

/// A checkpoint directory, its small files read.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    dir: PathBuf,
    /// `config.json`
    pub config: Json,
    /// `generation_config.json`
    pub generation_config: Option<Json>,
    /// `preprocessor_config.json`
    pub preprocessor_config: Option<Json>,
    /// `video_preprocessor_config.json`
    pub video_preprocessor_config: Option<Json>,
    /// `tokenizer_config.json`
    pub tokenizer_config: Option<Json>,
    /// Added tokens of `tokenizer.json` and those that only `tokenizer_config.json` lists.
    pub added_tokens: Vec<AddedToken>,
    /// Text of the chat template.
    pub chat_template: String,
    tokenizer: Vec<u8>,
}

impl ModelFiles {
    /// Reads the files of `dir`.
    ///
    /// # Errors
    /// The first file that is missing, unreadable or malformed, by name.
    pub fn read(dir: &Path) -> Result<Self, ModelLoadError> {
        let json = |name: &str| read_json(&dir.join(name));
        let config = json("config.json")?
            .ok_or_else(|| ModelLoadError::Missing { path: dir.join("config.json") })?;
        let tokenizer_path = dir.join("tokenizer.json");
        let tokenizer =
            read_file(&tokenizer_path)?.ok_or(ModelLoadError::Missing { path: tokenizer_path })?;
        let tokenizer_config = json("tokenizer_config.json")?;
        let mut files = Self {
            dir: dir.to_owned(),
            config,
            generation_config: json("generation_config.json")?,
            preprocessor_config: json("preprocessor_config.json")?,
            video_preprocessor_config: json("video_preprocessor_config.json")?,
            tokenizer_config,
            added_tokens: Vec::new(),
            chat_template: String::new(),
            tokenizer,
        };
        files.added_tokens = files.read_added_tokens()?;
        files.chat_template = files.read_chat_template()?;
        Ok(files)
    }

    /// An error about one of the files.
    pub fn invalid(&self, file: &str, message: impl Into<String>) -> ModelLoadError {
        ModelLoadError::Invalid { path: self.dir.join(file), message: message.into() }
    }

    /// `tokenizer.json`.
    ///
    /// # Errors
    /// A file that is not JSON.
    pub fn tokenizer_json(&self) -> Result<serde_json::Value, ModelLoadError> {
        serde_json::from_slice(&self.tokenizer)
            .map_err(|error| self.invalid("tokenizer.json", error.to_string()))
    }

    /// `model_type` of `config.json`.
    ///
    /// # Errors
    /// A file without it.
    pub fn model_type(&self) -> Result<&str, ModelLoadError> {
        self.config
            .get("model_type")
            .and_then(Json::as_str)
            .ok_or_else(|| self.invalid("config.json", "model_type is missing"))
    }

    /// Text of a special token that `tokenizer_config.json` names, such as `bos_token`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        let token = self.tokenizer_config.as_ref()?.get(name)?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }

    /// The added token with that text.
    ///
    /// # Errors
    /// A tokenizer without it.
    pub fn added_token(&self, content: &str) -> Result<&AddedToken, ModelLoadError> {
        self.added_tokens.iter().find(|token| token.content == content).ok_or_else(|| {
            self.invalid("tokenizer.json", format!("the added token {content:?} is missing"))
        })
    }

    fn read_added_tokens(&self) -> Result<Vec<AddedToken>, ModelLoadError> {
        #[derive(serde::Deserialize)]
        struct Listed {
            #[serde(default)]
            added_tokens: Vec<serde_json::Map<String, serde_json::Value>>,
        }
        let listed: Listed = serde_json::from_slice(&self.tokenizer)
            .map_err(|error| self.invalid("tokenizer.json", error.to_string()))?;
        let mut tokens = Vec::new();
        for entry in &listed.added_tokens {
            let flag = |name: &str| entry.get(name).and_then(|value| value.as_bool());
            let id = entry.get("id").and_then(|id| id.as_u64()).and_then(|id| id.try_into().ok());
            let content = entry.get("content").and_then(|content| content.as_str());
            let (Some(id), Some(content)) = (id, content) else {
                return Err(self.invalid("tokenizer.json", "an added token lacks id or content"));
            };
            tokens.push(added_token(id, content, flag));
        }
        self.merge_configured_tokens(&mut tokens)?;
        Ok(tokens)
    }

    fn merge_configured_tokens(&self, tokens: &mut Vec<AddedToken>) -> Result<(), ModelLoadError> {
        const FILE: &str = "tokenizer_config.json";
        let table =
            self.tokenizer_config.as_ref().and_then(|config| config.get("added_tokens_decoder"));
        let Some(table) = table.and_then(Json::as_object) else { return Ok(()) };
        for (key, entry) in table {
            let flag = |name: &str| match entry.get(name) {
                Some(Json::Bool(value)) => Some(*value),
                _ => None,
            };
            let (Ok(id), Some(content)) =
                (key.parse(), entry.get("content").and_then(Json::as_str))
            else {
                return Err(self.invalid(FILE, format!("added_tokens_decoder.{key} is malformed")));
            };
            match tokens.iter().find(|token| token.id == id || token.content == content) {
                None => tokens.push(added_token(id, content, flag)),
                Some(known) if known.id == id && known.content == content => {}
                Some(known) => {
                    return Err(self.invalid(
                        FILE,
                        format!(
                            "added_tokens_decoder says {id} is {content:?}, but tokenizer.json says {} is {:?}",
                            known.id, known.content
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    fn read_chat_template(&self) -> Result<String, ModelLoadError> {
        let path = self.dir.join("chat_template.jinja");
        if let Some(bytes) = read_file(&path)? {
            return String::from_utf8(bytes)
                .map_err(|_| self.invalid("chat_template.jinja", "text is not UTF-8"));
        }
        let inline = self.tokenizer_config.as_ref().and_then(|config| config.get("chat_template"));
        let named = |wanted: &str| {
            inline?.as_array()?.iter().find_map(|entry| {
                (entry.get("name")?.as_str()? == wanted).then(|| entry.get("template")?.as_str())?
            })
        };
        let text = inline.and_then(Json::as_str).or_else(|| named("default"));
        text.map(str::to_owned).ok_or(ModelLoadError::Missing { path })
    }
}

fn added_token(id: u32, content: &str, flag: impl Fn(&str) -> Option<bool>) -> AddedToken {
    let special = flag("special").unwrap_or(false);
    AddedToken {
        id,
        content: content.to_owned(),
        special,
        normalized: flag("normalized").unwrap_or(!special),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        single_word: flag("single_word").unwrap_or(false),
    }
}

fn read_file(path: &Path) -> Result<Option<Vec<u8>>, ModelLoadError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelLoadError::Unreadable { path: path.to_owned(), source }),
    }
}

fn read_json(path: &Path) -> Result<Option<Json>, ModelLoadError> {
    let Some(bytes) = read_file(path)? else { return Ok(None) };
    match Json::parse(&bytes) {
        Ok(json) => Ok(Some(json)),
        Err(error) => Err(ModelLoadError::Invalid {
            path: path.to_owned(),
            message: format!("not valid JSON: {error}"),
        }),
    }
}
