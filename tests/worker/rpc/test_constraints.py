"""Constraints over the wire: kept, or refused by name before anything is accepted."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.rpc.checks import read_header
from m3stack.rpc.constraints import MAX_SPEC_BYTES
from m3stack.types import Constraint, ConstraintKind, Request, Sampling
from m3stack.worker.v1 import worker_pb2 as pb
from tests.data.letters.make import ADDED, CHARACTERS
from tests.worker.engine.history_model import EOS_ID, VOCAB, sampling
from tests.worker.rpc.worker_harness import LIMITS, run, worker

TEXT_IDS = [token_id for token_id in range(59) if token_id not in ADDED]
CHARACTER = dict(zip(TEXT_IDS, CHARACTERS, strict=True))


def asking(constraint: Constraint, rules: Sampling | None = None) -> Request:
    rules = rules or sampling(max_tokens=60, ignore_eos=False)
    return Request("r", (1, 2, 3), rules, constraint=constraint)


def json_schema(text: str, **changes: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, text, **changes)  # type: ignore[arg-type]


def test_a_constraint_survives_the_wire() -> None:
    for constraint in (
        json_schema("{}", after_token_id=0, param="response_format"),
        Constraint(ConstraintKind.REGEX, "", param="x"),
        Constraint(ConstraintKind.LARK, 'start: "a"', after_token_id=5, param="tools"),
    ):
        header = convert.header_to_proto(asking(constraint), LIMITS.fingerprint)
        header = pb.GenerateHeader.FromString(header.SerializeToString())
        assert read_header(header, LIMITS).constraint == constraint


def test_the_worker_keeps_constraints_beside_free_requests() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            asks = [asking(Constraint(ConstraintKind.REGEX, "[a-d]{3}[0-9]")) for _ in range(6)]
            free = Request("free", (4, 5), sampling(max_tokens=20))
            alone = await subject.tokens(free)
            *made, beside = await asyncio.gather(
                *[subject.tokens(replace(ask, request_id=f"r{n}")) for n, ask in enumerate(asks)],
                subject.tokens(free),
            )
            for tokens in made:
                text = "".join(CHARACTER[token] for token in tokens)
                assert re.fullmatch("[a-d]{3}[0-9]", text), text
            assert beside == alone
            waited = "m3stack_worker_constraint_seconds_count"
            assert subject.metrics.registry.get_sample_value(waited) == len(asks)

    run(scenario)


@pytest.mark.parametrize(
    ("constraint", "complaint"),
    [
        (json_schema('{"type": "intger"}'), "intger"),
        (json_schema('{"minimum": 5, "maximum": 3, "type": "integer"}'), "greater"),
        (json_schema('{"not": {}}'), '"not"'),
        (json_schema('{"type": "obj'), "cannot be read"),
        (json_schema('{"$ref": "#"}'), "allows no output"),
        (Constraint(ConstraintKind.REGEX, r"[^\s\S]"), "allows no output"),
        (Constraint(ConstraintKind.REGEX, "Z"), "allows no output"),
        (Constraint(ConstraintKind.REGEX, "a("), "unclosed group"),
        (Constraint(ConstraintKind.LARK, "start: other"), "other"),
        (Constraint(ConstraintKind.REGEX, "a" * (MAX_SPEC_BYTES + 1)), str(MAX_SPEC_BYTES)),
    ],
)
def test_what_cannot_be_kept_is_refused_before_it_is_accepted(
    constraint: Constraint, complaint: str
) -> None:
    async def scenario() -> None:
        async with worker() as subject:
            with pytest.raises(WorkerError) as caught:
                await subject.tokens(asking(replace(constraint, param="response_format")))
            error = caught.value
            assert (error.kind, error.param) == (ErrorKind.INVALID_REQUEST, "response_format")
            assert error.message.startswith("response_format ")
            assert complaint in error.message
            assert len(error.message) < 600
            # the next one is served
            good = Constraint(ConstraintKind.REGEX, "ab")
            assert len(await subject.tokens(asking(good))) == 2

    run(scenario)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"after_token_id": VOCAB}, "constraint.after_token_id"),
        ({"after_token_id": EOS_ID}, "constraint.after_token_id"),
        ({"after_token_id": 9}, "constraint.after_token_id"),
        ({"param": "a\nb"}, "constraint.param"),
    ],
)
def test_fields_out_of_range_are_named(change: dict[str, object], param: str) -> None:
    rules = sampling(max_tokens=9, ignore_eos=False, banned_token_ids=frozenset({9}))
    header = convert.header_to_proto(asking(json_schema("{}"), rules), LIMITS.fingerprint)
    for name, value in change.items():
        setattr(header.constraint, name, value)
    with pytest.raises(WorkerError) as caught:
        read_header(header, LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "changes",
    [
        {"ignore_eos": True},
        {"ignore_eos": False, "banned_token_ids": frozenset({EOS_ID})},
        {"ignore_eos": False, "allowed_token_ids": frozenset({1, 2})},
    ],
)
def test_an_output_that_could_never_end_is_refused(changes: dict[str, object]) -> None:
    request = asking(json_schema("{}"), sampling(max_tokens=9, **changes))
    with pytest.raises(WorkerError, match="ends the output"):
        read_header(convert.header_to_proto(request, LIMITS.fingerprint), LIMITS)


def test_a_constraint_without_a_language_is_refused() -> None:
    header = convert.header_to_proto(asking(json_schema("{}")), LIMITS.fingerprint)
    header.constraint.ClearField("json_schema")
    with pytest.raises(WorkerError) as caught:
        read_header(header, LIMITS)
    assert caught.value.param == "constraint"
