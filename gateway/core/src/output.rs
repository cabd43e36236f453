//! The model's text as events, and folding events into replies.

use crate::openai::{
    AssistantMessage, Delta, FinishReason, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta,
};
use sha2::{Digest, Sha256};

/// One piece of meaning in the model's output. Every byte of output ends in exactly one event,
/// or is markup that no reader sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// Text of the thinking part.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A tool call begins.
    CallStart {
        /// 0-based number of the call in this reply.
        index: usize,
        /// Name as the model wrote it.
        name: String,
    },
    /// The next fragment of a call's arguments; all fragments together are one JSON object.
    CallArguments {
        /// Number of the call.
        index: usize,
        /// JSON text.
        fragment: String,
    },
    /// The call is complete.
    CallEnd {
        /// Number of the call.
        index: usize,
    },
}

/// What a stretch of output turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TextClass {
    /// Shown as thinking.
    Reasoning,
    /// Shown as the answer.
    Content,
    /// Name and arguments of a call.
    Call,
    /// Markers and white space between them.
    Markup,
}

/// The next `num_bytes` of the output and what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// What they are.
    pub class: TextClass,
    /// How many.
    pub num_bytes: usize,
}

/// An incremental reader of one model's output grammar; any chunking gives the same events up to
/// joining neighbours of the same kind.
pub trait OutputParser: Send {
    /// Reads the next text; appends the events that are certain now.
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>);

    /// The output has ended (also by length): appends what was held back.
    fn finish(&mut self, events: &mut Vec<OutputEvent>);

    /// Takes the account of the bytes decided since the last call: in order, without gaps, so
    /// that tokens can be told apart by what their text became.
    fn take_account(&mut self) -> Vec<Stretch>;

    /// The same at the end of `account`, whose memory is used again and again.
    fn add_account(&mut self, account: &mut Vec<Stretch>) {
        account.append(&mut self.take_account());
    }
}

/// Tells for each token what its text became.
#[derive(Clone, Debug, Default)]
pub struct TokenLedger {
    /// Bytes of the tokens that are not told yet.
    open: std::collections::VecDeque<usize>,
    /// Bytes of the first open token that are told already, and what they were.
    partial: Option<(usize, TextClass)>,
}

impl TokenLedger {
    /// A token has added `num_bytes` of text.
    pub fn push_token(&mut self, num_bytes: usize) {
        self.open.push_back(num_bytes);
    }

    /// Settles tokens by the parser's account: one class for each token that is complete, in
    /// order. A token is content if any of its bytes are, else what its first byte is; a token
    /// without bytes of its own takes the class of its neighbour.
    pub fn settle(&mut self, account: &[Stretch], classes: &mut Vec<TextClass>) {
        for stretch in account {
            let mut left = stretch.num_bytes;
            while left > 0 || self.front_is_empty() {
                let Some(&total) = self.open.front() else { return };
                let (told, class) = self.partial.unwrap_or((0, stretch.class));
                let class = match stretch.class {
                    TextClass::Content if left > 0 => TextClass::Content,
                    _ => class,
                };
                let taken = left.min(total - told);
                left -= taken;
                if told + taken < total {
                    self.partial = Some((told + taken, class));
                    break;
                }
                self.open.pop_front();
                self.partial = None;
                classes.push(class);
            }
        }
    }

    /// The reply has ended: tokens that are still open carry no text of their own.
    pub fn finish(&mut self, classes: &mut Vec<TextClass>) {
        let class = self.partial.take().map_or(TextClass::Markup, |(_, class)| class);
        classes.extend(self.open.drain(..).map(|_| class));
    }

    fn front_is_empty(&self) -> bool {
        self.open.front() == Some(&0)
    }
}

/// Under which name thinking is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningField {
    /// `reasoning_content`
    #[default]
    ReasoningContent,
    /// `reasoning`
    Reasoning,
    /// Both.
    Both,
}

/// Why the engine stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineStop {
    /// A stop id, or a stop string.
    Stop,
    /// A token limit.
    Length,
}

/// Folds the events of one sample into deltas, and knows how the reply ended.
#[derive(Clone, Debug)]
pub struct ReplyFolder {
    reply_id: String,
    sample: u32,
    field: ReasoningField,
    /// For each call, whether it is complete.
    calls: Vec<bool>,
}

impl ReplyFolder {
    /// A fresh reply; call ids derive from `reply_id` and `sample`.
    pub fn new(reply_id: &str, sample: u32, field: ReasoningField) -> Self {
        Self { reply_id: reply_id.to_owned(), sample, field, calls: Vec::new() }
    }

