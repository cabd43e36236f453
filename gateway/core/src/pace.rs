//! Joins short deltas of a stream, and cuts long ones, so that clients get text in fit pieces.

use crate::openai::{Delta, TokenLogprob};
use std::time::Duration;

/// How text is to be cut. Source of the usual sizes: the shares of packets by length that the
/// public verifier of the model's providers accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Shorter text waits for more, but for a sample's first.
    pub least_characters: usize,
    /// Longer text is cut.
    pub most_characters: usize,
    /// Text waits no longer.
    pub longest_hold: Duration,
}

impl Pace {
    /// The usual sizes with that hold.
    pub fn new(longest_hold: Duration) -> Self {
        Self { least_characters: 5, most_characters: 200, longest_hold }
    }
}

/// The pace of one sample. Calls are passed on at once; no order is changed.
#[derive(Clone, Debug)]
pub struct Pacer {
    pace: Pace,
    has_begun: bool,
    held: Option<Held>,
}

#[derive(Clone, Debug)]
struct Held {
    delta: Delta,
    logprobs: Vec<TokenLogprob>,
    since: Duration,
}

/// What goes out now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Released {
    /// In order; none holds more than one kind of text.
    pub deltas: Vec<Delta>,
    /// Of the answer's tokens in them.
    pub logprobs: Vec<TokenLogprob>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content,
    Thinking,
    Other,
}

impl Pacer {
    /// At the beginning of a sample.
    pub fn new(pace: Pace) -> Self {
        Self { pace, has_begun: false, held: None }
    }

    /// Takes the next deltas with the log-probabilities of their answer tokens; `now` is any clock.
    pub fn add(
        &mut self,
        deltas: Vec<Delta>,
        logprobs: Vec<TokenLogprob>,
        now: Duration,
    ) -> Released {
        let mut released = Released::default();
        let last_content = deltas.iter().rposition(|delta| kind(delta) == Kind::Content);
        let mut logprobs = Some(logprobs);
        for (place, delta) in deltas.into_iter().enumerate() {
            let own = match Some(place) == last_content {
                true => logprobs.take().unwrap_or_default(),
                false => Vec::new(),
            };
            self.take(Held { delta, logprobs: own, since: now }, &mut released);
        }
        match (logprobs, &mut self.held) {
            // their text was passed on before them, or waits
            (Some(late), Some(held)) if kind(&held.delta) == Kind::Content => {
                held.logprobs.extend(late);
            }
            (Some(late), _) => released.logprobs.extend(late),
            (None, _) => {}
        }
        released
    }

    /// When the text that waits must go out, by the clock of [`Pacer::add`].
    pub fn due(&self) -> Option<Duration> {
        self.held.as_ref().map(|held| held.since + self.pace.longest_hold)
    }

    /// Lets go what waits: it is due, or the sample is over.
    pub fn release(&mut self) -> Released {
        let mut released = Released::default();
        self.flush(&mut released);
        released
    }

    fn take(&mut self, new: Held, released: &mut Released) {
        let kind_of_new = kind(&new.delta);
        if self.held.as_ref().is_some_and(|held| kind(&held.delta) != kind_of_new) {
            self.flush(released);
        }
        match &mut self.held {
            Some(held) => {
                join(&mut held.delta, new.delta);
                held.logprobs.extend(new.logprobs);
            }
            None => self.held = Some(new),
        }
        let is_enough = self.held.as_ref().is_some_and(|held| {
            text(&held.delta).chars().take(self.pace.least_characters).count()
                >= self.pace.least_characters
        });
        if !self.has_begun || is_enough || kind_of_new == Kind::Other {
            self.flush(released);
        }
    }

    fn flush(&mut self, released: &mut Released) {
        let Some(held) = self.held.take() else { return };
        self.has_begun = true;
        released.logprobs.extend(held.logprobs);
        self.cut(held.delta, &mut released.deltas);
    }

    /// Pieces of nearly equal length, so that none is a short rest.
    fn cut(&self, delta: Delta, pieces: &mut Vec<Delta>) {
        let most = self.pace.most_characters.max(1);
        let characters = match kind(&delta) {
            Kind::Other => 0,
            // bytes are never fewer than characters
            _ if text(&delta).len() <= most => 0,
            _ => text(&delta).chars().count(),
        };
        if characters <= most {
            return pieces.push(delta);
        }
        let num_pieces = characters.div_ceil(most);
        let mut rest = text(&delta);
        for piece in 0..num_pieces {
            let length = characters * (piece + 1) / num_pieces - characters * piece / num_pieces;
            let end = rest.char_indices().nth(length).map_or(rest.len(), |(end, _)| end);
            let (words, tail) = rest.split_at(end);
            pieces.push(with_text(&delta, words));
            rest = tail;
        }
    }
}

fn kind(delta: &Delta) -> Kind {
    if delta.role.is_some() || !delta.tool_calls.is_empty() {
        Kind::Other
    } else if delta.content.is_some() {
        Kind::Content
    } else if delta.reasoning_content.is_some() || delta.reasoning.is_some() {
        Kind::Thinking
    } else {
        Kind::Other
    }
}

fn text(delta: &Delta) -> &str {
    let texts = [&delta.content, &delta.reasoning_content, &delta.reasoning];
    texts.into_iter().find_map(Option::as_deref).unwrap_or_default()
}

