"""Media requests wait in line for room, get all or nothing, and never block each other."""

from __future__ import annotations

import asyncio

import pytest

from m3stack.cache.media import MediaClaim, MediaLedger
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.admission import MediaAdmission, MediaDemand
from tests.worker.rpc.worker_harness import run


def demand(name: int, *, features: int = 10, patches: int = 100) -> MediaDemand:
    return MediaDemand(MediaClaim(bytes([name]), features), patches)


def admission(
    ledger: MediaLedger, *, max_upload: int = 1000, timeout_s: float = 10
) -> MediaAdmission:
    return MediaAdmission(ledger, max_upload_bytes=max_upload, timeout_s=timeout_s)


def test_only_what_is_not_held_is_needed_and_each_once() -> None:
    async def scenario() -> None:
        ledger = MediaLedger(100)
        subject = admission(ledger)
        first = await subject.reserve([demand(1), demand(2), demand(1)])
        assert first.needed == (0, 1)
        assert subject.upload_bytes == 200
        ledger.mark_encoded(b"\x01")
        second = await subject.reserve([demand(1), demand(2)])
        assert second.needed == (1,)
        assert subject.upload_bytes == 300
        for reservation in (first, second):
            reservation.release_upload()
            reservation.release_upload()
            reservation.release_features()
            reservation.release_features()
        assert subject.upload_bytes == 0
        assert ledger.num_pinned == 0

    run(scenario)


def test_upload_bytes_in_flight_are_bounded_first_come_first_served() -> None:
    async def scenario() -> None:
        subject = admission(MediaLedger(1000), max_upload=250)
        first = await subject.reserve([demand(1), demand(2)])
        order: list[int] = []

        async def wait_for(name: int, patches: int) -> None:
            reservation = await subject.reserve([demand(name, patches=patches)])
            order.append(name)
            reservation.release_features()

        tasks = [asyncio.create_task(wait_for(name, size)) for name, size in ((3, 200), (4, 10))]
        for _ in range(5):
            await asyncio.sleep(0)
        # 4 would fit, but 3 came first
        assert order == []
        first.release_upload()
        await asyncio.gather(*tasks)
        assert order == [3, 4]

    run(scenario)


def test_room_for_features_freed_by_the_engine_thread_wakes_the_line() -> None:
    async def scenario() -> None:
        ledger = MediaLedger(20)
        subject = admission(ledger)
        await subject.reserve([demand(1), demand(2)])
        waiting = asyncio.create_task(subject.reserve([demand(3)]))
        await asyncio.sleep(0)
        assert not waiting.done()
        await asyncio.to_thread(ledger.release, [b"\x01"])
        assert (await waiting).needed == (0,)

    run(scenario)


def test_two_requests_that_need_each_others_room_both_get_through() -> None:
    async def scenario() -> None:
        ledger = MediaLedger(20)
        subject = admission(ledger)

        async def request(first: int, second: int) -> None:
            reservation = await subject.reserve([demand(first), demand(second)])
            await asyncio.sleep(0)
            reservation.release_upload()
            reservation.release_features()

        await asyncio.gather(*(request(n % 5, (n + 1) % 5) for n in range(20)))
        assert ledger.num_pinned == 0
        assert subject.upload_bytes == 0

    run(scenario)


def test_waiting_ends_as_overload_and_leaves_the_line() -> None:
    async def scenario() -> None:
        ledger = MediaLedger(10)
        subject = admission(ledger, timeout_s=0.02)
        held = await subject.reserve([demand(1)])
        with pytest.raises(WorkerError) as refused:
            await subject.reserve([demand(2)])
        assert refused.value.kind is ErrorKind.OVERLOADED
        held.release_features()
        await subject.reserve([demand(2)])

    run(scenario)


def test_cancelled_waiter_lets_the_next_one_through() -> None:
    async def scenario() -> None:
        subject = admission(MediaLedger(100), max_upload=100)
        held = await subject.reserve([demand(1)])
        gone = asyncio.create_task(subject.reserve([demand(2)]))
        next_one = asyncio.create_task(subject.reserve([demand(3)]))
        await asyncio.sleep(0)
        gone.cancel()
        held.release_upload()
        assert (await next_one).needed == (0,)

    run(scenario)


@pytest.mark.parametrize(
    ("demands", "message"),
    [
        ([demand(1, features=60), demand(2, features=60)], "features of the request's media take"),
        ([demand(1, patches=1001)], "take 1001 bytes, this worker has room for 1000"),
    ],
)
def test_what_could_never_fit_is_refused_at_once(demands: list[MediaDemand], message: str) -> None:
    async def scenario() -> None:
        with pytest.raises(WorkerError) as refused:
            await admission(MediaLedger(100)).reserve(demands)
        assert refused.value.kind is ErrorKind.MEDIA_REJECTED
        assert message in refused.value.message

    run(scenario)
