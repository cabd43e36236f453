"""What operators ask of a worker, over the wire."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from m3stack.cli import explain
from m3stack.engine.scheduler import SchedulerLimits
from m3stack.types import Finished, Request
from m3stack.worker.v1 import worker_pb2 as pb
from tests.worker.engine.history_model import IMAGE_ID, PATCH_FORMAT, Stack, image, sampling
from tests.worker.rpc.worker_harness import run, worker


def text(name: str, length: int, *, salt: int = 0, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(name, prompt, sampling(**changes))


def test_flush_makes_the_next_request_compute_everything_again() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            cached = []
            for number in range(3):
                if number == 2:
                    flushed = await subject.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
                    assert flushed.freed_pages == 4
                events = [e async for e in subject.client.generate(text("r", 25))]
                end = events[-1]
                assert isinstance(end, Finished)
                cached.append(end.usage.cached_tokens)
            assert cached == [0, 24, 0]

    run(scenario)


def test_an_account_adds_up_step_by_step() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            await subject.tokens(text("mine", 40, max_tokens=5))
            told = await subject.admin.Explain(pb.ExplainRequest(request_id="mine"))
            assert (told.outcome, told.prompt_tokens, told.output_tokens) == ("length", 40, 5)
            phases = [entry.phase for entry in told.entries]
            # 40 tokens in steps of 16
            assert phases == ["queue", "prefill", "prefill", "prefill", "decode"]
            assert [entry.tokens for entry in told.entries] == [0, 16, 16, 8, 5]
            decode = told.entries[-1]
            # the first token came with the last chunk
            assert (decode.steps, decode.batch_tokens, decode.mixed_steps) == (4, 4, 0)
            assert 0 < decode.steps_ms <= decode.duration_ms
            for before, after in zip(told.entries, told.entries[1:], strict=False):
                assert before.start_ms + before.duration_ms <= after.start_ms + 1e-6

    run(scenario)


def test_an_account_tells_of_uploads_encoding_preemption_and_restoring() -> None:
    async def scenario() -> None:
        stack = Stack(num_pages=10, host_slots=64, limits=SchedulerLimits(16, 4, 64))
        async with worker(stack) as subject:
            subject.runner.gate.clear()
            requests = [text(f"r{salt}", 10 + salt, salt=salt, max_tokens=40) for salt in range(4)]
            tasks = [asyncio.create_task(subject.tokens(request)) for request in requests]
            # text is submitted in the same breath in which its session opens
            await subject.until(lambda: subject.sessions.num_open == 4)
            subject.runner.gate.set()
            await asyncio.gather(*tasks)
            accounts = [
                await subject.admin.Explain(pb.ExplainRequest(request_id=f"r{n}")) for n in range(4)
            ]
            assert sum(account.preemptions for account in accounts) > 0
            told = next(account for account in accounts if account.preemptions)
            phases = [entry.phase for entry in told.entries]
            at = phases.index("preempted")
            assert phases[at - 1 : at + 3] == ["decode", "preempted", "restore", "decode"]
            assert "host memory" in told.entries[at + 1].note
            assert told.output_tokens == 40
            prompt = (1, *[IMAGE_ID] * 6, 2)
            media = (image(3, offset=1, num_tokens=6),)
            await subject.tokens(Request("picture", prompt, sampling(), PATCH_FORMAT, media))
            told = await subject.admin.Explain(pb.ExplainRequest(request_id="picture"))
            assert [entry.phase for entry in told.entries] == [
                "upload",
                "queue",
                "encode",
                "prefill",
                "decode",
            ]

    run(scenario)


def test_the_command_prints_an_account_and_says_when_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> None:
        async with worker() as subject:
            await subject.tokens(text("mine-0", 200 - 5, max_tokens=5))
            arguments = ["--worker", subject.target]
            assert await asyncio.to_thread(explain.main, ["mine", *arguments]) == 0
            assert await asyncio.to_thread(explain.main, ["other", *arguments]) == 1

    run(scenario)
    shown = capsys.readouterr()
    assert "request mine-0: length" in shown.out
    assert "prompt 195 tokens, 0 of them cached; output 5" in shown.out
    lines = [line.split() for line in shown.out.splitlines()]
    chunks = [line for line in lines if len(line) > 3 and line[2] == "prefill"]
    # 13 steps: eight shown, five folded
    assert len(chunks) == explain.SHOWN_CHUNKS + 1
    assert sum(int(line[3]) for line in chunks) == 195
    assert "no account of that request" in shown.err


def test_running_requests_are_explained_and_unknown_ones_are_not_found() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            call = subject.client.generate(text("live", 9, max_tokens=150))
            await anext(call)
            told = await subject.admin.Explain(pb.ExplainRequest(request_id="live"))
            assert told.outcome in ("running", "length")
            await call.aclose()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await subject.admin.Explain(pb.ExplainRequest(request_id="never"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario)
