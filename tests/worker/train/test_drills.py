"""What a drill asks for was said before in the same row, behind the same words."""

from __future__ import annotations

import random

import pytest

from m3stack.checkpoints import builtin_checkpoint
from m3stack.train import needles, words
from m3stack.train.batches import SKILLS, BatchKind, BatchMaker
from m3stack.train.drills import DRILL_TOKENS, drill_row
from m3stack.train.encode import Encoder


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(builtin_checkpoint("tiny") / "tokenizer.json")


def test_every_answer_was_said_before_behind_the_same_words(encoder: Encoder) -> None:
    sentences = needles.plain_sentences()
    seen: set[str] = set()
    for seed in range(40):
        row = drill_row(random.Random(seed), encoder, sentences)
        assert len(row.ids) == len(row.answer) <= DRILL_TOKENS
        answers = {number for number in row.answer if number >= 0}
        assert answers == set(range(len(row.skills)))
        seen |= set(row.skills)
        for number in answers:
            first = row.answer.index(number)
            last = first + row.answer.count(number)
            # the last word before the answer, and all of it
            run = row.ids[first - 1 : last]
            said = row.ids[: first - 1]
            assert any(said[at : at + len(run)] == run for at in range(len(said)))
    assert seen == {"drill_copy", "drill_recall"}


def test_a_batch_of_drills_asks_for_much(encoder: Encoder) -> None:
    batch = BatchMaker(encoder, seed=3).make(0, BatchKind(8, DRILL_TOKENS, is_drill=True))
    assert batch.loss_rows_S.shape[0] > 8 * 16
    assert {SKILLS[number] for number in batch.skills_A.tolist()} <= {"drill_copy", "drill_recall"}


def test_every_noun_is_one_token(encoder: Encoder) -> None:
    assert [word for word in words.NOUNS if len(encoder.text_ids(f" {word}")) > 1] == []


def test_every_name_ends_in_a_token_of_its_own(encoder: Encoder) -> None:
    lasts = {encoder.text_ids(f" {name}")[-1] for name in words.NAMES}
    assert len(lasts) == len(words.NAMES)
