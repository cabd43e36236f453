"""Replayed decode steps give what plain ones give, and stay within their memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.checkpoints import builtin_checkpoint
from m3stack.engine.graphs import SHORT_TOKENS, USES_BEFORE_RECORDING, DecodeGraphs
from m3stack.models.minimax_m3.model import M3Model
from tests.worker.support import PagedRunner, Track, load

VOCAB_ENOUGH = 300


class Again:
    """Stands in for a recording on a CPU: the same inputs, computed again, into one output."""

    num_bytes = 100

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self._output = run()

    def replay(self) -> Tensor:
        self._output.copy_(self._run())
        return self._output


@pytest.fixture(scope="module")
def model() -> M3Model:
    return load(builtin_checkpoint("tiny"))


def graphs(model: M3Model, caches: LayerCache, *, budget: int = 1 << 20) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        caches,
        record=Again,
        page_tokens=model.config.block_tokens,
        max_sequences=5,
        budget_bytes=budget,
    )


def decode(model: M3Model, lengths: list[int], steps: int, *, replay: bool) -> list[Tensor]:
    """Logits of decode steps behind prompts, with fewer sequences in every other step."""
    runner = PagedRunner(model, num_pages=64)
    forward = graphs(model, runner.cache) if replay else None
    tracks = [Track() for _ in lengths]
    generator = torch.Generator().manual_seed(1)
    for track, length in zip(tracks, lengths, strict=True):
        runner.feed(track, torch.randint(VOCAB_ENOUGH, (length,), generator=generator).tolist())
    logits = []
    for step in range(steps):
        active = tracks if step % 2 else tracks[: max(1, len(tracks) - step % 3)]
        parts = [(track, [17 * step % VOCAB_ENOUGH]) for track in active]
        batch = runner.batch(parts)
        with torch.inference_mode():
            run = model if forward is None else forward
            logits.append(run(batch, runner.cache).clone())
    if forward is not None:
        assert forward.num_replays > steps // 2
    return logits


@pytest.mark.parametrize("lengths", [[3], [5, 130, 300], [1, 2, 127, 128, 129]])
def test_replayed_steps_equal_plain_ones(model: M3Model, lengths: list[int]) -> None:
    plain = decode(model, lengths, 24, replay=False)
    replayed = decode(model, lengths, 24, replay=True)
    for left, right in zip(plain, replayed, strict=True):
        # rows of other batch sizes may be summed in another order: some units in the last place
        # of the greatest logit in each layer; another step's inputs would be off by whole logits
        torch.testing.assert_close(left, right, rtol=0, atol=2**-18 * float(left.abs().max()))


def test_other_steps_are_not_replayed(model: M3Model) -> None:
    runner = PagedRunner(model)
    forward = graphs(model, runner.cache)
    track = Track()
    with torch.inference_mode():
        for _ in range(2 * USES_BEFORE_RECORDING):
            forward(runner.batch([(track, [1, 2, 3])]), runner.cache)
        many = [(Track(), [4]) for _ in range(6)]
        for _ in range(2 * USES_BEFORE_RECORDING):
            forward(runner.batch(many), runner.cache)
    assert forward.num_replays == 0


def test_no_recording_is_begun_past_the_bound(model: M3Model) -> None:
    runner = PagedRunner(model)
    forward = graphs(model, runner.cache, budget=Again.num_bytes)
    tracks = [Track() for _ in range(3)]
    with torch.inference_mode():
        for count in (1, 3):
            for _ in range(2 * USES_BEFORE_RECORDING):
                forward(runner.batch([(track, [4]) for track in tracks[:count]]), runner.cache)
    assert forward.num_bytes == Again.num_bytes
    assert forward.num_replays == USES_BEFORE_RECORDING + 1


def test_a_step_that_cannot_be_recorded_goes_on_as_it_is(
    model: M3Model, caplog: pytest.LogCaptureFixture
) -> None:
    runner = PagedRunner(model)
    attempts = []

    def fails(run: Callable[[], Tensor]) -> Again:
        attempts.append(run)
        raise RuntimeError("cannot be recorded")

    forward = DecodeGraphs(
        model, runner.cache, record=fails, page_tokens=128, max_sequences=4, budget_bytes=1
    )
    track = Track()
    with torch.inference_mode():
        for _ in range(3 * USES_BEFORE_RECORDING):
            logits = forward(runner.batch([(track, [4])]), runner.cache)
    assert logits.isfinite().all()
    assert len(attempts) == 1


def test_lengths_have_recordings_of_their_own(model: M3Model) -> None:
    runner = PagedRunner(model)
    forward = graphs(model, runner.cache)
    batch = runner.batch([(Track(), [4])])

    def kind(max_seq_len: int):
        rows = batch.rows
        longer = type(rows)(
            rows.query_start_S1, rows.seq_lens_S, rows.page_table_SJ, 1, max_seq_len
        )
        return forward._kind(
            DeviceBatch(
                batch.token_ids_T,
                batch.positions_T,
                batch.slots_T,
                longer,
                batch.sample_rows_S,
                (),
            )
        )

    reaches = [kind(length).max_seq_len for length in (1, SHORT_TOKENS, SHORT_TOKENS + 1, 1 << 20)]
    assert reaches == [SHORT_TOKENS, SHORT_TOKENS, 2 * SHORT_TOKENS, 1 << 20]


def test_what_is_recorded_has_rows_nobody_has_seen(model: M3Model) -> None:
    runner = PagedRunner(model)
    seen: list[int] = []
    kept = []

    class Twice:
        """Runs twice, as a recorder that warms up does."""

        num_bytes = 1

        def __init__(self, run: Callable[[], Tensor]) -> None:
            run()
            self._output = run()

        def replay(self) -> Tensor:
            return self._output

    def forward(batch: DeviceBatch, caches: LayerCache) -> Tensor:
        kept.append(batch.rows)
        seen.append(id(batch.rows))
        return model(batch, caches)

    replayed = DecodeGraphs(
        forward, runner.cache, record=Twice, page_tokens=128, max_sequences=4, budget_bytes=9
    )
    track = Track()
    with torch.inference_mode():
        for _ in range(USES_BEFORE_RECORDING):
            replayed(runner.batch([(track, [4])]), runner.cache)
    assert len(seen) == USES_BEFORE_RECORDING + 1
    assert len(set(seen)) == len(seen)
