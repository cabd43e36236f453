"""The two calls over real gRPC: streaming, refusals, media, cancellation, reports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from m3stack.engine.scheduler import SchedulerLimits
from m3stack.errors import GRPC_STATUS_NAME, ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.rpc.upload import MAX_CHUNK_BYTES
from m3stack.types import (
    Finished,
    FinishReason,
    MediaItem,
    Request,
    Started,
    Tokens,
    WorkerState,
)
from m3stack.worker.v1 import worker_pb2 as pb
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PATCH_FORMAT,
    Stack,
    greedy_alone,
    image,
    sampling,
)
from tests.worker.rpc.test_checks import video
from tests.worker.rpc.worker_harness import (
    LIMITS,
    TIMEOUT_S,
    Options,
    Worker,
    run,
    tokens_of,
    worker,
)


def text(salt: int = 0, *, length: int = 9, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(f"r{salt}", prompt, sampling(**changes))


def picture(seed: int, *, num_tokens: int = 6) -> Request:
    prompt = (1, *[IMAGE_ID] * num_tokens, 2)
    item = image(seed, offset=1, num_tokens=num_tokens)
    return Request("p", prompt, sampling(), PATCH_FORMAT, (item,))


def expected(request: Request) -> list[int]:
    patches = {item.media_hash: bytes(item.patches or b"") for item in request.media}
    return greedy_alone(request, patches)


def header(request: Request) -> pb.GenerateRequest:
    return pb.GenerateRequest(header=convert.header_to_proto(request, LIMITS.fingerprint))


def chunk(index: int, data: bytes, *, offset: int = 0, sha: bytes = b"") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chunk=pb.MediaChunk(item_index=index, offset=offset, data=data, patches_sha256=sha)
    )


def whole(item: MediaItem, index: int = 0) -> pb.GenerateRequest:
    data = bytes(item.patches or b"")
    return chunk(index, data, sha=hashlib.sha256(data).digest())


async def failure_of(
    subject: Worker, messages: Sequence[pb.GenerateRequest], *, half_close: bool = True
) -> tuple[grpc.StatusCode, pb.ErrorDetail]:
    """Sends messages, reads to the end, and returns status and detail."""
    call = subject.stub.Generate()
    for message in messages:
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            break
    if half_close:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    trailers = dict(caught.value.trailing_metadata() or ())
    detail = pb.ErrorDetail.FromString(trailers[convert.ERROR_TRAILER])
    assert caught.value.details() == detail.message
    assert caught.value.code().name == GRPC_STATUS_NAME[ErrorKind(detail.kind)]
    return caught.value.code(), detail


def test_a_request_streams_started_tokens_finished() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            request = text(max_tokens=5)
            events = [event async for event in subject.client.generate(request)]
            assert isinstance(events[0], Started)
            assert tokens_of(events) == expected(request)
            end = events[-1]
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.LENGTH
            assert end.usage.prompt_tokens == 9
            assert end.usage.completion_tokens == 5
            assert all(isinstance(event, Tokens) for event in events[1:-1])

    run(scenario)


def test_sixteen_requests_at_once_each_get_what_they_get_alone() -> None:
    async def scenario() -> None:
        async with worker(Stack(num_pages=60)) as subject:
            requests = [
                picture(salt % 3, num_tokens=3 + salt)
                if salt % 4 == 3
                else text(salt, length=1 + 11 * salt, max_tokens=4 + salt)
                for salt in range(12)
            ]
            seeded = [
                text(salt, length=5, max_tokens=12, temperature=1.0, top_p=0.9, seed=salt)
                for salt in range(4)
            ]
            alone = [await subject.tokens(request) for request in seeded]
            together = await asyncio.gather(*(subject.tokens(r) for r in (*requests, *seeded)))
            assert together[:12] == [expected(request) for request in requests]
            assert together[12:] == alone

    run(scenario)


def test_logprobs_come_with_every_token() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            request = text(max_tokens=3, logprobs=True, top_logprobs=2)
            events = [event async for event in subject.client.generate(request)]
            entries = [e for event in events if isinstance(event, Tokens) for e in event.logprobs]
            assert len(entries) == 3
            for token, entry in zip(tokens_of(events), entries, strict=True):
                assert len(entry.top) == 2
                assert entry.top[0] == (token, pytest.approx(entry.logprob))

    run(scenario)


def test_stop_id_is_reported_in_the_end() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            stop = expected(text())[3]
            request = text(stop_token_ids=frozenset({stop}))
            events = [event async for event in subject.client.generate(request)]
            end = events[-1]
            assert isinstance(end, Finished)
            assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)

    run(scenario)


def test_absent_sampling_field_is_an_error_on_the_wire() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            message = header(text())
            message.header.sampling.ClearField("temperature")
            code, detail = await failure_of(subject, [message])
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert detail.kind == pb.ERROR_KIND_INVALID_REQUEST
            assert detail.param == "sampling.temperature"
            assert await subject.tokens(text()) == expected(text())

    run(scenario)


def test_calls_that_do_not_begin_with_a_header_are_refused() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            for messages in ([], [chunk(0, b"x")], [pb.GenerateRequest()]):
                _, detail = await failure_of(subject, messages)
                assert "first message must be a header" in detail.message

    run(scenario)


def test_call_without_any_message_ends_in_time() -> None:
    async def scenario() -> None:
        async with worker(options=Options(upload_timeout_s=0.05)) as subject:
            _, detail = await failure_of(subject, [], half_close=False)
            assert detail.kind == pb.ERROR_KIND_DEADLINE_EXCEEDED
            assert "no header arrived within 0.05 s" in detail.message

    run(scenario)


def test_too_long_prompt_is_told_from_other_faults() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            _, detail = await failure_of(subject, [header(text(length=300))])
            assert detail.kind == pb.ERROR_KIND_CONTEXT_TOO_LONG

    run(scenario)


def test_needs_are_always_answered_and_held_items_are_not_asked_for_again() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            request = picture(1)
            asked: list[list[int]] = []
            for round_number in range(2):
                call = subject.stub.Generate()
                await call.write(header(request))
                first = await call.read()
                assert first.WhichOneof("body") == "needs"
                asked.append(list(first.needs.item_indices))
                if asked[-1]:
                    await call.write(whole(request.media[0]))
                await call.done_writing()
                tokens = [t async for response in rest(call) for t in response.tokens.token_ids]
                assert tokens == expected(request), round_number
            assert asked == [[0], []]
            assert subject.stack.model.encoded_items == 1

    run(scenario)


async def rest(
    call: grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> AsyncIterator[pb.GenerateResponse]:
    while isinstance(response := await call.read(), pb.GenerateResponse):
        yield response


def test_a_held_item_stays_while_others_push_for_its_room() -> None:
    async def scenario() -> None:
        # room for two pictures of six tokens
        async with worker(Stack(media_budget=48)) as subject:
            first = picture(1)
            await subject.tokens(first)
            # the second call is told that the item is held, and is then made to wait in the queue
            subject.runner.gate.clear()
            blocker = asyncio.create_task(subject.tokens(text(5)))
            await asyncio.to_thread(subject.runner.entered.wait)
            held = asyncio.create_task(subject.tokens(first))
            await subject.until(lambda: subject.stack.media.num_pinned == 1)
            pushers = [asyncio.create_task(subject.tokens(picture(n))) for n in (2, 3, 4)]
            await subject.until(lambda: subject.stack.media.num_pinned == 2)
            subject.runner.gate.set()
            assert await held == expected(first)
            for number, pusher in zip((2, 3, 4), pushers, strict=True):
                assert await pusher == expected(picture(number))
            await blocker
            assert subject.stack.model.encoded_items == 4

    run(scenario)


def test_video_and_large_uploads_arrive_in_many_chunks() -> None:
    async def scenario() -> None:
        async with worker(options=Options(max_upload_bytes=1 << 30)) as subject:
            clip = video(offset=1)
            request = Request(
                "v",
                (1, *[60] * 3, 2, 3, *[60] * 3, 4),
                sampling(max_tokens=3),
                PATCH_FORMAT,
                (clip,),
            )
            call = subject.stub.Generate()
            await call.write(header(request))
            assert list((await call.read()).needs.item_indices) == [0]
            data = bytes(clip.patches or b"")
            for offset in range(0, len(data), 100):
                piece = data[offset : offset + 100]
                is_last = offset + 100 >= len(data)
                sha = hashlib.sha256(data).digest() if is_last else b""
                await call.write(chunk(0, piece, offset=offset, sha=sha))
            await call.done_writing()
            tokens = [t async for response in rest(call) for t in response.tokens.token_ids]
            assert tokens == expected(request)

    run(scenario)


def broken_uploads() -> list[tuple[str, list[pb.GenerateRequest], str]]:
    item = picture(1).media[0]
    data = bytes(item.patches or b"")
    sha = hashlib.sha256(data).digest()
    half = len(data) // 2
    return [
        ("nothing", [], "is incomplete: the upload ended after 0 of 288 bytes"),
        ("short", [chunk(0, data[:-1])], "is incomplete: the upload ended after 287 of 288"),
        ("no hash", [chunk(0, data)], "has no patches_sha256 on its last chunk"),
        ("wrong hash", [chunk(0, data, sha=b"x" * 32)], "the upload is damaged"),
        ("damaged", [chunk(0, bytes([data[0] ^ 1]) + data[1:], sha=sha)], "is damaged"),
        ("early hash", [chunk(0, data[:half], sha=sha)], "ends at 144 of 288 bytes"),
        ("too long", [chunk(0, data + b"x", sha=sha)], "288 were announced"),
        ("wrong item", [chunk(1, data, sha=sha)], "was due, a chunk of media[1] came"),
        ("hole", [chunk(0, data[1:], offset=1)], "was due at offset 0, a chunk at 1 came"),
        (
            "repeated",
            [chunk(0, data[:half]), chunk(0, data[:half])],
            "was due at offset 144, a chunk at 0 came",
        ),
        ("empty chunk", [chunk(0, b"")], "has a chunk of 0 bytes"),
        ("big chunk", [chunk(0, b"x" * (MAX_CHUNK_BYTES + 1))], "expected 1 to 2097152"),
    ]


@pytest.mark.parametrize(("name", "messages", "message"), broken_uploads())
def test_broken_uploads_are_rejected_by_item_and_leave_nothing(
    name: str, messages: list[pb.GenerateRequest], message: str
) -> None:
    async def scenario() -> None:
        async with worker() as subject:
            code, detail = await failure_of(subject, [header(picture(1)), *messages])
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert detail.kind == pb.ERROR_KIND_MEDIA_REJECTED
            assert detail.param == "media[0]"
            assert message in detail.message
            assert subject.stack.media.booked_bytes == 0
            assert await subject.tokens(picture(1)) == expected(picture(1))

    run(scenario)


def test_second_header_during_an_upload_is_refused() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            _, detail = await failure_of(subject, [header(picture(1)), header(picture(1))])
            assert detail.kind == pb.ERROR_KIND_INVALID_REQUEST
            assert detail.param == "media[0]"

    run(scenario)


def test_late_upload_ends_with_the_item_named() -> None:
    async def scenario() -> None:
        start = chunk(0, bytes(picture(1).media[0].patches or b"")[:10])
        messages = [header(picture(1)), start]
        # a busy machine may need longer to get as far as the first chunk
        for upload_timeout_s in (0.05, 1, 30):
            async with worker(options=Options(upload_timeout_s=upload_timeout_s)) as subject:
                code, detail = await failure_of(subject, messages, half_close=False)
            if "10 of 288 bytes arrived" in detail.message:
                break
        assert "10 of 288 bytes arrived" in detail.message
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert detail.kind == pb.ERROR_KIND_DEADLINE_EXCEEDED
        assert detail.param == "media[0]"

    run(scenario)


def test_client_that_leaves_during_its_upload_leaves_nothing() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            call = subject.stub.Generate()
            await call.write(header(picture(1)))
            await call.read()
            assert subject.admission.upload_bytes == 288
            call.cancel()
            await subject.until(lambda: subject.sessions.num_open == 0)
            assert subject.stack.media.booked_bytes == 0

    run(scenario)


def test_upload_room_is_given_back_once_encoded_not_at_the_end() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            request = dataclasses.replace(picture(1), sampling=sampling(max_tokens=150))
            subject.runner.steps_left = 3
            events = subject.client.generate(request)
            async for event in events:
                if isinstance(event, Tokens):
                    break
            assert subject.sessions.num_open == 1
            assert subject.admission.upload_bytes == 0
            await events.aclose()

    run(scenario)


def test_media_that_could_never_fit_is_refused_before_any_upload() -> None:
    async def scenario() -> None:
        async with worker(options=Options(max_upload_bytes=200)) as subject:
            _, detail = await failure_of(subject, [header(picture(1))])
            assert detail.kind == pb.ERROR_KIND_MEDIA_REJECTED
            assert "take 288 bytes, this worker has room for 200" in detail.message

    run(scenario)


def test_cancelled_call_frees_its_pages_at_the_next_step() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            subject.runner.steps_left = 3
            events = subject.client.generate(text(max_tokens=180))
            async for event in events:
                if isinstance(event, Tokens):
                    break
            assert subject.engine.load.used_pages > 0
            await events.aclose()
            # the worker has noticed, while the fourth step at most waits to begin
            await subject.until(lambda: subject.sessions.num_open == 0)
            subject.runner.steps_left = 0
            subject.runner.gate.set()
            await subject.until(lambda: subject.engine.load.used_pages == 0)
            assert subject.engine.load.steps <= 4

    run(scenario)


def test_call_cancelled_while_queued_never_runs() -> None:
    async def scenario() -> None:
        async with worker(Stack(limits=SchedulerLimits(16, 1, 64))) as subject:
            subject.runner.gate.clear()
            running = asyncio.create_task(subject.tokens(text(1)))
            await asyncio.to_thread(subject.runner.entered.wait)
            call = subject.stub.Generate()
            await call.write(header(text(2)))
            await subject.until(lambda: subject.sessions.num_open == 2)
            call.cancel()
            await subject.until(lambda: subject.sessions.num_open == 1)
            subject.runner.gate.set()
            assert await running == expected(text(1))
            assert subject.metrics.registry.get_sample_value(
                "m3stack_worker_prompt_tokens_total"
            ) == pytest.approx(9)

    run(scenario)


def test_queue_limit_refuses_as_overload() -> None:
    async def scenario() -> None:
        stack = Stack(limits=SchedulerLimits(16, 1, 64))
        async with worker(stack, Options(max_waiting_requests=2)) as subject:
            subject.runner.gate.clear()
            running = asyncio.create_task(subject.tokens(text(1)))
            await asyncio.to_thread(subject.runner.entered.wait)
            await subject.until(lambda: subject.sessions.num_queued == 0)
            queued = [asyncio.create_task(subject.tokens(text(n))) for n in (2, 3)]
            await subject.until(lambda: subject.sessions.num_queued == 2)
            code, detail = await failure_of(subject, [header(text(4))])
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert detail.message == "2 requests are waiting, the limit is 2"
            subject.runner.gate.set()
            assert await asyncio.gather(running, *queued) == [expected(text(n)) for n in (1, 2, 3)]

    run(scenario)


def test_slow_reader_gets_tokens_in_fewer_messages_and_loses_none() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            request = text(max_tokens=150)
            call = subject.stub.Generate()
            await call.write(header(request))
            await call.done_writing()
            await subject.until(
                lambda: subject.engine.load.running_requests == 0 and subject.engine.load.steps > 0
            )
            tokens = [t async for response in rest(call) for t in response.tokens.token_ids]
            assert tokens == expected(request)

    run(scenario)


@pytest.mark.parametrize("state", [WorkerState.LOADING, WorkerState.DRAINING])
def test_requests_are_refused_unless_ready(state: WorkerState) -> None:
    async def scenario() -> None:
        async with worker(options=Options(state=state)) as subject:
            code, detail = await failure_of(subject, [header(text())])
            assert code is grpc.StatusCode.UNAVAILABLE
            assert detail.kind == pb.ERROR_KIND_WORKER_UNAVAILABLE

    run(scenario)


def test_engine_failure_ends_the_call_with_its_kind() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            subject.runner.gate.clear()
            call = asyncio.create_task(subject.tokens(text()))
            await asyncio.to_thread(subject.runner.entered.wait)
            subject.engine.stop()
            subject.runner.gate.set()
            with pytest.raises(WorkerError) as failed:
                await call
            assert failed.value.kind is ErrorKind.WORKER_UNAVAILABLE
            code, detail = await failure_of(subject, [header(text())])
            assert code is grpc.StatusCode.UNAVAILABLE
            assert detail.message == "the engine has stopped"

    run(scenario)


def test_watch_tells_identity_once_then_changes_and_heartbeats() -> None:
    async def scenario() -> None:
        async with worker(options=Options(state=WorkerState.LOADING)) as subject:
            call = subject.stub.Watch(pb.WatchRequest(heartbeat_ms=100))
            first = await call.read()
            assert first.identity.worker_id == "w"
            assert first.state == pb.WORKER_STATE_LOADING
            subject.board.set_state(WorkerState.READY)
            second = await call.read()
            assert second.state == pb.WORKER_STATE_READY
            assert not second.HasField("identity")
            third = await call.read()
            assert third.state == pb.WORKER_STATE_READY, "a heartbeat though nothing changed"
            subject.runner.gate.clear()
            running = asyncio.create_task(subject.tokens(text()))
            await asyncio.to_thread(subject.runner.entered.wait)
            while (await call.read()).load.running_requests != 1:
                pass
            subject.runner.gate.set()
            await running
            while (await call.read()).load.running_requests != 0:
                pass
            subject.board.close()
            async with asyncio.timeout(TIMEOUT_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is grpc.StatusCode.OK

    run(scenario)


def test_corrected_identity_ends_a_watch_that_told_another() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            call = subject.stub.Watch(pb.WatchRequest(heartbeat_ms=60_000))
            await call.read()
            subject.board.replace_identity(subject.board.identity)
            corrected = pb.Identity()
            corrected.CopyFrom(subject.board.identity)
            corrected.max_context_tokens = 5
            subject.board.replace_identity(corrected)
            while await call.read() is not grpc.aio.EOF:
                pass
            again = await subject.stub.Watch(pb.WatchRequest()).read()
            assert again.identity.max_context_tokens == 5

    run(scenario)


@pytest.mark.parametrize("heartbeat_ms", [1, 99, 60_001])
def test_unreasonable_heartbeats_are_refused(heartbeat_ms: int) -> None:
    async def scenario() -> None:
        async with worker() as subject:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await subject.stub.Watch(pb.WatchRequest(heartbeat_ms=heartbeat_ms)).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(heartbeat_ms) in (refused.value.details() or "")

    run(scenario)
