"""Grammars against a real tokenizer: its control tokens and their names in text."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import m3stack
from m3stack.engine.grammar import GrammarCompiler, Vocabulary
from m3stack.errors import ErrorKind, WorkerError
from m3stack.types import Constraint, ConstraintKind

CHECKPOINT = Path(m3stack.__file__).parent / "checkpoints" / "tiny"
TOKENIZER = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
IDS = {token["content"]: token["id"] for token in TOKENIZER["added_tokens"]}
CONFIG = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
VOCABULARY = Vocabulary(
    CHECKPOINT / "tokenizer.json", CONFIG["text_config"]["vocab_size"], IDS["[e~["]
)
REGEX_SIGNS = frozenset("\\.+*?()|[]{}^$/-")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(VOCABULARY)
    yield compiler
    compiler.close()


def a_word_of(compiler: GrammarCompiler, kind: ConstraintKind, text: str) -> list[int]:
    """Tokens of a random word, the end not included."""
    matcher = compiler.submit(Constraint(kind, text)).result(timeout=60).matcher()
    random = np.random.default_rng(len(text))
    tokens: list[int] = []
    while len(tokens) < 400:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(mask[: VOCABULARY.vocab_size])
        if VOCABULARY.eos_token_id in allowed:
            return tokens
        assert allowed.size, (text, tokens)
        token = int(random.choice(allowed))
        assert matcher.consume_token(token), (text, matcher.get_error())
        tokens.append(token)
    raise AssertionError(f"{text} does not end")


@pytest.mark.parametrize("name", IDS)
def test_the_name_of_a_control_token_may_be_text(compiler: GrammarCompiler, name: str) -> None:
    escaped = "".join("\\" + sign if sign in REGEX_SIGNS else sign for sign in name)
    named = {"type": "object", "properties": {name: {"const": 1}}, "required": [name]}
    decode = Tokenizer.from_file(str(VOCABULARY.tokenizer_file)).decode
    cases = [
        (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [name]}), json.dumps(name)),
        (ConstraintKind.JSON_SCHEMA, json.dumps(named | {"additionalProperties": False}), None),
        (ConstraintKind.REGEX, f"a{escaped}b", f"a{name}b"),
        (ConstraintKind.LARK, f"start: {json.dumps(name)}", name),
    ]
    for kind, text, expected in cases:
        tokens = a_word_of(compiler, kind, text)
        assert not set(tokens) & set(IDS.values()), (text, tokens)
        word = decode(tokens, skip_special_tokens=False)
        if expected is None:
            assert json.loads(word) == {name: 1}
        else:
            assert word == expected


def test_only_an_id_means_a_control_token(compiler: GrammarCompiler) -> None:
    mark = IDS["]<]minimax[>["]
    assert a_word_of(compiler, ConstraintKind.LARK, f'start: <[{mark}]> "a"')[0] == mark


def test_a_schema_that_requires_itself_is_refused_with_the_reason(
    compiler: GrammarCompiler,
) -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    future = compiler.submit(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(node)))
    with pytest.raises(WorkerError, match="allows no output that ends") as refused:
        future.result(timeout=60)
    assert refused.value.kind is ErrorKind.INVALID_REQUEST
    may_end = json.dumps(node | {"required": []})
    assert compiler.submit(Constraint(ConstraintKind.JSON_SCHEMA, may_end)).result(timeout=60)


# as long as a specification has room for: on a usual stack a tenth of it ends the process
LINKS = 10_000


def chain_of_references(link: dict[str, object]) -> str:
    """A schema in which each definition is `link`, its reference leading on to the next one."""
    text = json.dumps(link)
    links = {
        f"a{at}": json.loads(text.replace("NEXT", f"#/$defs/a{at + 1}")) for at in range(LINKS)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**links, f"a{LINKS}": {"const": 1}}})


CHAINS = {
    "references": (ConstraintKind.JSON_SCHEMA, chain_of_references({"$ref": "NEXT"})),
    "allOf": (ConstraintKind.JSON_SCHEMA, chain_of_references({"allOf": [{"$ref": "NEXT"}]})),
    "rules": (
        ConstraintKind.LARK,
        "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(LINKS)) + f'r{LINKS}: "1"',
    ),
    "terminals": (
        ConstraintKind.LARK,
        "start: T0\n" + "".join(f"T{at}: T{at + 1}\n" for at in range(LINKS)) + f'T{LINKS}: "1"',
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_is_followed_to_its_end(compiler: GrammarCompiler, name: str) -> None:
    kind, text = CHAINS[name]
    assert (
        Tokenizer.from_file(str(VOCABULARY.tokenizer_file)).decode(a_word_of(compiler, kind, text))
        == "1"
    )


def test_a_schema_that_the_compiler_cannot_hold_is_refused(
    compiler: GrammarCompiler,
) -> None:
    next_one = {"type": "object", "properties": {"x": {"$ref": "NEXT"}}, "required": ["x"]}
    text = chain_of_references(next_one)
    with pytest.raises(WorkerError, match=r"too (big|complex)") as caught:
        compiler.submit(Constraint(ConstraintKind.JSON_SCHEMA, text)).result(timeout=60)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


def test_a_constraint_that_could_not_be_compiled_now_is_compiled_when_it_is_asked_for_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraint(ConstraintKind.REGEX, "[ab]+")

    def cannot_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    # the compiler's own thread runs already
    compiler.submit(Constraint(ConstraintKind.REGEX, "c")).result()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        with pytest.raises(WorkerError, match="cannot be compiled now") as refusal:
            compiler.submit(constraint).result()
    assert refusal.value.kind is ErrorKind.OVERLOADED
    assert compiler.submit(constraint).result().matcher() is not None
