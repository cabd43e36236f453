//! Keeps requests from a worker that keeps failing them, and tries it again.

/// When a breaker opens and for how long, in seconds of the caller's clock.
#[derive(Clone, Copy, Debug)]
pub struct BreakerPolicy {
    /// Faults in a row that open it.
    pub faults: u32,
    /// First pause; each failed trial doubles it.
    pub pause_s: f64,
    /// Longest pause.
    pub max_pause_s: f64,
}

impl Default for BreakerPolicy {
    fn default() -> Self {
        Self { faults: 5, pause_s: 2.0, max_pause_s: 60.0 }
    }
}

/// How a request on a worker ended, as far as the worker is to praise or blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It gave a result.
    Served,
    /// It failed at what was its own task: it broke off, crashed, or never answered.
    Fault,
    /// The client's doing, or nobody's: refused input, a full queue, a client that left.
    Neutral,
}

/// The breaker of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Breaker {
    faults: u32,
    pause_s: f64,
    /// While open: when a trial may be made.
    trial_at_s: Option<f64>,
    is_trial_running: bool,
}

impl Breaker {
    /// Whether a request may be given to the worker now.
    pub fn admits(&self, now_s: f64) -> bool {
        match self.trial_at_s {
            None => true,
            Some(at) => now_s >= at && !self.is_trial_running,
        }
    }

    /// Whether it is open, trial or not.
    pub fn is_open(&self) -> bool {
        self.trial_at_s.is_some()
    }

    /// A request has been given to the worker; gives whether it is the trial.
    pub fn begin(&mut self) -> bool {
        let is_trial = self.trial_at_s.is_some() && !self.is_trial_running;
        self.is_trial_running |= is_trial;
        is_trial
    }

    /// A request has ended; `is_trial` as [`Breaker::begin`] gave it.
    pub fn end(&mut self, outcome: Outcome, is_trial: bool, now_s: f64, policy: &BreakerPolicy) {
        if is_trial {
            self.is_trial_running = false;
        }
        match outcome {
            Outcome::Neutral => {}
            // a straggler that was begun before the breaker opened proves nothing about now
            Outcome::Served if self.is_open() && !is_trial => {}
            Outcome::Served => *self = Self::default(),
            Outcome::Fault if self.is_open() => {
                if is_trial {
                    self.pause_s = (self.pause_s * 2.0).min(policy.max_pause_s);
                    self.trial_at_s = Some(now_s + self.pause_s);
                }
            }
            Outcome::Fault => {
                self.faults += 1;
                if self.faults >= policy.faults {
                    self.pause_s = policy.pause_s;
                    self.trial_at_s = Some(now_s + self.pause_s);
                }
            }
        }
    }

    /// The worker has been started anew: the past is not its own.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}
