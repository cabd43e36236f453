//! Who does which part of a request in a fleet that divides the work.

use super::demand::{Choice, Demand};
use super::router::Router;
use super::seat::{Health, Seat};

/// What a worker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Everything but encoding for others.
    #[default]
    All,
    /// Encodes media for others.
    Encode,
    /// Computes prompts for others.
    Prefill,
    /// Answers, from prompts that others have computed.
    Decode,
}

/// What a request wants of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Its answer.
    #[default]
    Answer,
    /// The pages of its prompt, for another worker.
    Prefill,
    /// The features of its media, for another worker.
    Encode,
}

impl Role {
    /// Whether a worker of this role is asked for a stage.
    pub fn serves(self, stage: Stage) -> bool {
        match stage {
            Stage::Answer => matches!(self, Self::All | Self::Decode),
            Stage::Prefill => self == Self::Prefill,
            Stage::Encode => self == Self::Encode,
        }
    }
}

/// What is computed elsewhere before a chosen worker answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// The features of the media.
    pub encodes: bool,
    /// The pages of the prompt.
    pub prefills: bool,
}

impl Demand {
    /// What a stage of this request needs of a worker.
    pub fn of_stage(&self, stage: Stage) -> Self {
        match stage {
            Stage::Answer => Self { stage, ..self.clone() },
            Stage::Prefill => {
                Self { stage, context_tokens: u64::from(self.prompt_tokens) + 1, ..self.clone() }
            }
            // an encoder holds no pages; who has seen a picture may hold its features still
            Stage::Encode => Self {
                stage,
                context_tokens: u64::from(self.prompt_tokens) + 1,
                chains: Vec::new(),
                affinity: self.media,
                ..self.clone()
            },
        }
    }
}

impl Router {
    /// What should be computed elsewhere before the chosen worker answers: the media if there is an
    /// encoder and the worker does not hold the prompt up to their end; the prompt if the worker is
    /// to fetch it. To be asked right after the choice.
    pub fn division(&self, demand: &Demand, choice: &Choice, now_s: f64) -> Division {
        let seat = self.seats.get(usize::from(choice.ticket.seat.0)).and_then(Option::as_ref);
        let missing = demand.prompt_tokens.saturating_sub(choice.matched_tokens);
        Division {
            encodes: demand.media.is_some()
                && demand.media_end > choice.matched_tokens
                && self.has(Stage::Encode, demand, now_s),
            prefills: seat.is_some_and(|seat| self.fetch_wait_s(seat, missing).is_some()),
        }
    }

    fn has(&self, stage: Stage, demand: &Demand, now_s: f64) -> bool {
        let needed = u64::from(demand.prompt_tokens) + 1;
        self.seats.iter().flatten().any(|seat| self.is_fit(seat, stage, needed, now_s))
    }

    /// Whether a worker could serve a stage of so many tokens now.
    pub(super) fn is_fit(&self, seat: &Seat, stage: Stage, tokens: u64, now_s: f64) -> bool {
        seat.ready.is_some_and(|(standing, _)| {
            standing.role.serves(stage) && u64::from(standing.max_context_tokens) >= tokens
        }) && seat.health(&self.policy, now_s) == Health::Good
    }

    /// When the soonest of those that compute prompts for others would be done with this one.
    pub(super) fn soonest_prefill_s(&self, demand: &Demand, now_s: f64) -> Option<f64> {
        if demand.stage != Stage::Answer {
            return None;
        }
        let needed = u64::from(demand.prompt_tokens) + 1;
        let seats = self.seats.iter().enumerate();
        let fit = seats.filter_map(|(place, seat)| {
            let seat = seat.as_ref()?;
            if !self.is_fit(seat, Stage::Prefill, needed, now_s) {
                return None;
            }
            let own = demand.prompt_tokens.saturating_sub(self.matched(place, seat));
            let tokens = seat.queued_tokens() + f64::from(own);
            Some(tokens / seat.tokens_per_s(self.usual_rate))
        });
        fit.min_by(f64::total_cmp)
    }

    /// How long a worker waits for another one to compute what it lacks of the prompt; `None` if it
    /// computes that itself: it always does, or it lacks little, or all others have too much to do.
    pub(super) fn fetch_wait_s(&self, seat: &Seat, missing: u32) -> Option<f64> {
        let wait_s = self.prefill_s?;
        let fetches = seat.ready.is_some_and(|(standing, _)| standing.role == Role::Decode);
        if !fetches || missing <= self.policy.min_prefill_tokens {
            return None;
        }
        let own_s = f64::from(missing) / seat.tokens_per_s(self.usual_rate);
        (wait_s <= own_s * self.policy.prefill_patience).then_some(wait_s)
    }
}
