"""What is trained for how long, in which order: the phases of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from m3stack.train.batches import NEEDLE_THOUSANDS, SHORT_TOKENS, BatchKind
from m3stack.train.drills import DRILL_TOKENS
from m3stack.train.operations import Selection

Share = tuple[float, BatchKind]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training.

    Attributes:
        until: share of the whole run at which it ends.
        kinds: (weight, kind) of the batches.
        selection: how sparse layers choose.
        has_index_loss: whether the index branch learns.
        has_hints: whether some heads are told where to look (`hints`).
    """

    until: float
    kinds: tuple[Share, ...]
    selection: Selection
    has_index_loss: bool = True
    has_hints: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A run.

    Attributes:
        peak_rate: learning rate after `warmup_steps`; it falls to nothing over the last
            `decay_share` of the run.
        loss_rows: rows of every sequence, of the uniform ones and of the ones with an answer,
            whose index loss is computed, for a batch of as many sequences as there are in one of
            `SHORT_TOKENS`.
    """

    phases: tuple[Phase, ...]
    seed: int = 20
    peak_rate: float = 1e-3
    warmup_steps: int = 200
    decay_share: float = 0.35
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    bias_rate: float = 2e-3
    loss_rows: int = 1024
    name: str = "main"

    def phase_at(self, progress: float) -> Phase:
        return next((p for p in self.phases if progress < p.until), self.phases[-1])

    def kind_at(self, step: int, phase: Phase) -> BatchKind:
        """The kind of batch `step`: a function of seed, step and phase."""
        draw = random.Random(f"{self.seed}/kind/{step}")
        kinds = [kind for _, kind in phase.kinds]
        return draw.choices(kinds, [weight for weight, _ in phase.kinds])[0]

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of a step."""
        rising = min(1.0, (step + 1) / self.warmup_steps)
        falling = min(1.0, (1.0 - progress) / self.decay_share)
        return self.peak_rate * rising * max(falling, 0.02)


def _kinds(tokens: int, media: float) -> dict[str, BatchKind]:
    def short(share: float) -> BatchKind:
        rows = max(1, tokens // SHORT_TOKENS)
        return BatchKind(rows, SHORT_TOKENS, round(rows * share))

    kinds = {"mixed": short(media), "text": short(0.0), "media": short(1.0)}
    kinds["drill"] = BatchKind(max(1, tokens // 2 // DRILL_TOKENS), DRILL_TOKENS, is_drill=True)
    for thousands in NEEDLE_THOUSANDS:
        length = thousands * 1024
        # long documents take longer a token, and hold few questions
        kinds[f"{thousands}k"] = BatchKind(max(1, tokens // 2 // length), length, is_needle=True)
    return kinds


def main_recipe(
    tokens: int,
    *,
    longest: int = NEEDLE_THOUSANDS[-1],
    peak_rate: float = 1e-3,
) -> Recipe:
    """The shipped model: dense warm-up, then sparse; text, pictures and clips from step 0.

    Drills first teach to find what was said before, then passwords are asked for in documents no
    longer than everyday conversations, then in longer and longer ones. In the first third of the
    run some heads are told where to look.

    Args:
        tokens: of a batch.
        longest: thousands of tokens of the longest documents.
    """
    kinds = _kinds(tokens, 0.66)

    def mix(drills: float, share: float, first: int, last: int) -> tuple[Share, ...]:
        """Drills and documents of `first` to `last` thousand tokens beside the everyday rows."""
        sizes = [size for size in NEEDLE_THOUSANDS if min(first, longest) <= size <= last]
        long = [kinds[f"{size}k"] for size in sizes if size <= longest]
        everyday = (1 - drills - share, kinds["mixed"])
        shares = ((share / len(long), kind) for kind in long)
        return (everyday, (drills, kinds["drill"]), *shares)

    dense, own = Selection.ALL, Selection.OWN
    return Recipe(
        phases=(
            Phase(0.08, mix(0.25, 0.20, 1, 1), dense, has_hints=True),
            Phase(0.20, mix(0.05, 0.20, 1, 8), dense, has_hints=True),
            Phase(0.33, mix(0.02, 0.12, 2, 32), dense, has_hints=True),
            Phase(0.52, mix(0.02, 0.10, 2, 32), dense),
            Phase(1.00, mix(0.02, 0.16, 4, 64), own),
        ),
        peak_rate=peak_rate,
    )


def arm_recipe(tokens: int, *, text_first: bool) -> Recipe:
    """Mixed from step 0, or text first and media later: in equal steps of equal text and media."""
    kinds = _kinds(tokens, 0.5)
    dense = Selection.ALL
    if text_first:
        phases = (
            Phase(0.5, ((1.0, kinds["text"]),), dense),
            Phase(1.0, ((1.0, kinds["media"]),), dense),
        )
        return Recipe(phases, name="text_first")
    return Recipe((Phase(1.0, ((1.0, kinds["mixed"]),), dense),), name="step_0")


def selection_recipe(
    tokens: int, selection: Selection, *, has_index_loss: bool, longest: int
) -> Recipe:
    """A new index branch for a trained model: dense warm-up, then sparse, as in `main_recipe`.

    Args:
        longest: thousands of tokens of the longest documents.
    """
    kinds = _kinds(tokens, 0.6)
    medium = kinds[f"{max(1, longest // 4)}k"]
    mix = ((0.7, kinds["mixed"]), (0.15, medium), (0.15, kinds[f"{longest}k"]))
    name = f"{selection.name.lower()}{'' if has_index_loss else '_no_loss'}"
    return Recipe(
        (
            Phase(0.5, mix, Selection.ALL, has_index_loss),
            Phase(1.0, mix, selection, has_index_loss),
        ),
        peak_rate=1e-3,
        warmup_steps=20,
        decay_share=0.8,
        name=name,
    )