    /// Deltas of these events, in order: neighbours of one kind are joined, and no delta holds
    /// more than one kind. The role is left out; the first chunk is the caller's.
    pub fn deltas(&mut self, events: Vec<OutputEvent>) -> Vec<Delta> {
        let mut deltas: Vec<Delta> = Vec::with_capacity(events.len());
        for event in events {
            match event {
                OutputEvent::Content(text) => match deltas.last_mut() {
                    Some(Delta { content: Some(last), .. }) => last.push_str(&text),
                    _ => deltas.push(Delta { content: Some(text), ..Delta::default() }),
                },
                OutputEvent::Reasoning(text) => match deltas.last_mut() {
                    Some(last) if is_reasoning(last) => extend_reasoning(last, &text),
                    _ => deltas.push(self.reasoning(text)),
                },
                OutputEvent::CallStart { index, name } => {
                    let delta = self.call_start(index, name);
                    calls_of(&mut deltas).push(delta);
                }
                OutputEvent::CallArguments { index, fragment } => {
                    let calls = calls_of(&mut deltas);
                    match calls.last_mut() {
                        Some(last) if last.index == index => {
                            last.function.arguments.push_str(&fragment);
                        }
                        _ => calls.push(ToolCallDelta {
                            index,
                            id: None,
                            kind: None,
                            function: FunctionDelta { name: None, arguments: fragment },
                        }),
                    }
                }
                OutputEvent::CallEnd { index } => {
                    if let Some(complete) = self.calls.get_mut(index) {
                        *complete = true;
                    }
                }
            }
        }
        deltas
    }

    /// How many calls are complete.
    pub fn num_complete_calls(&self) -> usize {
        self.calls.iter().filter(|&&complete| complete).count()
    }

    /// Length counts more than calls: a cut reply must not be acted upon.
    pub fn finish_reason(&self, stop: EngineStop) -> FinishReason {
        match stop {
            EngineStop::Length => FinishReason::Length,
            EngineStop::Stop if self.num_complete_calls() > 0 => FinishReason::ToolCalls,
            EngineStop::Stop => FinishReason::Stop,
        }
    }

    fn reasoning(&self, text: String) -> Delta {
        let mut delta = Delta::default();
        match self.field {
            ReasoningField::ReasoningContent => delta.reasoning_content = Some(text),
            ReasoningField::Reasoning => delta.reasoning = Some(text),
            ReasoningField::Both => {
                delta.reasoning = Some(text.clone());
                delta.reasoning_content = Some(text);
            }
        }
        delta
    }

    fn call_start(&mut self, index: usize, name: String) -> ToolCallDelta {
        if self.calls.len() <= index {
            self.calls.resize(index + 1, false);
        }
        ToolCallDelta {
            index,
            id: Some(self.call_id(index)),
            kind: Some("function"),
            function: FunctionDelta { name: Some(name), arguments: String::new() },
        }
    }

    fn call_id(&self, index: usize) -> String {
        let seed = format!("{}\n{}\n{index}", self.reply_id, self.sample);
        let digest = Sha256::digest(seed.as_bytes());
        let hex: String = digest[..12].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("call_{hex}")
    }
}

fn is_reasoning(delta: &Delta) -> bool {
    delta.reasoning_content.is_some() || delta.reasoning.is_some()
}

fn extend_reasoning(delta: &mut Delta, text: &str) {
    for field in [&mut delta.reasoning_content, &mut delta.reasoning].into_iter().flatten() {
        field.push_str(text);
    }
}

/// The calls of the last delta, which is made if it holds something else.
fn calls_of(deltas: &mut Vec<Delta>) -> &mut Vec<ToolCallDelta> {
    if deltas.last().is_none_or(|last| last.tool_calls.is_empty()) {
        deltas.push(Delta::default());
    }
    &mut deltas.last_mut().expect("invariant: pushed above if there was none").tool_calls
}

/// Joins the deltas of one sample into the whole message: a reply that is not streamed is the
/// stream, folded.
#[derive(Clone, Debug, Default)]
pub struct MessageFolder {
    message: AssistantMessage,
    calls: Vec<ToolCall>,
}

impl MessageFolder {
    /// Adds the next delta.
    pub fn add(&mut self, delta: Delta) {
        let joined = [
            (&mut self.message.content, delta.content),
            (&mut self.message.reasoning_content, delta.reasoning_content),
            (&mut self.message.reasoning, delta.reasoning),
        ];
        for (whole, part) in joined {
            if let Some(part) = part {
                whole.get_or_insert_default().push_str(&part);
            }
        }
        for call in delta.tool_calls {
            if let (Some(id), Some(name)) = (call.id, call.function.name) {
                let function = FunctionCall { name, arguments: String::new() };
                self.calls.push(ToolCall { id, kind: "function", function });
            }
            if let Some(whole) = self.calls.get_mut(call.index) {
                whole.function.arguments.push_str(&call.function.arguments);
            }
        }
    }

    /// The message; calls that were cut off are left out.
    pub fn finish(mut self, folder: &ReplyFolder) -> AssistantMessage {
        let complete = folder.calls.iter().copied().chain(std::iter::repeat(false));
        self.message.role = "assistant";
        self.message.tool_calls = self
            .calls
            .into_iter()
            .zip(complete)
            .filter_map(|(call, complete)| complete.then_some(call))
            .collect();
        self.message
    }
}

#[cfg(test)]
mod tests;
