"""Replayed decode steps give what plain ones give, and stay within their memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.checkpoints import builtin_checkpoint
from m3stack.engine.graphs import (
    SHORT_TOKENS,
    USES_BEFORE_RECORDING,
    Agree,
    DecodeGraphs,
    Recorder,
)
from m3stack.models.minimax_m3.model import M3Model
from tests.worker.engine.recorders import Again, AgainRecorder, RefusingRecorder
from tests.worker.support import PagedRunner, Track, load

VOCAB_ENOUGH = 300


@pytest.fixture(scope="module")
def model() -> M3Model:
    return load(builtin_checkpoint("tiny"))


def graphs(model: M3Model, caches: LayerCache, *, budget: int = 1 << 20) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        caches,
        record=AgainRecorder(),
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


def test_a_step_that_cannot_be_recorded_goes_on_as_it_is(model: M3Model) -> None:
    runner = PagedRunner(model)
    recorder = RefusingRecorder()
    forward = DecodeGraphs(
        model, runner.cache, record=recorder, page_tokens=128, max_sequences=4, budget_bytes=1
    )
    track = Track()
    with torch.inference_mode():
        for _ in range(3 * USES_BEFORE_RECORDING):
            logits = forward(runner.batch([(track, [4])]), runner.cache)
    assert logits.isfinite().all()
    assert recorder.attempts == 1


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

    def forward(batch: DeviceBatch, caches: LayerCache) -> Tensor:
        kept.append(batch.rows)
        seen.append(id(batch.rows))
        return model(batch, caches)

    replayed = DecodeGraphs(
        forward,
        runner.cache,
        record=AgainRecorder(),
        page_tokens=128,
        max_sequences=4,
        budget_bytes=9,
    )
    track = Track()
    with torch.inference_mode():
        for _ in range(USES_BEFORE_RECORDING):
            replayed(runner.batch([(track, [4])]), runner.cache)
    # those before it, the warming up, the recording, and the replay of this stand-in
    assert len(seen) == USES_BEFORE_RECORDING + 2
    assert len(set(seen)) == len(seen)


def of_ranks(model: M3Model, caches: LayerCache, recorder: Recorder, agree: Agree) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        caches,
        record=recorder,
        page_tokens=model.config.block_tokens,
        max_sequences=4,
        budget_bytes=250,
        agree=agree,
    )


def test_ranks_count_what_a_recording_takes_on_the_fullest(model: M3Model) -> None:
    runner, recorder = PagedRunner(model), AgainRecorder()
    told: list[int | None] = []

    def agree(own: int | None) -> int | None:
        told.append(own)
        return 200

    forward = of_ranks(model, runner.cache, recorder, agree)
    tracks = [Track() for _ in range(4)]
    with torch.inference_mode():
        for count in (1, 2, 3, 4):
            for _ in range(2 * USES_BEFORE_RECORDING):
                forward(runner.batch([(track, [4]) for track in tracks[:count]]), runner.cache)
    # three rows take the recording of four; a third kind would be past the bound
    assert told == [Again.num_bytes] * 2
    assert forward.num_bytes == 400
    assert forward.num_recordings == 2


def test_a_recording_that_another_rank_lacks_is_given_back(model: M3Model) -> None:
    runner, recorder = PagedRunner(model), AgainRecorder()
    forward = of_ranks(model, runner.cache, recorder, lambda own: None)
    track = Track()
    with torch.inference_mode():
        for _ in range(3 * USES_BEFORE_RECORDING):
            forward(runner.batch([(track, [4])]), runner.cache)
    assert [made.is_released for made in recorder.made] == [True]
    assert forward.num_replays == forward.num_bytes == 0


class _FailsToWarmUp(AgainRecorder):
    def warm_up(self, run: Callable[[], Tensor]) -> None:
        raise ValueError("half way through a collective")


def _is_gone(own: int | None) -> int | None:
    raise RuntimeError("a rank is gone")


@pytest.mark.parametrize(
    ("recorder", "agree", "message"),
    [(_FailsToWarmUp(), lambda own: own, "half way"), (AgainRecorder(), _is_gone, "gone")],
)
def test_a_rank_out_of_step_does_not_go_on(
    model: M3Model, recorder: AgainRecorder, agree: Agree, message: str
) -> None:
    runner = PagedRunner(model)
    forward = of_ranks(model, runner.cache, recorder, agree)
    track = Track()
    with torch.inference_mode():
        for _ in range(USES_BEFORE_RECORDING - 1):
            forward(runner.batch([(track, [4])]), runner.cache)
        with pytest.raises((RuntimeError, ValueError), match=message):
            forward(runner.batch([(track, [4])]), runner.cache)


def test_released_recordings_are_neither_replayed_nor_made_anew(model: M3Model) -> None:
    runner, recorder = PagedRunner(model), AgainRecorder()
    forward = of_ranks(model, runner.cache, recorder, lambda own: own)
    tracks = [Track(), Track()]
    with torch.inference_mode():
        for _ in range(2 * USES_BEFORE_RECORDING):
            forward(runner.batch([(tracks[0], [4])]), runner.cache)
        replays = forward.num_replays
        forward.release()
        forward.release()
        for count in (1, 2):
            for _ in range(2 * USES_BEFORE_RECORDING):
                parts = [(track, [4]) for track in tracks[:count]]
                assert forward(runner.batch(parts), runner.cache).isfinite().all()
    assert forward.num_replays == replays > 0
    assert [made.is_released for made in recorder.made] == [True]
    assert forward.num_recordings == 0
