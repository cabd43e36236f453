"""What is asked of a trained model stands in no text that it was trained on."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import product

import pytest
from tokenizers import Tokenizer

from m3stack.checkpoints import builtin_checkpoint
from m3stack.train import needles, text_tasks, words
from m3stack.train.batches import SHORT_TOKENS, BatchKind, BatchMaker
from m3stack.train.drills import DRILL_TOKENS
from m3stack.train.encode import Encoder

TOKENIZER = builtin_checkpoint("tiny") / "tokenizer.json"


def held_out_sentences() -> set[str]:
    """The answer of every fact and password that is held out."""
    found: set[str] = set()
    for form, values in (
        ("{} lives in {}.", words.CITIES),
        ("{} likes {}.", words.FOODS),
        ("{} works in the {}.", words.WORKPLACES),
        ("The pet of {} is a {}.", words.ANIMALS),
    ):
        pairs = product(words.NAMES, values)
        found |= {form.format(*pair) for pair in pairs if words.is_held_out(*pair)}
    for person, thing, colour in product(words.NAMES, words.THINGS, words.COLOURS):
        if words.is_held_out(person, thing, colour):
            found |= {f"{person} has a {colour} {thing}.", f"The {thing} of {person} is {colour}."}
    return found


def held_out_pairs(text: str) -> set[tuple[str, str]]:
    """Pairs of owner and first word, and of both words of a password, that are held out."""
    told = re.findall(r"The password of the (\w+) is (\w+) (\w+)\.", text)
    pairs = {pair for owner, first, second in told for pair in ((owner, first), (first, second))}
    return {pair for pair in pairs if words.is_held_out(*pair)}


def training_texts() -> Iterator[str]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    maker = BatchMaker(Encoder(TOKENIZER), seed=20)
    for kind in (
        BatchKind(48, SHORT_TOKENS, 0),
        BatchKind(48, DRILL_TOKENS, is_drill=True),
        BatchKind(4, 2048, is_needle=True),
    ):
        for ids in maker.make(0, kind).ids_T.view(kind.num_rows, -1).tolist():
            yield tokenizer.decode(ids, skip_special_tokens=False)


def sentences_of(text: str) -> set[str]:
    return set(re.findall(r"[A-Z][A-Za-z ]+\.", text))


def test_no_training_text_tells_what_is_held_out() -> None:
    held_out = held_out_sentences()
    told: set[str] = set()
    for text in training_texts():
        told |= sentences_of(text)
        assert not held_out_pairs(text)
    assert not told & held_out
    # facts of each kind are told
    for form in ("lives in", "likes", "works in the", "The pet of", "has a", "The password of"):
        assert sum(form in sentence for sentence in told) > 10, form


@pytest.mark.parametrize("seed", range(3))
def test_what_is_asked_of_a_trained_model_is_held_out(seed: int) -> None:
    held_out = held_out_sentences()
    rng = random.Random(seed)
    for _ in range(50):
        turns = text_tasks.passage(rng, thinks=False, held_out=True)
        answers = {turn.parts[0] for turn in turns if turn.role == "assistant"}
        assert answers <= held_out


def test_every_password_that_is_asked_for_is_of_pairs_never_told() -> None:
    for seed in range(20):
        secrets = needles.secrets(random.Random(seed), 10, held_out=True)
        firsts = [password.split()[0] for _, password in secrets]
        assert len(set(firsts)) == len({owner for owner, _ in secrets}) == 10
        for pair in secrets:
            assert len(held_out_pairs(needles.needle(*pair))) == 2


def test_a_sum_is_held_out_as_it_is_asked() -> None:
    rng = random.Random(1)
    asked: dict[bool, set[str]] = {}
    for held_out in (False, True):
        episodes = [
            text_tasks.arithmetic(rng, thinks=False, held_out=held_out) for _ in range(2000)
        ]
        asked[held_out] = {str(turns[0].parts[0]) for turns in episodes}
    assert not asked[False] & asked[True]
