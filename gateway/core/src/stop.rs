//! Stop strings in the visible answer: nothing of one leaks, nothing else is lost.

use crate::markers::{MarkerSet, Position};
use crate::output::OutputEvent;

/// Watches the answer for stop strings. Thinking and call arguments are not watched: a stop
/// string ends what the user reads.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    texts: Vec<String>,
    set: MarkerSet,
    position: Position,
    held: String,
    include_stop: bool,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// Watches for these texts; `include_stop` leaves the matched one in the answer.
    pub fn new(texts: &[String], include_stop: bool) -> Self {
        Self {
            texts: texts.to_vec(),
            set: MarkerSet::new(texts),
            position: Position::default(),
            held: String::new(),
            include_stop,
            stopped: None,
        }
    }

    /// The stop string that ended the answer: the first to be complete.
    pub fn matched(&self) -> Option<&str> {
        self.stopped.map(|number| self.texts[number].as_str())
    }

    /// Passes events on, holding back text that may become a stop string; after a match nothing
    /// passes.
    pub fn filter(&mut self, events: &mut Vec<OutputEvent>) {
        if self.texts.is_empty() {
            return;
        }
        let mut passed = Vec::with_capacity(events.len());
        for event in events.drain(..) {
            if self.stopped.is_some() {
                break;
            }
            match event {
                OutputEvent::Content(text) => self.content(&text, &mut passed),
                other => {
                    // a stop string does not reach over something that is no answer
                    self.release(&mut passed);
                    passed.push(other);
                }
            }
        }
        *events = passed;
    }

    /// The reply has ended: what was held back is text after all.
    pub fn finish(&mut self, events: &mut Vec<OutputEvent>) {
        self.release(events);
    }

    fn content(&mut self, text: &str, passed: &mut Vec<OutputEvent>) {
        let found = self.set.scan(&mut self.position, text);
        let (end, hidden) = match found {
            Some(found) => {
                self.stopped = Some(found.pattern);
                (found.end, if self.include_stop { 0 } else { found.length })
            }
            None => (text.len(), self.set.held(self.position)),
        };
        self.held.push_str(&text[..end]);
        let shown = self.held.len() - hidden;
        let rest = self.held.split_off(shown);
        if !self.held.is_empty() {
            passed.push(OutputEvent::Content(std::mem::take(&mut self.held)));
        }
        if self.stopped.is_none() {
            self.held = rest;
        }
    }

    fn release(&mut self, events: &mut Vec<OutputEvent>) {
        self.position = Position::default();
        if !self.held.is_empty() {
            events.push(OutputEvent::Content(std::mem::take(&mut self.held)));
        }
    }
}

#[cfg(test)]
mod tests;
