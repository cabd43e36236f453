"""Constraints compiled for a vocabulary: specifications to matchers, within limits of size.

A matcher says which tokens may come next. It is compiled once a specification and copied for every
request that has it; compiling runs on a thread of its own.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from m3stack.engine.deep_stack import NoThreadError, on_deep_stack
from m3stack.engine.endless import is_endless
from m3stack.errors import ErrorKind, WorkerError
from m3stack.types import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 64
# what llguidance may spend on one grammar: a JSON schema of 4,000 optional properties compiles in
# 2 s and fits; a lexer state takes 1 to 2 kB
MAX_GRAMMAR_SYMBOLS = 100_000
MAX_LEXER_STATES = 50_000
INITIAL_LEXER_FUEL = 1_000_000
# unbounded white space is what models without a hint get lost in; pretty printing fits
_JSON_WHITE_SPACE = r"[ \t\n\r]{0,48}"
_MAX_COMPLAINT_CHARS = 400


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Whose tokens constraints are made of.

    Attributes:
        tokenizer_file: tokenizer.json of the checkpoint.
        vocab_size: width of the logits; ids that no token has are never allowed.
        eos_token_id: stands for the end of the output in masks.
    """

    tokenizer_file: Path
    vocab_size: int
    eos_token_id: int

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask, W."""
        return -(-self.vocab_size // 32)


class Grammar:
    """A compiled constraint, to be shared by all requests that have it; any thread."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        self._lock = threading.Lock()

    def matcher(self) -> LLMatcher:
        """A matcher of one's own, at the start of the output."""
        with self._lock:
            return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles constraints, each once while it is remembered; any thread may ask.

    The tokenizer is read with the first constraint: a worker that never gets one pays nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[ConstraintKind, str], Future[Grammar]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        # one thread: what is slow to compile delays other constraints, never the steps
        self._executor = ThreadPoolExecutor(1, "m3stack-grammar")

    @property
    def num_pending(self) -> int:
        """Constraints that are being compiled, or wait for it."""
        with self._lock:
            return sum(not future.done() for future in self._known.values())

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        """The constraint's grammar, in time; not to be cancelled, others may wait for it.

        The future raises WorkerError, without a `param`, if the constraint cannot be compiled,
        allows nothing, or is too large.
        """
        key = (constraint.kind, constraint.text)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            future = self._executor.submit(self._compile_deep, *key)
            self._known[key] = future
            while len(self._known) > MAX_CACHED_GRAMMARS:
                self._known.popitem(last=False)
            return future

    def close(self) -> None:
        """Ends the thread, once what it is at is done."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _compile_deep(self, kind: ConstraintKind, text: str) -> Grammar:
        # llguidance follows references and rules by recursion, up to 8 kB of stack for each: a
        # chain of the thousands that a specification has room for would end the process
        try:
            return on_deep_stack(lambda: self._compile(kind, text))
        except NoThreadError as error:
            # that passes: whoever asks next is to have another try
            with self._lock:
                self._known.pop((kind, text), None)
            raise WorkerError(ErrorKind.OVERLOADED, f"cannot be compiled now: {error}") from error

    def _compile(self, kind: ConstraintKind, text: str) -> Grammar:
        llguidance = _llguidance()
        if kind is ConstraintKind.JSON_SCHEMA and is_endless(_parsed(text)):
            raise _refusal("allows no output that ends: every value requires another one within")
        tokenizer = self._load_tokenizer(llguidance)
        try:
            source = _source(llguidance.LLMatcher, kind, text)
        except ValueError as error:
            raise _refusal(f"cannot be read: {error}") from None
        limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            max_lexer_states=MAX_LEXER_STATES,
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            # its own text would come back to the client in every complaint
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            error = matcher.get_error()
            # limits of its own that it does not check
            if error.startswith("panic"):
                raise _refusal("is too complex to be compiled")
            raise _refusal(f"cannot be compiled: {error}")
        # also warms what all copies share
        first = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if "NoExtension" in matcher.get_error():
            raise _refusal("allows no output at all")
        if matcher.is_error():
            raise _refusal(f"is too complex: {matcher.get_error()}")
        if not (matcher.is_accepting() or _holds_token(first, self.vocabulary)):
            raise _refusal("allows no output at all")
        return Grammar(matcher)

    def _load_tokenizer(self, llguidance: Any) -> LLTokenizer:
        """Called on the one thread."""
        if self._tokenizer is not None:
            return self._tokenizer
        vocabulary = self.vocabulary
        try:
            document = json.loads(vocabulary.tokenizer_file.read_text(encoding="utf-8"))
            # control tokens are no spelling of their text: only `<[id]>` in a grammar can mean
            # one, and no string can hide one. llguidance tokenizes text that a grammar forces,
            # so their own names must not be found in it: an enum may hold "<filename>"
            unspeakable = secrets.token_hex(16)
            for token in document["added_tokens"]:
                token["special"] = True
                token["content"] = f"\uffff{unspeakable}-{token['id']}"
            tokenizer: LLTokenizer = llguidance.LLTokenizer(
                json.dumps(document),
                n_vocab=vocabulary.vocab_size,
                eos_token=vocabulary.eos_token_id,
            )
        except (OSError, KeyError, ValueError) as error:
            raise WorkerError(
                ErrorKind.INTERNAL,
                f"the checkpoint's tokenizer.json cannot be used for constraints: {error}",
            ) from error
        self._tokenizer = tokenizer
        return tokenizer


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST,
            "cannot be enforced: this worker runs without the package llguidance",
        ) from error
    return llguidance


def _source(matcher: Any, kind: ConstraintKind, text: str) -> str:
    """The specification in llguidance's own form; raises ValueError."""
    if kind is ConstraintKind.REGEX:
        return matcher.grammar_from_regex(text)
    if kind is ConstraintKind.LARK:
        return matcher.grammar_from_lark(text)
    # overrides stand in an object: these two have none
    text = {"true": "{}", "false": '{"enum":[]}'}.get(text.strip(), text)
    return matcher.grammar_from_json_schema(
        text,
        overrides={
            "whitespace_flexible": True,
            "whitespace_pattern": _JSON_WHITE_SPACE,
            # what cannot be enforced is refused, never left out or approximated
            "lenient": False,
            "coerce_one_of": False,
        },
    )


def _parsed(text: str) -> object:
    """The schema, or what has nothing to be found in it: complaints are the compiler's."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return True


def _holds_token(mask: np.ndarray, vocabulary: Vocabulary) -> bool:
    """Whether a mask, as bytes, allows anything but the end."""
    bits = np.unpackbits(mask, bitorder="little")[: vocabulary.vocab_size]
    bits[vocabulary.eos_token_id] = 0
    return bool(bits.any())


def _refusal(complaint: str) -> WorkerError:
    """`complaint` follows the name of the parameter, which is not known here."""
    shown = " ".join(complaint.split())
    if len(shown) > _MAX_COMPLAINT_CHARS:
        shown = shown[:_MAX_COMPLAINT_CHARS] + " ..."
    return WorkerError(ErrorKind.INVALID_REQUEST, shown)
