//! Joins rendered text and media geometry into token ids and spans.

use crate::conversation::Conversation;
use crate::detokenize::{Detokenizer, HiddenTokens};
use crate::error::{RequestError, RequestErrorKind};
use crate::json::Object;
use crate::model::{MediaKind, MediaPlan, ModelFiles, ModelLoadError, ModelSpec, PlaceholderPiece};
use crate::template::{ChatTemplate, TemplateError, UnixClock};
use crate::tokenizer::{Segment, Tokenizer};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

mod protect;

use protect::Protected;

/// A run of placeholder ids in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the first id.
    pub offset: u32,
    /// Number of ids.
    pub length: u32,
}

/// A prompt as the worker takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// All ids, media placeholders expanded.
    pub token_ids: Vec<u32>,
    /// For each media item its runs of placeholder ids, in order.
    pub spans: Vec<Vec<Span>>,
}

/// A conversation as text, before media are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(Range<usize>),
    Token(u32),
    Media { index: usize, kind: MediaKind },
}

impl Rendered {
    /// The text, media as their markers.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Makes prompts of conversations.
pub struct PromptBuilder {
    template: ChatTemplate,
    tokenizer: Tokenizer,
    spec: Arc<dyn ModelSpec>,
    /// `bos_token` and the like, as template variables.
    special_tokens: Object,
    hidden: HiddenTokens,
    markers: [(MediaKind, u32); 2],
}

impl PromptBuilder {
    /// Puts template, tokenizer and spec of one checkpoint together.
    ///
    /// # Errors
    /// A template that cannot be compiled, or markers that the tokenizer does not have.
    pub fn new(
        files: &ModelFiles,
        spec: Arc<dyn ModelSpec>,
        tokenizer: Tokenizer,
        clock: UnixClock,
    ) -> Result<Self, ModelLoadError> {
        let template = ChatTemplate::new(files.chat_template.clone(), clock)
            .map_err(|error| files.invalid("chat_template.jinja", error.to_string()))?;
        let mut special_tokens = Object::new();
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            if let Some(content) = files.special_token(name) {
                special_tokens.insert(name.to_owned(), content.into());
            }
        }
        let marker =
            |kind| files.added_token(spec.media_marker(kind)).map(|token| (kind, token.id));
        let markers = [marker(MediaKind::Image)?, marker(MediaKind::Video)?];
        let hidden = hidden_tokens(files, &*spec);
        Ok(Self { template, tokenizer, spec, special_tokens, hidden, markers })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Renders a conversation. Text of the request can neither become a control token nor pose
    /// as media.
    ///
    /// # Errors
    /// What the template refuses, and media that the template does not show.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, RequestError> {
        let messages = self.spec.arrange_messages(&conversation.messages);
        let protected = Protected::new(
            &self.tokenizer,
            self.spec.assistant_markers(),
            &messages,
            conversation,
        )?;
        let text = self.render_protected(&protected, conversation)?;
        let rendered = self.take_apart(&text, protected.sentinel());
        check_media(&rendered, conversation)?;
        Ok(rendered)
    }

    fn render_protected(
        &self,
        protected: &Protected,
        conversation: &Conversation,
    ) -> Result<String, RequestError> {
        let mode = conversation.thinking.unwrap_or_default();
        let special = self.special_tokens.iter().map(|(name, value)| (name.clone(), value.clone()));
        let variables = protected.variables(special.chain(self.spec.template_variables(mode)));
        let mut text = self.template.render(variables).map_err(template_refusal)?;
        protected.cut_continuation(&mut text)?;
        Ok(text)
    }

