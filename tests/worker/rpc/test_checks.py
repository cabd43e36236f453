"""Every way a header can be wrong is refused by name, with the value and the limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.rpc.checks import read_header
from m3stack.types import MediaItem, MediaKind, Request, Span
from m3stack.worker.v1 import worker_pb2 as pb
from tests.worker.engine.history_model import IMAGE_ID, PATCH_FORMAT, VIDEO_ID, image, sampling
from tests.worker.rpc.worker_harness import CONTEXT, LIMITS

NAN, INF = float("nan"), float("inf")


def video(*, offset: int) -> MediaItem:
    """Two slices of three tokens, with two text tokens between."""
    return MediaItem(
        kind=MediaKind.VIDEO,
        media_hash=b"v" * 32,
        grid_thw=(2, 2, 6),
        frames_per_patch=2,
        spans=(Span(offset, 3), Span(offset + 5, 3)),
        patches=bytearray(2 * 2 * 6 * 3 * 2 * 4),
    )


def good_request() -> Request:
    prompt = (1, IMAGE_ID, IMAGE_ID, 2, *[VIDEO_ID] * 3, 3, 4, *[VIDEO_ID] * 3, 5, IMAGE_ID, 6)
    media = (
        image(1, offset=1, num_tokens=2),
        video(offset=4),
        image(2, offset=13, num_tokens=1),
    )
    return Request("r", prompt, sampling(max_tokens=9), PATCH_FORMAT, media)


def good_header() -> pb.GenerateHeader:
    return convert.header_to_proto(good_request(), LIMITS.fingerprint)


def set_field(path: str, value: object) -> Callable[[pb.GenerateHeader], None]:
    """Sets `a.b[0].c` of a header."""

    def change(header: pb.GenerateHeader) -> None:
        owner: object = header
        *parents, last = path.split(".")
        for part in parents:
            name, _, index = part.rstrip("]").partition("[")
            owner = getattr(owner, name)
            owner = owner[int(index)] if index else owner  # type: ignore[index]
        setattr(owner, last, value)

    return change


def clear_field(name: str) -> Callable[[pb.GenerateHeader], None]:
    return lambda header: header.sampling.ClearField(name)  # type: ignore[arg-type]


def assign(path: str, values: list[object]) -> Callable[[pb.GenerateHeader], None]:
    def change(header: pb.GenerateHeader) -> None:
        owner: object = header
        *parents, last = path.split(".")
        for part in parents:
            owner = getattr(owner, part)
        del getattr(owner, last)[:]
        getattr(owner, last).extend(values)

    return change


def test_good_header_becomes_the_request_it_was_made_from() -> None:
    request = good_request()
    read = read_header(good_header(), LIMITS)
    assert read.prompt_token_ids == request.prompt_token_ids
    assert read.sampling == request.sampling
    assert read.patch_format == request.patch_format
    assert [m.spans for m in read.media] == [m.spans for m in request.media]
    assert [m.grid_thw for m in read.media] == [m.grid_thw for m in request.media]
    assert all(m.patches is None for m in read.media)


@pytest.mark.parametrize("name", [field.name for field in pb.Sampling.DESCRIPTOR.fields])
def test_each_absent_sampling_field_is_named(name: str) -> None:
    header = good_header()
    header.sampling.ClearField(name)  # type: ignore[arg-type]
    if pb.Sampling.DESCRIPTOR.fields_by_name[name].is_repeated:
        read_header(header, LIMITS)
        return
    with pytest.raises(WorkerError) as refused:
        read_header(header, LIMITS)
    assert refused.value.kind is ErrorKind.INVALID_REQUEST
    assert refused.value.param == f"sampling.{name}"
    assert refused.value.message == f"sampling.{name} is missing"


@pytest.mark.parametrize(
    ("allowed", "banned", "changes", "param"),
    [
        ([61], [], {}, "allowed_token_ids"),
        ([], [61], {}, "banned_token_ids"),
        ([3, 4], [4, 3, 9], {}, "banned_token_ids"),
        ([], list(range(61)), {}, "banned_token_ids"),
        ([7], [], {"min_tokens": 1, "ignore_eos": False}, "min_tokens"),
        ([3], [], {"min_tokens": 1, "stop_token_ids": frozenset({3})}, "min_tokens"),
    ],
)
def test_a_choice_of_nothing_is_refused(
    allowed: list[int], banned: list[int], changes: dict[str, object], param: str
) -> None:
    rules = sampling(
        max_tokens=9,
        allowed_token_ids=frozenset(allowed),
        banned_token_ids=frozenset(banned),
        **changes,
    )
    header = convert.header_to_proto(Request("r", (1,), rules), LIMITS.fingerprint)
    with pytest.raises(WorkerError) as refused:
        read_header(header, LIMITS)
    assert refused.value.param == f"sampling.{param}"


def test_choices_that_leave_something_are_taken_over() -> None:
    for allowed, banned in (({3, 4}, {4}), (set(), {0, 1}), ({7}, set())):
        rules = sampling(
            max_tokens=9,
            allowed_token_ids=frozenset(allowed),
            banned_token_ids=frozenset(banned),
            ignore_eos=False,
        )
        header = convert.header_to_proto(Request("r", (1,), rules), LIMITS.fingerprint)
        assert read_header(header, LIMITS).sampling == rules


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("priority", [11, -11], [-10, 0, 10]),
        ("tenant", ["x" * 129, "a\nb", "é"], ["", "x" * 128, "team one"]),
        ("cache_salt", ["x" * 129, "\x1b["], ["", "s"]),
    ],
)
def test_priority_tenant_and_salt_are_checked_and_kept(
    field: str, bad: list[object], good: list[object]
) -> None:
    for value in bad:
        header = good_header()
        setattr(header, field, value)
        with pytest.raises(WorkerError) as refused:
            read_header(header, LIMITS)
        assert refused.value.param == field
    for value in good:
        header = good_header()
        setattr(header, field, value)
        assert getattr(read_header(header, LIMITS), field) == value


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("temperature", [-0.1, 2.1, NAN, INF], [0.0, 2.0]),
        ("top_p", [0.0, -1.0, 1.01, NAN], [0.001, 1.0]),
        ("min_p", [-0.1, 1.1, NAN], [0.0, 1.0]),
        ("max_tokens", [0], [1, 100]),
        ("min_tokens", [10, 2**32 - 1], [0, 9]),
        ("presence_penalty", [-2.1, 2.1, NAN], [-2.0, 2.0]),
        ("frequency_penalty", [-2.1, 2.1, NAN], [-2.0, 2.0]),
        ("repetition_penalty", [0.0, -1.0, NAN, INF], [0.1, 3.0]),
        ("top_logprobs", [21], [0, 20]),
    ],
)
def test_sampling_ranges(name: str, bad: list[float], good: list[float]) -> None:
    for value in bad:
        header = good_header()
        header.sampling.logprobs = True
        setattr(header.sampling, name, value)
        with pytest.raises(WorkerError) as refused:
            read_header(header, LIMITS)
        assert refused.value.param == f"sampling.{name}"
        assert "expected" in refused.value.message
    for value in good:
        header = good_header()
        header.sampling.logprobs = True
        setattr(header.sampling, name, value)
        read_header(header, LIMITS)


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (set_field("request_id", ""), "request_id", "has 0 characters, expected 1 to 128"),
        (set_field("request_id", "x" * 129), "request_id", "has 129 characters"),
        (set_field("request_id", "a\nb"), "request_id", "printable"),
        (set_field("fingerprint", b"g" * 32), "fingerprint", "prepared for model 676767"),
        (assign("prompt_token_ids", []), "prompt_token_ids", "is empty"),
        (assign("prompt_token_ids", [1, 61]), "prompt_token_ids[1]", "61, the vocabulary ends at"),
        (lambda h: h.ClearField("sampling"), "sampling", "is missing"),
        (set_field("sampling.top_logprobs", 2), "sampling.top_logprobs", "needs logprobs"),
        (assign("sampling.stop_token_ids", [61]), "sampling.stop_token_ids", "holds 61"),
        (
            assign("sampling.stop_token_ids", [1] * 1025),
            "sampling.stop_token_ids",
            "has 1025 ids, the limit is 1024",
        ),
        (
            lambda h: h.sampling.logit_bias.update({61: 1.0}),
            "sampling.logit_bias",
            "holds 61",
        ),
        (
            lambda h: h.sampling.logit_bias.update({3: 101.0}),
            "sampling.logit_bias[3]",
            "is 101, expected -100 to 100",
        ),
        (lambda h: h.sampling.logit_bias.update({3: NAN}), "sampling.logit_bias[3]", "nan"),
        (lambda h: h.ClearField("patch_format"), "patch_format", "is missing"),
        (set_field("patch_format.dtype", 0), "patch_format.dtype", "not PATCH_DTYPE_U8"),
        (set_field("patch_format.channels", 4), "patch_format.channels", "4, the model expects 3"),
        (set_field("patch_format.merge_size", 0), "patch_format.merge_size", "expects 2"),
        (assign("patch_format.mean", [0.5]), "patch_format.mean", "has 1 values, expected 3"),
        (assign("patch_format.mean", [NAN] * 3), "patch_format.mean", "not finite"),
        (assign("patch_format.std", [0.5, 0.0, 0.5]), "patch_format.std", "not above 0"),
        (set_field("media[0].kind", 0), "media[0].kind", "neither image nor video"),
        (set_field("media[0].media_hash", b"x"), "media[0].media_hash", "1 bytes, expected 32"),
        (set_field("media[0].grid.t", 0), "media[0].grid", "0 x 2 x 4"),
        (set_field("media[0].grid.t", 2), "media[0].grid.t", "is 2, a still has 1"),
        (set_field("media[0].grid.w", 3), "media[0].grid", "multiples of 2"),
        (
            set_field("media[0].frames_per_patch", 3),
            "media[0].frames_per_patch",
            "3, expected 1 or 2",
        ),
        (
            set_field("media[1].frames_per_patch", 1),
            "media[1].frames_per_patch",
            "1, expected 2",
        ),
        (
            set_field("media[1].patch_bytes", 575),
            "media[1].patch_bytes",
            "575, the grid gives 576",
        ),
        (
            set_field("media[0].spans[0].length", 1),
            "media[0].spans",
            "hold 1 tokens, the grid gives 2",
        ),
        (
            set_field("media[0].spans[0].offset", 2),
            "media[0].spans[0]",
            "covers 2 to 3, where the prompt does not hold only image placeholders (59)",
        ),
        (
            set_field("media[0].spans[0].offset", 2**32 - 1),
            "media[0].spans[0]",
            "does not hold only image",
        ),
        (set_field("media[0].kind", 2), "media[0].frames_per_patch", "expected 2"),
        (
            set_field("media[1].spans[1].offset", 4),
            "media[1].spans[1]",
            "starts at 4, before the end of the one before",
        ),
        (
            lambda h: h.media.append(h.media[2]),
            "media[3].spans[0]",
            "overlaps media[2].spans[0]",
        ),
        (
            lambda h: h.media.pop(),
            "media",
            "cover 2 image placeholders (59), the prompt has 3",
        ),
        (
            lambda h: (h.ClearField("media"), h.ClearField("patch_format")),
            "media",
            "cover 0 image placeholders",
        ),
    ],
)
def test_inconsistent_headers_are_refused_by_name(
    change: Callable[[pb.GenerateHeader], object], param: str, message: str
) -> None:
    header = good_header()
    change(header)
    with pytest.raises(WorkerError) as refused:
        read_header(header, LIMITS)
    assert refused.value.kind is ErrorKind.INVALID_REQUEST
    assert refused.value.param == param
    assert message in refused.value.message
    assert refused.value.message.startswith(param)


def test_empty_spans_cannot_hide_a_missing_one() -> None:
    header = good_header()
    header.media[0].spans.add(offset=14, length=0)
    with pytest.raises(WorkerError, match=r"media\[0\]\.spans\[1\] is empty"):
        read_header(header, LIMITS)


def test_unknown_fingerprint_is_let_through() -> None:
    header = good_header()
    header.fingerprint = b""
    read_header(header, LIMITS)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "message"),
    [
        (CONTEXT, 1, "prompt_token_ids", "has 200 tokens, 1 more than leave room"),
        (CONTEXT + 30, 5, "prompt_token_ids", "has 230 tokens, 31 more"),
        (CONTEXT - 10, 11, "sampling.max_tokens", "exceed the context of 200 by 1"),
        (3, 2**32 - 1, "sampling.max_tokens", "max_tokens 4294967295"),
    ],
)
def test_too_long_requests_say_by_how_much(
    num_prompt: int, max_tokens: int, param: str, message: str
) -> None:
    request = Request("r", (1,) * num_prompt, sampling(max_tokens=max_tokens))
    with pytest.raises(WorkerError) as refused:
        read_header(convert.header_to_proto(request, b""), LIMITS)
    assert refused.value.kind is ErrorKind.CONTEXT_TOO_LONG
    assert refused.value.param == param
    assert message in refused.value.message


def test_request_of_exactly_the_context_is_accepted() -> None:
    request = Request("r", (1,) * (CONTEXT - 10), sampling(max_tokens=10))
    read_header(convert.header_to_proto(request, b""), LIMITS)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_refused_or_read_and_never_crash(data: bytes) -> None:
    header = pb.GenerateHeader()
    try:
        header.ParseFromString(data)
    except Exception:  # noqa: BLE001 - protobuf's own refusal, of a type of its back end
        return
    with contextlib.suppress(WorkerError):
        read_header(header, LIMITS)
