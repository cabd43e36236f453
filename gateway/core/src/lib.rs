//! Pure request logic: what a client asked, what the model reads, what the model's text means.
//!
//! One way only: `openai` → `conversation` → `prompt` (with `template`, `tokenizer`) and
//! `detokenize` → `output` (with a model's parser) → `stop`; `anthropic` and `responses` translate at both ends.
//! No sockets, clock, threads or async.
//! Facts about one model live behind [`model::ModelSpec`], in that model's folder;
//! [`checkpoint::open`] reads a checkpoint's files and puts everything together.

pub mod anthropic;
pub mod checkpoint;
pub mod constraint;
pub mod conversation;
pub mod detokenize;
pub mod error;
pub mod json;
pub mod lark;
pub mod markers;
pub mod model;
pub mod openai;
pub mod output;
pub mod pace;
pub mod prompt;
pub mod responses;
pub mod routing;
pub mod schema;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use error::{RequestError, RequestErrorKind};
