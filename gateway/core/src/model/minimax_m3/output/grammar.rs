//! M3's output grammar as one table.

use super::lexer::Watch;

/// Where in the grammar the output stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// At the start; the prompt opened no thinking.
    Start,
    /// At the start; the prompt opened the thinking.
    ThinkingStart,
    /// In the thinking.
    Thinking,
    /// Behind the thinking: white space alone is layout.
    Gap,
    /// In the answer.
    Answer,
    /// Behind a block of calls: white space alone is layout.
    Pause,
    /// In answer text behind a block of calls.
    Afterword,
    /// Behind a block's opening tag: a call, or mere talk about calls.
    BlockOpening,
    /// Behind a call's opening tag outside a block: a call, or mere talk about calls.
    CallOpening,
    /// In a block, between calls.
    Block,
    /// In a call.
    Call,
    /// In something in a block that is no call.
    Broken,
}

/// What stands next in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symbol {
    /// White space.
    Blank,
    /// Text that begins with something else.
    Words,
    ThinkOpen,
    ThinkClose,
    BlockOpen,
    BlockClose,
    /// With the name of a tool.
    CallOpen,
    CallClose,
    /// Any other tag.
    Open,
    Close,
}

/// What is done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Shown as thinking, after what was kept.
    Think,
    /// Shown as the answer, after what was kept.
    Say,
    /// Markup, with what was kept.
    Drop,
    /// Kept until it is known what it is.
    Keep,
    /// What was kept is text where it stood; the symbol is read again there.
    Refuse,
    /// A call begins; what was kept is markup.
    Begin,
    /// The kept call's opening counts; the symbol is read again in the call.
    Accept,
    /// Belongs to the call's arguments.
    Argue,
    /// The call ends.
    End,
    /// The call ends, and the symbol is read again behind it.
    EndBefore,
}

/// The grammar. Every state has an answer to every symbol, so that no output is an error.
pub(super) fn step(state: State, symbol: Symbol) -> (Action, State) {
    use Action::*;
    use State::*;
    use Symbol as S;
    match (state, symbol) {
        (Start, S::Blank) => (Keep, Start),
        (Start, S::ThinkOpen) => (Drop, Thinking),
        (Start, S::ThinkClose) => (Drop, Gap),
        (Start, S::BlockOpen) => (Keep, BlockOpening),
        (Start, S::CallOpen) => (Keep, CallOpening),
        (Start, _) => (Say, Answer),

        // a repeated opening tag says nothing new
        (ThinkingStart, S::Blank) => (Keep, ThinkingStart),
        (ThinkingStart, S::ThinkOpen) => (Drop, Thinking),
        (ThinkingStart | Thinking, S::ThinkClose) => (Drop, Gap),
        // a call without the closing tag ends the thinking
        (ThinkingStart | Thinking, S::BlockOpen) => (Keep, BlockOpening),
        (ThinkingStart | Thinking, S::CallOpen) => (Keep, CallOpening),
        (ThinkingStart | Thinking, _) => (Think, Thinking),

        (Gap, S::Blank) => (Keep, Gap),
        (Pause, S::Blank) => (Keep, Pause),
        (Gap | Pause, S::ThinkOpen) => (Drop, Thinking),
        (Gap, S::ThinkClose) => (Drop, Gap),
        (Gap | Pause | Answer | Afterword, S::BlockOpen) => (Keep, BlockOpening),
        (Gap | Pause | Answer | Afterword, S::CallOpen) => (Keep, CallOpening),
        // closing tags of a block that ended before them
        (Pause, S::ThinkClose | S::BlockClose | S::CallClose) => (Drop, Pause),
        (Afterword, S::BlockClose | S::CallClose) => (Drop, Afterword),
        // thinking is read where it stands first; later tags are the model's own words
        (Gap | Answer, _) => (Say, Answer),
        (Pause | Afterword, _) => (Say, Afterword),

        (BlockOpening, S::Blank | S::BlockOpen) => (Keep, BlockOpening),
        (BlockOpening, S::CallOpen) => (Begin, Call),
        (BlockOpening, S::Open | S::Close | S::CallClose) => (Drop, Broken),
        (BlockOpening, _) => (Refuse, BlockOpening),

        (CallOpening, S::Blank) => (Keep, CallOpening),
        (CallOpening, S::Open | S::Close | S::CallClose) => (Accept, Call),
        (CallOpening, _) => (Refuse, CallOpening),

        (Block | Broken, S::CallOpen) => (Begin, Call),
        (Block | Broken, S::BlockClose) => (Drop, Pause),
        (Block, S::Words | S::ThinkOpen | S::ThinkClose) => (Say, Afterword),
        (Block, S::Blank | S::BlockOpen | S::CallClose) => (Drop, Block),
        (Block, S::Open | S::Close) => (Drop, Broken),
        (Broken, S::CallClose) => (Drop, Block),
        (Broken, _) => (Drop, Broken),

        (Call, S::CallClose) => (End, Block),
        (Call, S::BlockClose) => (End, Pause),
        // the closing tag was left out
        (Call, S::CallOpen | S::BlockOpen) => (EndBefore, Block),
        (Call, _) => (Argue, Call),
    }
}

impl State {
    /// Which markers count here.
    pub(super) fn watch(self) -> Watch {
        match self {
            Self::Answer | Self::Afterword | Self::Block | Self::Call | Self::Broken => Watch::Tags,
            _ => Watch::TagsAndThinking,
        }
    }

    /// Where text goes that was kept here and is text after all.
    pub(super) fn after_text(self) -> Self {
        match self {
            Self::Start | Self::Gap => Self::Answer,
            Self::ThinkingStart => Self::Thinking,
            Self::Pause => Self::Afterword,
            other => other,
        }
    }
}