    /// Finds the true added tokens and takes the sentinels out.
    fn take_apart(&self, text: &str, sentinel: Option<char>) -> Rendered {
        let mut clean = String::with_capacity(text.len());
        let mut pieces = Vec::new();
        let mut num_media = 0;
        for segment in self.tokenizer.added().split(text) {
            let from = clean.len();
            match segment {
                Segment::Text(range) => {
                    match sentinel {
                        Some(sentinel) => {
                            text[range].split(sentinel).for_each(|part| clean.push_str(part));
                        }
                        None => clean.push_str(&text[range]),
                    }
                    if clean.len() > from {
                        pieces.push(Piece::Text(from..clean.len()));
                    }
                }
                Segment::Token { id, range } => {
                    clean.push_str(&text[range]);
                    let kind = self.markers.iter().find(|(_, marker)| *marker == id);
                    pieces.push(match kind {
                        Some(&(kind, _)) => {
                            num_media += 1;
                            Piece::Media { index: num_media - 1, kind }
                        }
                        None => Piece::Token(id),
                    });
                }
            }
        }
        Rendered { text: clean, pieces }
    }

    /// Expands media and tokenizes.
    ///
    /// # Errors
    /// Plans that do not belong to the rendered media, or a prompt of more than 2^32 tokens.
    pub fn expand(&self, rendered: &Rendered, plans: &[MediaPlan]) -> Result<Prompt, RequestError> {
        let mut writer = PromptWriter::new(self, rendered.text.len());
        for piece in &rendered.pieces {
            match piece {
                Piece::Text(range) => writer.text(&rendered.text[range.clone()])?,
                Piece::Token(id) => writer.token(*id)?,
                Piece::Media { index, kind } => {
                    let plan = plans.get(*index).filter(|plan| plan.kind == *kind);
                    let plan =
                        plan.ok_or_else(|| RequestError::internal("a media plan is missing"))?;
                    writer.media(plan)?;
                }
            }
        }
        let prompt = writer.finish()?;
        if prompt.spans.len() != plans.len() {
            return Err(RequestError::internal("there are more media plans than media"));
        }
        Ok(prompt)
    }

