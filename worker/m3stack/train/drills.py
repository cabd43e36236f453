"""Rows without a conversation that say everything twice, so that almost every token of the second
time is an answer: what was said before is found again long before a conversation would teach it.
"""

from __future__ import annotations

import random

from m3stack.train import hints, needles, text_tasks, words
from m3stack.train.encode import Encoded, Encoder

DRILL_TOKENS = 256


def drill_row(rng: random.Random, encoder: Encoder, sentences: list[str]) -> Encoded:
    """Nouns said again in the same order, or facts among plain sentences in another."""
    make = _nouns if rng.random() < 0.4 else _facts
    encoded = make(rng, encoder, sentences)
    predicted = [at for at, number in enumerate(encoded.answer) if number >= 0]
    sources = hints.sources(encoded.ids, predicted)
    pairs = zip(predicted, sources, strict=True)
    encoded.sources += [(at, source) for at, source in pairs if source >= 0]
    return encoded


def _nouns(rng: random.Random, encoder: Encoder, _sentences: list[str]) -> Encoded:
    nouns = [token for noun in words.NOUNS for token in encoder.text_ids(f" {noun}")]
    count = rng.randint(8, DRILL_TOKENS // 2 - 16)
    said, before = rng.choices(nouns, k=count), rng.choices(nouns, k=rng.randint(0, 24))
    encoded = Encoded([*before, *said], [-1] * (len(before) + count), ["drill_copy"])
    # the first word alone does not tell that it was said before
    encoded.ids += said
    encoded.answer += [-1, *([0] * (count - 1))]
    return encoded


def _facts(rng: random.Random, encoder: Encoder, sentences: list[str]) -> Encoded:
    """What a fact is of is given, what it says is asked."""
    facts = [needles.parts(*pair) for pair in needles.secrets(rng, rng.randint(3, 8))]
    for person in rng.sample(words.NAMES, rng.randint(0, 3)):
        facts.append(rng.choice(text_tasks.fact_parts(rng, person)))
    told = [f"{subject}{value}" for subject, value in facts]
    told += rng.sample(sentences, rng.randint(0, 3))
    rng.shuffle(told)
    rng.shuffle(facts)
    ids = encoder.text_ids("".join(f" {text}" for text in told))
    encoded = Encoded(ids, [-1] * len(ids))
    for subject, value in facts:
        given, asked = encoder.text_ids(f" {subject}"), encoder.text_ids(value)
        if len(encoded.ids) + len(given) + len(asked) > DRILL_TOKENS:
            break
        encoded.ids += [*given, *asked]
        encoded.answer += [-1] * len(given) + [len(encoded.skills)] * len(asked)
        encoded.skills.append("drill_recall")
    return encoded
