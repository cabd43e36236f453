//! M3's output grammar: thinking, answer, tool calls, read as they are generated.

use crate::model::OutputOptions;
use crate::output::{OutputEvent, OutputParser, Stretch, TextClass};

/// Reads M3's output.
pub(super) struct M3Parser {
    account: Vec<Stretch>,
}

impl M3Parser {
    pub(super) fn new(_options: &OutputOptions) -> Self {
        Self { account: Vec::new() }
    }
}

impl OutputParser for M3Parser {
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        self.account.push(Stretch { class: TextClass::Content, num_bytes: text.len() });
        events.push(OutputEvent::Content(text.to_owned()));
    }

    fn finish(&mut self, _events: &mut Vec<OutputEvent>) {}

    fn take_account(&mut self) -> Vec<Stretch> {
        std::mem::take(&mut self.account)
    }
}
