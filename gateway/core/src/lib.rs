//! Pure request logic: what a client asked, what the model reads, what the model's text means.
//!
//! One way only: `openai` → `conversation` → `prompt` (with `template`, `tokenizer`) and
//! `detokenize` → `output` (with a model's parser). No sockets, clock, threads or async.
//! Facts about one model live behind [`model::ModelSpec`], in that model's folder.

pub mod error;
pub mod model;
pub mod output;

pub use error::{RequestError, RequestErrorKind};
