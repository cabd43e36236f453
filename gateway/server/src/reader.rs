//! One sample's tokens to deltas: text, meaning, stop strings, log-probabilities, counts. Pure.

use std::collections::VecDeque;

use gateway_core::detokenize::Detokenizer;
use gateway_core::openai::{Delta, FinishReason, TokenLogprob};
use gateway_core::output::{
    EngineStop, OutputEvent, OutputParser, ReplyFolder, Stretch, TextClass, TokenLedger,
};
use gateway_core::stop::StopMatcher;
use gateway_core::tokenizer::TokenBytes;
use std::sync::Arc;

use crate::workers;

/// Everything a reader is made of.
pub struct ReaderParts {
    /// Ids to text.
    pub detokenizer: Detokenizer,
    /// The bytes of every token, for log-probabilities.
    pub token_bytes: Arc<TokenBytes>,
    /// Text to events.
    pub parser: Box<dyn OutputParser>,
    /// Watches for stop strings.
    pub stops: StopMatcher,
    /// Events to deltas.
    pub folder: ReplyFolder,
    /// Whether log-probabilities are wanted.
    pub has_logprobs: bool,
    /// The first complete call ends the sample.
    pub is_single_call: bool,
}

/// Reads one sample.
pub struct Reader {
    parts: ReaderParts,
    ledger: TokenLedger,
    /// Empty between steps, as is the next.
    account: Vec<Stretch>,
    classes: Vec<TextClass>,
    /// Log-probabilities of tokens whose meaning or place is not settled yet.
    unsettled: VecDeque<TokenLogprob>,
    /// Log-probabilities of answer tokens whose text may still be taken back by a stop string.
    held: VecDeque<TokenLogprob>,
    /// Bytes of the answer before the first held token.
    held_from_bytes: usize,
    /// Bytes of the answer that have been given out.
    shown_bytes: usize,
    completion_tokens: u64,
    reasoning_tokens: u64,
}

/// What new tokens amount to.
#[derive(Debug, Default)]
pub struct Step {
    /// In order; none holds more than one kind of text.
    pub deltas: Vec<Delta>,
    /// Of the answer tokens shown in these deltas.
    pub logprobs: Vec<TokenLogprob>,
    /// Whether a stop string, or the only call that is wanted, has ended the sample.
    pub is_stopped: bool,
}

impl Reader {
    /// A reader at the beginning of a sample.
    pub fn new(parts: ReaderParts) -> Self {
        Self {
            parts,
            ledger: TokenLedger::default(),
            account: Vec::new(),
            classes: Vec::new(),
            unsettled: VecDeque::new(),
            held: VecDeque::new(),
            held_from_bytes: 0,
            shown_bytes: 0,
            completion_tokens: 0,
            reasoning_tokens: 0,
        }
    }

    /// Reads the next tokens.
    pub fn read(&mut self, token_ids: &[u32], logprobs: &[workers::TokenLogprob]) -> Step {
        let (mut events, mut fresh) = (Vec::new(), Vec::new());
        let mut is_stopped = false;
        for (place, id) in token_ids.iter().enumerate() {
            let text = self.parts.detokenizer.push(std::slice::from_ref(id));
            self.completion_tokens += 1;
            self.ledger.push_token(text.len());
            if self.parts.has_logprobs {
                let entry = logprobs.get(place).map(|entry| self.logprob(*id, entry));
                self.unsettled.push_back(entry.unwrap_or_else(|| self.unknown_logprob(*id)));
            }
            self.parts.parser.push(&text, &mut fresh);
            is_stopped = self.parts.is_single_call && ends_call(&mut fresh);
            self.parts.stops.filter(&mut fresh);
            is_stopped |= self.parts.stops.matched().is_some();
            match events.is_empty() {
                true => std::mem::swap(&mut events, &mut fresh),
                false => events.append(&mut fresh),
            }
            // what came behind the end, in the same message, is no part of the reply
            if is_stopped {
                break;
            }
        }
        self.settle();
        let step = self.fold(events);
        Step { is_stopped, ..step }
    }

