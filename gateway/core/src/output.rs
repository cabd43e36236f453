//! The model's text as events, and folding events into replies.

/// One piece of meaning in the model's output. Every byte of output ends in exactly one event.
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

/// An incremental reader of one model's output grammar; any chunking gives the same events up to
/// joining neighbours of the same kind.
pub trait OutputParser: Send {
    /// Reads the next text; appends the events that are certain now.
    fn push(&mut self, text: &str, events: &mut Vec<OutputEvent>);

    /// The output has ended (also by length): appends what was held back.
    fn finish(&mut self, events: &mut Vec<OutputEvent>);
}
