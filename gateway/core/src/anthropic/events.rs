//! Deltas of a reply as events of content blocks, and the events folded into a whole message.

use super::types::{Block, BlockDelta, Event, StopReason};
use crate::openai::{Delta, FinishReason, ToolCallDelta};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

/// Turns deltas into blocks: one is open at a time, and each opens, grows and closes once.
#[derive(Clone, Debug, Default)]
pub struct BlockFolder {
    hides_thinking: bool,
    next_index: usize,
    open: Option<Open>,
}

#[derive(Clone, Debug)]
enum Open {
    Text,
    Thinking(Sha256),
    /// With the call's number in the reply.
    Call(usize),
}

impl BlockFolder {
    /// At the beginning of a message; with `hides_thinking` its thinking blocks have no words.
    pub fn new(hides_thinking: bool) -> Self {
        Self { hides_thinking, ..Self::default() }
    }

    /// Appends the events of the next deltas.
    pub fn add(&mut self, deltas: Vec<Delta>, events: &mut Vec<Event>) {
        for delta in deltas {
            if let Some(text) = delta.reasoning_content.or(delta.reasoning) {
                self.thinking(text, events);
            }
            if let Some(text) = delta.content {
                self.text(text, events);
            }
            for call in delta.tool_calls {
                self.call(call, events);
            }
        }
    }

    /// The message is over: the open block closes.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        let Some(open) = self.open.take() else { return };
        if let Open::Thinking(words) = open {
            let digest = words.finalize();
            let signature = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            self.delta(BlockDelta::SignatureDelta { signature }, events);
        }
        events.push(Event::ContentBlockStop { index: self.next_index - 1 });
    }

    fn thinking(&mut self, text: String, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        if !matches!(self.open, Some(Open::Thinking(_))) {
            let block = Block::Thinking { thinking: String::new(), signature: String::new() };
            self.start(Open::Thinking(Sha256::new()), block, events);
        }
        if let Some(Open::Thinking(words)) = &mut self.open {
            words.update(text.as_bytes());
        }
        if !self.hides_thinking {
            self.delta(BlockDelta::ThinkingDelta { thinking: text }, events);
        }
    }

    fn text(&mut self, text: String, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        if !matches!(self.open, Some(Open::Text)) {
            self.start(Open::Text, Block::Text { text: String::new() }, events);
        }
        self.delta(BlockDelta::TextDelta { text }, events);
    }

    fn call(&mut self, call: ToolCallDelta, events: &mut Vec<Event>) {
        if let (Some(id), Some(name)) = (call.id, call.function.name) {
            let id = id.replacen("call_", "toolu_", 1);
            let block = Block::ToolUse { id, name, input: empty_object() };
            self.start(Open::Call(call.index), block, events);
        }
        let partial_json = call.function.arguments;
        let is_open = matches!(self.open, Some(Open::Call(index)) if index == call.index);
        if is_open && !partial_json.is_empty() {
            self.delta(BlockDelta::InputJsonDelta { partial_json }, events);
        }
    }

    fn start(&mut self, open: Open, content_block: Block, events: &mut Vec<Event>) {
        self.finish(events);
        events.push(Event::ContentBlockStart { index: self.next_index, content_block });
        self.next_index += 1;
        self.open = Some(open);
    }

    fn delta(&self, delta: BlockDelta, events: &mut Vec<Event>) {
        events.push(Event::ContentBlockDelta { index: self.next_index - 1, delta });
    }
}

/// Joins the events of a stream into the content of the whole message.
#[derive(Clone, Debug, Default)]
pub struct MessageFolder {
    content: Vec<Block>,
    /// The input of the open call.
    input: String,
}

impl MessageFolder {
    /// Adds the next event.
    pub fn add(&mut self, event: Event) {
        match event {
            Event::ContentBlockStart { content_block, .. } => self.content.push(content_block),
            Event::ContentBlockDelta { delta, .. } => self.grow(delta),
            Event::ContentBlockStop { .. } => self.close(),
            _ => {}
        }
    }

    /// The content.
    pub fn finish(self) -> Vec<Block> {
        self.content
    }

    fn grow(&mut self, delta: BlockDelta) {
        match (self.content.last_mut(), delta) {
            (Some(Block::Text { text }), BlockDelta::TextDelta { text: new }) => {
                text.push_str(&new);
            }
            (
                Some(Block::Thinking { thinking, .. }),
                BlockDelta::ThinkingDelta { thinking: new },
            ) => {
                thinking.push_str(&new);
            }
            (
                Some(Block::Thinking { signature, .. }),
                BlockDelta::SignatureDelta { signature: new },
            ) => {
                *signature = new;
            }
            (_, BlockDelta::InputJsonDelta { partial_json }) => self.input.push_str(&partial_json),
            _ => {}
        }
    }

    /// A call whose input was cut off is left out: nobody may act upon it.
    fn close(&mut self) {
        if let Some(Block::ToolUse { input, .. }) = self.content.last_mut() {
            match RawValue::from_string(std::mem::take(&mut self.input)) {
                Ok(whole) => *input = whole,
                Err(_) => {
                    self.content.pop();
                }
            }
        }
    }
}

/// Why a message ended: `asked` tokens at most were wanted, and `made` are there.
pub fn stop_reason(
    reason: FinishReason,
    stop_text: Option<&str>,
    (asked, made): (Option<u32>, u64),
) -> StopReason {
    match reason {
        FinishReason::ToolCalls => StopReason::ToolUse,
        FinishReason::Stop if stop_text.is_some() => StopReason::StopSequence,
        FinishReason::Stop => StopReason::EndTurn,
        FinishReason::Length if asked.is_some_and(|asked| made < u64::from(asked)) => {
            StopReason::ModelContextWindowExceeded
        }
        FinishReason::Length => StopReason::MaxTokens,
    }
}

fn empty_object() -> Box<RawValue> {
    RawValue::from_string("{}".to_owned()).expect("invariant: an empty object is valid JSON")
}
