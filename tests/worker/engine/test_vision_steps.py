"""Pictures and clips are encoded in parts that fit a step, together, and never twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.engine.scheduler import SchedulerLimits
from m3stack.engine.sequence import place_media
from m3stack.types import Request
from tests.worker.engine.drive import Drive
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PATCH_FORMAT,
    VIDEO_ID,
    Stack,
    clip,
    greedy_alone,
    image,
    sampling,
)


def clip_request(seed: int, *, slices: int, width: int = 2, max_tokens: int = 4) -> Request:
    item = clip(seed, offset=1, num_slices=slices, tokens_per_slice=width)
    prompt = (3, *([VIDEO_ID] * width + [5]) * slices)
    return Request("c", prompt, sampling(max_tokens=max_tokens), PATCH_FORMAT, (item,))


def expected(request: Request) -> list[int]:
    return greedy_alone(request, {m.media_hash: bytes(m.patches or b"") for m in request.media})


def limits(batch: int = 64, patches: int = 16) -> SchedulerLimits:
    return SchedulerLimits(batch, 6, patches)


def test_a_clip_goes_one_part_a_step_while_others_get_a_token_in_each() -> None:
    # ten slices of 8 patches, two see each other: five parts of 16 patches
    request = clip_request(1, slices=10)
    drive = Drive(Stack(num_pages=64, limits=limits(), segment_patches=2))
    decoding = drive.add(Request("d", (1, 2, 3), sampling(max_tokens=30)))
    drive.step()
    handle = drive.add(request)
    encoded = []
    while not drive.tokens[handle]:
        plan = drive.step()
        assert decoding in [row.handle for row in plan.rows], "decode waited for an encoder"
        encoded += [(e.first_part, e.num_parts) for e in plan.encodes]
    assert encoded == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    drive.drain()
    assert drive.tokens[handle] == expected(request)
    assert drive.stack.model.encoded_items == 5


def test_prompts_go_on_over_the_parts_that_are_there() -> None:
    request = clip_request(1, slices=10)
    drive = Drive(Stack(num_pages=64, limits=limits(), segment_patches=2))
    handle = drive.add(request)
    reached = []
    while not drive.tokens[handle]:
        drive.step()
        reached.append(drive.sequences[handle].num_computed)
    # up to the first placeholder whose feature is still missing: 1 + 3 tokens a slice
    assert reached == [7, 13, 19, 25, 31]


def test_media_of_several_requests_are_encoded_in_one_call() -> None:
    def picture(seed: int) -> Request:
        prompt = (seed, *[IMAGE_ID] * 2, 4)
        item = image(seed, offset=1, num_tokens=2)
        return Request("p", prompt, sampling(max_tokens=2), PATCH_FORMAT, (item,))

    requests = [picture(seed) for seed in range(4)]
    drive = Drive(Stack(limits=limits(patches=24)))
    handles = [drive.add(request) for request in requests]
    drive.drain()
    # 8 patches each, 24 a step
    assert [len(plan.encodes) for plan in drive.plans][:2] == [3, 1]
    assert (drive.stack.model.encode_calls, drive.stack.model.encoded_items) == (2, 4)
    for handle, request in zip(handles, requests, strict=True):
        assert drive.tokens[handle] == expected(request)


def test_a_clip_whose_request_leaves_half_way_is_finished_by_the_other() -> None:
    request = clip_request(1, slices=10)
    drive = Drive(Stack(num_pages=64, limits=limits(), segment_patches=2))
    first, second = drive.add(request), drive.add(request)
    drive.step()
    drive.step()
    drive.cancel(first)
    drive.drain()
    assert drive.tokens[second] == expected(request)
    assert drive.stack.model.encoded_items == 5
    drive.check_clean()


def test_half_a_clip_that_nobody_wants_any_more_is_forgotten() -> None:
    drive = Drive(Stack(num_pages=64, limits=limits(), segment_patches=2, media_budget=200))
    handle = drive.add(clip_request(1, slices=10))
    drive.step()
    drive.cancel(handle)
    assert drive.stack.media.booked_bytes == 0
    again = clip_request(1, slices=10)
    handle = drive.add(again)
    drive.drain()
    assert drive.tokens[handle] == expected(again)
    drive.check_clean()


@pytest.mark.parametrize("segment", [1, 3, 4, 100])
def test_parts_are_the_segments_and_their_features_reach_as_far_as_they_say(segment: int) -> None:
    request = clip_request(0, slices=10, width=3)
    (item,) = place_media(request, segment)
    assert sum(item.part_patches) == 10 * 12
    assert len(item.part_patches) == -(-10 // segment)
    slices = 0
    for number, patches in enumerate(item.part_patches):
        slices += patches // 12
        # the next slice's first placeholder
        at = 1 + 4 * slices if slices < 10 else item.end
        assert item.reach(number + 1) == at
    assert item.reach(0) == item.first


@given(
    clips=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 7), st.integers(1, 4)), min_size=1, max_size=5
    ),
    segment=st.integers(1, 4),
    batch=st.integers(7, 40),
    patches=st.integers(1, 80),
    host_slots=st.sampled_from([0, 20]),
)
@settings(max_examples=40, deadline=None)
def test_any_clips_in_any_parts_give_what_each_gives_alone(
    clips: list[tuple[int, int, int]], segment: int, batch: int, patches: int, host_slots: int
) -> None:
    stack = Stack(
        num_pages=20,
        limits=limits(batch, patches),
        segment_patches=segment,
        host_slots=host_slots,
    )
    drive = Drive(stack)
    requests = [clip_request(s, slices=n, width=w, max_tokens=9) for s, n, w in clips]
    handles = [drive.add(request) for request in requests]
    drive.drain()
    for handle, request in zip(handles, requests, strict=True):
        assert drive.tokens[handle] == expected(request)
    drive.check_clean()
