"""Constrained outputs are words of their language, and nobody else's output changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3stack.engine.scheduler import SchedulerLimits
from m3stack.errors import ErrorKind
from m3stack.types import Constraint, ConstraintKind, Failed, Finished, FinishReason, Request
from tests.data.letters.make import ADDED, CHARACTERS
from tests.worker.engine.drive import Drive
from tests.worker.engine.history_model import EOS_ID, IMAGE_ID, Stack, greedy_alone, sampling

TEXT_IDS = [token_id for token_id in range(59) if token_id not in ADDED]
CHARACTER = dict(zip(TEXT_IDS, CHARACTERS, strict=True))
TOKEN = {character: token_id for token_id, character in CHARACTER.items()}
# a word that has not ended by then is a fault of the test's language
ENOUGH = 400


def regex(text: str, **changes: object) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text, **changes)  # type: ignore[arg-type]


def asking(constraint: Constraint, *, salt: int = 0, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(10))
    rules = sampling(**({"max_tokens": ENOUGH, "ignore_eos": False} | changes))
    return Request("r", prompt, rules, constraint=constraint)


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTER[token] for token in tokens)


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack(num_pages=64)
    yield stack
    stack.constraints.close()


def alone(stack: Stack, request: Request) -> tuple[str, Finished | Failed | str]:
    drive = Drive(stack)
    handle = drive.add(request)
    drive.drain()
    drive.check_clean()
    return text_of(drive.tokens[handle]), drive.endings[handle][0]


def test_a_regex_is_matched_whole_and_the_end_comes_only_there(stack: Stack) -> None:
    seen = set()
    for salt in range(30):
        text, end = alone(stack, asking(regex("a[0-9]{2,6}(b|c)?z"), salt=salt))
        assert re.fullmatch("a[0-9]{2,6}(b|c)?z", text), text
        assert isinstance(end, Finished)
        assert (end.reason, end.stop_token_id) == (FinishReason.STOP, EOS_ID)
        seen.add(text)
    assert len(seen) > 20, "the model has no say"


def test_a_constraint_is_kept_at_any_temperature_and_penalty(stack: Stack) -> None:
    for salt, (temperature, penalty) in enumerate([(0.7, 1.5), (2.0, 1.0), (0.0, 3.0)]):
        request = asking(
            regex("(ab|cd){3}"),
            salt=salt,
            temperature=temperature,
            repetition_penalty=penalty,
            frequency_penalty=2.0,
            logit_bias={TOKEN["q"]: 100.0, EOS_ID: 100.0},
            logprobs=True,
            top_logprobs=3,
        )
        assert re.fullmatch("(ab|cd){3}", alone(stack, request)[0])


def test_a_grammar_may_name_control_tokens(stack: Stack) -> None:
    grammar = f'start: <[{IMAGE_ID}]> "a" /[0-9]+/ "b" <[{IMAGE_ID}]>'
    drive = Drive(stack)
    handle = drive.add(asking(Constraint(ConstraintKind.LARK, grammar)))
    drive.drain()
    first, *middle, last = drive.tokens[handle]
    assert (first, last) == (IMAGE_ID, IMAGE_ID)
    assert re.fullmatch("a[0-9]+b", text_of(middle))


def test_free_text_never_holds_control_tokens(stack: Stack) -> None:
    text, _ = alone(stack, asking(regex(".{80}"), logit_bias={IMAGE_ID: 100.0, EOS_ID: 100.0}))
    assert len(text) == 80


def test_it_begins_behind_the_named_token_and_nothing_ends_before(stack: Stack) -> None:
    # without the ban on ends the bias would end the request at once
    begin = TOKEN["q"]
    request = asking(regex("[0-9]{3}", after_token_id=begin), logit_bias={EOS_ID: 50.0})
    drive = Drive(stack)
    handle = drive.add(request)
    drive.drain()
    tokens = drive.tokens[handle]
    assert begin in tokens
    thinking, answer = tokens[: tokens.index(begin)], tokens[tokens.index(begin) + 1 :]
    assert re.fullmatch("[0-9]{3}", text_of(answer))
    free = replace(request, constraint=None, sampling=sampling(max_tokens=len(thinking)))
    assert thinking == greedy_alone(free), "thinking is not constrained"


def test_the_end_waits_for_min_tokens_where_it_can(stack: Stack) -> None:
    ends_gladly = {EOS_ID: 100.0}
    text, _ = alone(stack, asking(regex("a+"), min_tokens=7, logit_bias=ends_gladly))
    assert text == "a" * 7
    # nothing may follow: the word is worth more than the number
    text, end = alone(stack, asking(regex("ab"), min_tokens=7, logit_bias=ends_gladly))
    assert text == "ab"
    assert isinstance(end, Finished)


def test_stop_ids_end_a_complete_word_only(stack: Stack) -> None:
    stop = TOKEN["b"]
    request = asking(
        regex("a{3,9}"), stop_token_ids=frozenset({stop}), ignore_eos=True, logit_bias={stop: 90.0}
    )
    text, end = alone(stack, request)
    assert text == "aaa"
    assert isinstance(end, Finished)
    assert end.stop_token_id == stop


def test_settings_that_leave_no_token_fail_the_request_by_name(stack: Stack) -> None:
    for changes in (
        {"banned_token_ids": frozenset({TOKEN["b"]})},
        {"allowed_token_ids": frozenset({TOKEN["a"], EOS_ID})},
        {"stop_token_ids": frozenset({TOKEN["b"]})},
    ):
        drive = Drive(stack)
        other = drive.add(Request("o", (1, 2, 3), sampling()))
        handle = drive.add(asking(regex("aab", param="response_format"), **changes))
        drive.drain()
        (end,) = drive.endings[handle]
        assert isinstance(end, Failed)
        assert (end.kind, end.param) == (ErrorKind.INVALID_REQUEST, "response_format")
        assert "response_format" in end.message
        assert drive.tokens[other] == greedy_alone(Request("o", (1, 2, 3), sampling()))


def test_outputs_survive_preemption_and_neighbours_are_not_touched() -> None:
    pattern = "([a-f]{2}[0-9]{2}){2,12}"
    requests = [
        asking(regex(pattern), salt=salt, temperature=0.8, seed=salt, max_tokens=60)
        if salt % 2
        else Request("r", (5, salt, 9), sampling(max_tokens=40))
        for salt in range(8)
    ]
    wide = Stack(num_pages=200)
    expected = []
    for request in requests:
        drive = Drive(wide)
        handle = drive.add(request)
        drive.drain()
        expected.append(drive.tokens[handle])
    narrow = Stack(
        num_pages=12,
        limits=SchedulerLimits(max_batch_tokens=24, max_sequences=6, max_encode_patches=64),
        host_slots=10,
    )
    drive = Drive(narrow)
    handles = [drive.add(request) for request in requests]
    drive.drain()
    drive.check_clean()
    assert any(plan.preempted for plan in drive.plans), "nobody was preempted"
    assert [drive.tokens[handle] for handle in handles] == expected
    for handle, request in zip(handles, requests, strict=True):
        if request.constraint is not None:
            assert re.fullmatch(pattern, text_of(drive.tokens[handle]))
        else:
            assert drive.tokens[handle] == greedy_alone(request)
    for stack in (wide, narrow):
        stack.constraints.close()


def test_cancelled_while_its_mask_is_made(stack: Stack) -> None:
    drive = Drive(stack)
    handles = [drive.add(asking(regex("[0-9]{1,90}"), salt=salt)) for salt in range(4)]
    drive.step()
    for handle in handles:
        drive.cancel(handle)
    drive.check_clean()


# names and strings are spelled with the letters that the vocabulary has
_NAMES = st.sampled_from(["a", "bc", "d/e", "_f", "g h"])
_LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-200, 200),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,4}$"}, {"const": {"a": [1, None]}}]),
    st.lists(st.sampled_from(["a", 1, None, True, [2]]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def _objects(properties: dict[str, object], optional: set[str]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(set(properties) - optional),
        "additionalProperties": False,
    }


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low, size: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + size,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(_objects, st.dictionaries(_NAMES, inner, max_size=3), st.sets(_NAMES)),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas=st.lists(_SCHEMAS, min_size=1, max_size=3), seed=st.integers(0, 1 << 30))
def test_every_output_is_valid_under_its_schema(
    schemas: list[dict[str, object]], seed: int
) -> None:
    # here alone: machines that run the tests of a GPU lack it, and read this file nonetheless
    import jsonschema

    stack = Stack(num_pages=400)
    drive = Drive(stack)
    handles = [
        drive.add(
            asking(
                Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
                salt=index,
                temperature=1.0,
                seed=seed,
                max_tokens=2000,
                # no more blanks than it takes
                logit_bias={TOKEN[" "]: -5.0},
            )
        )
        for index, schema in enumerate(schemas)
    ]
    free = Request("free", (3, seed % 59), sampling(max_tokens=30))
    other = drive.add(free)
    drive.drain(max_steps=10_000)
    drive.check_clean()
    for handle, schema in zip(handles, schemas, strict=True):
        (end,) = drive.endings[handle]
        assert isinstance(end, Finished), end
        assert end.reason is FinishReason.STOP
        document = json.loads(text_of(drive.tokens[handle]))
        jsonschema.Draft202012Validator(schema).validate(document)
    assert drive.tokens[other] == greedy_alone(free)
    stack.constraints.close()
