//! How two generations of the model spell the structure of their output: one grammar, two tables.

use std::sync::LazyLock;

use super::super::{NAMESPACE, THINK_CLOSE, THINK_OPEN};
use super::lexer::MarkerSets;

/// The spelling of one generation.
#[derive(Debug)]
pub(in super::super) struct Dialect {
    /// Opens thinking.
    pub(in super::super) think_open: &'static str,
    /// Closes thinking.
    pub(in super::super) think_close: &'static str,
    /// What begins a tag, and how the tag goes on.
    pub(super) tags: &'static [(&'static str, TagForm)],
    /// What of it is looked for in output; made once, since every reply needs it.
    pub(super) marker_sets: LazyLock<MarkerSets>,
}

impl PartialEq for Dialect {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

/// How a tag goes on behind its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagForm {
    /// The beginning is a mark; behind it stands any name in brackets.
    Marked,
    /// It is complete, and means this.
    Whole { name: &'static str, is_closing: bool },
    /// It ends with a bracket, and is named by all that stands in it.
    Open,
    /// It ends with a bracket, and is named by its attribute `name`.
    Named,
}

/// M3: every tag behind a mark of its own, values as nested elements.
pub(in super::super) static M3: Dialect = Dialect {
    think_open: THINK_OPEN,
    think_close: THINK_CLOSE,
    tags: &[(NAMESPACE, TagForm::Marked)],
    marker_sets: LazyLock::new(|| MarkerSets::new(&M3)),
};

/// M2, whose form templates of converted checkpoints still write: plain tags, values that are no
/// text as JSON. Source: the chat template of MiniMax-M2.
pub(in super::super) static M2: Dialect = Dialect {
    think_open: "<think>",
    think_close: "</think>",
    tags: &[
        ("<minimax:tool_call>", TagForm::Whole { name: "tool_call", is_closing: false }),
        ("</minimax:tool_call>", TagForm::Whole { name: "tool_call", is_closing: true }),
        ("<invoke ", TagForm::Open),
        ("</invoke>", TagForm::Whole { name: "invoke", is_closing: true }),
        ("<parameter ", TagForm::Named),
        ("</parameter>", TagForm::Whole { name: "parameter", is_closing: true }),
    ],
    marker_sets: LazyLock::new(|| MarkerSets::new(&M2)),
};

impl Dialect {
    /// The dialect that a checkpoint's chat template writes.
    pub(in super::super) fn of_template(template: &str) -> &'static Self {
        let is_old = template.contains(M2.tags[0].0) && !template.contains(NAMESPACE);
        if is_old { &M2 } else { &M3 }
    }
}