    /// Ids of a text in which control tokens are meant as such, for text completions and
    /// `/tokenize`; `add_special_tokens` adds what the tokenizer itself adds.
    ///
    /// # Errors
    /// Text with a media marker: there are no media to stand for it.
    pub fn encode_text(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, RequestError> {
        let ids = self.tokenizer.encode(text, add_special_tokens).map_err(unreadable)?;
        self.refuse_media_ids(&ids)?;
        Ok(ids)
    }

    /// Refuses ids that stand for media.
    ///
    /// # Errors
    /// The first such id and its place.
    pub fn refuse_media_ids(&self, ids: &[u32]) -> Result<(), RequestError> {
        for (at, id) in ids.iter().enumerate() {
            if self.markers.iter().any(|(_, marker)| marker == id) {
                return Err(RequestError::invalid(
                    "prompt",
                    format!(
                        "token {at} of the prompt, {id}, stands for media, which a text prompt cannot hold"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Text of ids, control tokens shown.
    pub fn decode(&self, ids: &[u32]) -> String {
        let table = self.tokenizer.bytes();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| table.get(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A detokenizer for a reply.
    pub fn detokenizer(&self, skip_special_tokens: bool) -> Detokenizer {
        let hidden =
            if skip_special_tokens { self.hidden.clone() } else { HiddenTokens::default() };
        Detokenizer::new(self.tokenizer.bytes().clone(), hidden)
    }
}

fn hidden_tokens(files: &ModelFiles, spec: &dyn ModelSpec) -> HiddenTokens {
    let is_hidden = |content: &str, special: bool| {
        !spec.output_markers().contains(&content)
            && (special || spec.control_tokens().contains(&content))
    };
    let hidden = files.added_tokens.iter().filter(|token| is_hidden(&token.content, token.special));
    HiddenTokens::new(hidden.map(|token| token.id).collect())
}

/// Collects neighbouring text so that it is tokenized as one.
struct PromptWriter<'a> {
    builder: &'a PromptBuilder,
    prompt: Prompt,
    text: Cow<'a, str>,
}

impl<'a> PromptWriter<'a> {
    fn new(builder: &'a PromptBuilder, num_bytes: usize) -> Self {
        let token_ids = Vec::with_capacity(num_bytes / 4 + 16);
        let prompt = Prompt { token_ids, spans: Vec::new() };
        Self { builder, prompt, text: Cow::Borrowed("") }
    }

    fn text(&mut self, text: &'a str) -> Result<(), RequestError> {
        if self.text.is_empty() {
            self.text = Cow::Borrowed(text);
        } else {
            self.text.to_mut().push_str(text);
        }
        Ok(())
    }

    fn end_text(&mut self) -> Result<(), RequestError> {
        let text = std::mem::take(&mut self.text);
        let ids = self.builder.tokenizer.encode_ordinary(&text).map_err(unreadable)?;
        self.prompt.token_ids.extend(ids);
        Ok(())
    }

    fn token(&mut self, id: u32) -> Result<(), RequestError> {
        self.end_text()?;
        self.prompt.token_ids.push(id);
        Ok(())
    }

    fn media(&mut self, plan: &MediaPlan) -> Result<(), RequestError> {
        let mut spans = Vec::new();
        let pad = self.builder.markers.iter().find(|(kind, _)| *kind == plan.kind);
        let pad =
            pad.map(|&(_, id)| id).ok_or_else(|| RequestError::internal("unknown media kind"))?;
        for piece in self.builder.spec.placeholder(plan) {
            match piece {
                PlaceholderPiece::Text(text) => self.text.to_mut().push_str(&text),
                PlaceholderPiece::Marker(content) => {
                    let token = self.builder.tokenizer.added().by_content(content);
                    let id = token.map(|token| token.id);
                    self.token(id.ok_or_else(|| {
                        RequestError::internal("a media marker is no added token")
                    })?)?;
                }
                PlaceholderPiece::Pads { count } => {
                    self.end_text()?;
                    let ids = &mut self.prompt.token_ids;
                    let offset = u32::try_from(ids.len()).map_err(|_| too_long())?;
                    ids.resize(ids.len() + count as usize, pad);
                    spans.push(Span { offset, length: count });
                }
            }
        }
        let total: u64 = spans.iter().map(|span| u64::from(span.length)).sum();
        if total != plan.num_tokens {
            return Err(RequestError::internal("placeholder and media plan differ in tokens"));
        }
        self.prompt.spans.push(spans);
        Ok(())
    }

    fn finish(mut self) -> Result<Prompt, RequestError> {
        self.end_text()?;
        u32::try_from(self.prompt.token_ids.len()).map_err(|_| too_long())?;
        Ok(self.prompt)
    }
}

/// In texts such as tens of millions of spaces the engine looks for the end of a word for too long,
/// and says so; any other failure is none of the request's.
fn unreadable(reason: String) -> RequestError {
    if !reason.contains("match limit") {
        return RequestError::internal(format!("the text cannot be tokenized: {reason}"));
    }
    let message = format!(
        "the text cannot be cut into words ({reason}); it holds too long a run of white space"
    );
    RequestError { param: None, ..RequestError::invalid("", message) }
}

fn too_long() -> RequestError {
    RequestError::new(
        RequestErrorKind::ContextTooLong,
        "context_length_exceeded",
        "messages",
        "the prompt has more than 2^32 tokens",
    )
}

fn template_refusal(error: TemplateError) -> RequestError {
    RequestError {
        kind: RequestErrorKind::InvalidRequest,
        message: error.to_string(),
        param: Some("messages".to_owned()),
        code: Some("chat_template"),
    }
}

/// Every media item of the request must stand in the text, in order.
fn check_media(rendered: &Rendered, conversation: &Conversation) -> Result<(), RequestError> {
    let shown: Vec<MediaKind> = rendered
        .pieces
        .iter()
        .filter_map(|piece| match piece {
            Piece::Media { kind, .. } => Some(*kind),
            _ => None,
        })
        .collect();
    let wanted = conversation.media.iter().map(|item| item.kind);
    if shown.iter().copied().eq(wanted) {
        return Ok(());
    }
    Err(RequestError::invalid(
        "messages",
        format!(
            "the messages hold {} pictures and clips, but the model's chat template shows {}; \
             media belong in user and tool messages",
            conversation.media.len(),
            shown.len()
        ),
    ))
}

#[cfg(test)]
mod tests;