fn join(delta: &mut Delta, more: Delta) {
    let pairs = [
        (&mut delta.content, more.content),
        (&mut delta.reasoning_content, more.reasoning_content),
        (&mut delta.reasoning, more.reasoning),
    ];
    for (whole, part) in pairs {
        if let (Some(whole), Some(part)) = (whole, part) {
            whole.push_str(&part);
        }
    }
}

fn with_text(delta: &Delta, words: &str) -> Delta {
    let own = |field: &Option<String>| field.as_ref().map(|_| words.to_owned());
    Delta {
        content: own(&delta.content),
        reasoning_content: own(&delta.reasoning_content),
        reasoning: own(&delta.reasoning),
        ..Delta::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{FunctionDelta, ToolCallDelta};
    use proptest::prelude::*;

    fn content(text: &str) -> Delta {
        Delta { content: Some(text.to_owned()), ..Delta::default() }
    }

    fn thinking(text: &str) -> Delta {
        Delta { reasoning_content: Some(text.to_owned()), ..Delta::default() }
    }

    fn call(arguments: &str) -> Delta {
        let function = FunctionDelta { name: None, arguments: arguments.to_owned() };
        let call = ToolCallDelta { index: 0, id: None, kind: None, function };
        Delta { tool_calls: vec![call], ..Delta::default() }
    }

    fn pacer() -> Pacer {
        Pacer::new(Pace::new(Duration::from_millis(100)))
    }

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn the_first_goes_at_once_and_later_ones_wait_for_more() {
        let mut pacer = pacer();
        let mut add = |text, now| pacer.add(vec![content(text)], Vec::new(), at(now)).deltas;
        assert_eq!(add("H", 0), [content("H")]);
        assert_eq!(add("el", 10), []);
        assert_eq!(add("lo", 20), []);
        assert_eq!(add(", w", 30), [content("ello, w")]);
        assert_eq!(add("o", 40), []);
        assert_eq!(pacer.due(), Some(at(140)));
        assert_eq!(pacer.release().deltas, [content("o")]);
        assert_eq!((pacer.due(), pacer.release()), (None, Released::default()));
    }

    #[test]
    fn another_kind_pushes_out_what_waits_and_calls_never_wait() {
        let mut pacer = pacer();
        pacer.add(vec![thinking("hmm")], Vec::new(), at(0));
        let deltas = vec![thinking("so"), content("a"), call("{"), call("}"), content("b")];
        let released = pacer.add(deltas, Vec::new(), at(1)).deltas;
        assert_eq!(released, [thinking("so"), content("a"), call("{"), call("}")]);
        assert_eq!(pacer.release().deltas, [content("b")]);
    }

    #[test]
    fn log_probabilities_go_with_their_text() {
        let entry = |token: &str| TokenLogprob {
            token: token.to_owned(),
            logprob: -1.0,
            bytes: token.bytes().collect(),
            top_logprobs: None,
        };
        let mut pacer = pacer();
        pacer.add(vec![content("a")], vec![entry("a")], at(0));
        let waits = pacer.add(vec![content("b")], vec![entry("b")], at(1));
        assert_eq!(waits, Released::default());
        assert_eq!(pacer.add(vec![], vec![entry("c")], at(2)), Released::default());
        let released = pacer.add(vec![call("{")], vec![], at(3));
        assert_eq!(released.logprobs, [entry("b"), entry("c")]);
    }

    #[test]
    fn long_text_is_cut_into_pieces_of_nearly_one_length() {
        let text = "ä🙂x".repeat(201);
        let pieces = pacer().add(vec![content(&text)], Vec::new(), at(0)).deltas;
        let lengths: Vec<_> =
            pieces.iter().map(|piece| super::text(piece).chars().count()).collect();
        assert_eq!(lengths, [150, 151, 151, 151]);
        assert_eq!(pieces.iter().map(super::text).collect::<String>(), text);
    }

    proptest! {
        #[test]
        fn no_text_is_lost_or_moved_and_few_pieces_are_short(
            texts in proptest::collection::vec(("[a-z🙂]{0,9}", 0..3usize), 0..60),
        ) {
            let mut pacer = pacer();
            let (mut sent, mut got) = (Vec::new(), Vec::new());
            for (text, which) in &texts {
                let delta = [content(text), thinking(text), call(text)][*which].clone();
                sent.push((*which, text.clone()));
                got.extend(pacer.add(vec![delta], Vec::new(), at(0)).deltas);
            }
            got.extend(pacer.release().deltas);
            let order = |deltas: Vec<(usize, String)>| -> Vec<(usize, String)> {
                let mut runs: Vec<(usize, String)> = Vec::new();
                for (which, text) in deltas {
                    match runs.last_mut() {
                        Some(last) if last.0 == which => last.1.push_str(&text),
                        _ => runs.push((which, text)),
                    }
                }
                runs.retain(|(_, text)| !text.is_empty());
                runs
            };
            let got: Vec<_> = got.into_iter().map(|delta| match delta {
                Delta { content: Some(text), .. } => (0, text),
                Delta { reasoning_content: Some(text), .. } => (1, text),
                delta => (2, delta.tool_calls[0].function.arguments.clone()),
            }).collect();
            for pair in got[1.min(got.len())..].windows(2) {
                let is_short = pair[0].0 < 2 && pair[0].1.chars().count() < 5;
                // only what another kind pushed out
                prop_assert!(!is_short || pair[0].0 != pair[1].0);
            }
            prop_assert_eq!(order(got), order(sent));
        }
    }
}