    /// The worker has ended the sample.
    pub fn finish(&mut self) -> Step {
        let mut events = Vec::new();
        self.parts.detokenizer.finish();
        self.parts.parser.finish(&mut events);
        self.settle();
        self.ledger.finish(&mut self.classes);
        self.classify();
        self.parts.stops.filter(&mut events);
        if self.parts.stops.matched().is_none() {
            self.parts.stops.finish(&mut events);
        }
        let mut step = self.fold(events);
        if self.parts.stops.matched().is_none() {
            step.logprobs.extend(self.held.drain(..));
        }
        step
    }

    /// Why the sample ended, in the client's terms.
    pub fn finish_reason(&self, is_length: bool) -> FinishReason {
        let stop = if is_length { EngineStop::Length } else { EngineStop::Stop };
        self.parts.folder.finish_reason(stop)
    }

    /// The stop string that ended the sample.
    pub fn stop_text(&self) -> Option<&str> {
        self.parts.stops.matched()
    }

    /// Knows which calls are complete.
    pub fn folder(&self) -> &ReplyFolder {
        &self.parts.folder
    }

    /// Tokens read so far.
    pub fn completion_tokens(&self) -> u64 {
        self.completion_tokens
    }

    /// Of these, shown as thinking.
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    fn fold(&mut self, events: Vec<OutputEvent>) -> Step {
        for event in &events {
            if let OutputEvent::Content(text) = event {
                self.shown_bytes += text.len();
            }
        }
        let mut logprobs = Vec::new();
        while self.held_from_bytes < self.shown_bytes {
            let Some(entry) = self.held.pop_front() else { break };
            self.held_from_bytes += entry.bytes.len();
            logprobs.push(entry);
        }
        Step { deltas: self.parts.folder.deltas(events), logprobs, is_stopped: false }
    }

    fn settle(&mut self) {
        self.parts.parser.add_account(&mut self.account);
        self.ledger.settle(&self.account, &mut self.classes);
        self.account.clear();
        self.classify();
    }

    fn classify(&mut self) {
        for class in self.classes.drain(..) {
            if class == TextClass::Reasoning {
                self.reasoning_tokens += 1;
            }
            match self.unsettled.pop_front() {
                Some(entry) if class == TextClass::Content => self.held.push_back(entry),
                _ => {}
            }
        }
    }

    fn logprob(&self, id: u32, entry: &workers::TokenLogprob) -> TokenLogprob {
        let top = entry.top.iter().map(|(id, logprob)| self.named(*id, *logprob)).collect();
        TokenLogprob { top_logprobs: Some(top), ..self.named(id, entry.logprob) }
    }

    fn unknown_logprob(&self, id: u32) -> TokenLogprob {
        TokenLogprob { top_logprobs: Some(Vec::new()), ..self.named(id, f32::MIN) }
    }

    fn named(&self, id: u32, logprob: f32) -> TokenLogprob {
        let bytes = self.parts.token_bytes.get(id).to_vec();
        TokenLogprob {
            token: String::from_utf8_lossy(&bytes).into_owned(),
            // json has no infinity
            logprob: f64::from(logprob.max(f32::MIN)),
            bytes,
            top_logprobs: None,
        }
    }
}

/// Whether a call has ended in these events; what comes behind it is dropped.
fn ends_call(events: &mut Vec<OutputEvent>) -> bool {
    let end = events.iter().position(|event| matches!(event, OutputEvent::CallEnd { .. }));
    end.inspect(|end| events.truncate(end + 1)).is_some()
}

/// The grammar of a text completion: all of it is the answer.
#[derive(Debug, Default)]
pub struct PlainText {
    account: Vec<Stretch>,
}

impl OutputParser for PlainText {
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        if !text.is_empty() {
            self.account.push(Stretch { class: TextClass::Content, num_bytes: text.len() });
            events.push(OutputEvent::Content(text.to_owned()));
        }
    }

    fn finish(&mut self, _events: &mut Vec<OutputEvent>) {}

    fn take_account(&mut self) -> Vec<Stretch> {
        std::mem::take(&mut self.account)
    }
}
