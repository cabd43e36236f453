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
    /// encoder; the prompt if the worker leaves that to others and lacks more than a little of it.
    pub fn division(&self, demand: &Demand, choice: &Choice, now_s: f64) -> Division {
        let seat = self.seats.get(usize::from(choice.ticket.seat.0)).and_then(Option::as_ref);
        let role = seat.and_then(|seat| seat.ready).map(|(standing, _)| standing.role);
        let missing = demand.prompt_tokens.saturating_sub(choice.matched_tokens);
        Division {
            encodes: demand.media.is_some() && self.has(Stage::Encode, demand, now_s),
            prefills: role == Some(Role::Decode)
                && missing > self.policy.min_prefill_tokens
                && self.has(Stage::Prefill, demand, now_s),
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

    /// Of the prompt tokens that a worker lacks, how many it would compute: fetching one costs a
    /// small part of that.
    pub(super) fn read_share(&self, seat: &Seat) -> f64 {
        let fetches = seat.ready.is_some_and(|(standing, _)| standing.role == Role::Decode);
        if self.is_divided && fetches { self.policy.fetch_weight } else { 1.0 }
    }
}
