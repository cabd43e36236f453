"""Long documents of plain sentences in which passwords are hidden, and questions for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from m3stack.train import words
from m3stack.train.encode import Turn

NUM_SENTENCES = 3000
"""Different plain sentences; a document draws from them."""


@dataclass(frozen=True, slots=True)
class Haystack:
    """A document and what is hidden in it.

    Attributes:
        sentences: of the document, in order; none begins with a space.
        hidden: (owner, password) pairs, in order of appearance.
    """

    sentences: tuple[str, ...]
    hidden: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def plain_sentences() -> list[str]:
    """The sentences that hide nothing."""
    rng = random.Random("plain sentences")
    return [_plain_sentence(rng) for _ in range(NUM_SENTENCES)]


def needle(owner: str, password: str) -> str:
    """The sentence that tells a password."""
    return f"The password of the {owner} is {password}."


def parts(owner: str, password: str) -> tuple[str, str]:
    """The same sentence up to the password, and the rest."""
    return f"The password of the {owner} is", f" {password}."


def question(owner: str) -> str:
    return f"What is the password of the {owner}?"


def answer(owner: str, password: str) -> str:
    return needle(owner, password)


def secrets(rng: random.Random, count: int, *, held_out: bool = False) -> list[tuple[str, str]]:
    """Owners, all different, and their passwords.

    A password is two words. The first is that of no other, so that the second can be found by it;
    so an answer takes two finds, and who finds by chance must be lucky twice. Owner and first word
    are a pair that is held out, and so are the two words, or neither is.
    """
    pairs: list[tuple[str, str]] = []
    taken: set[str] = set()
    for owner in rng.sample(words.NOUNS, count):
        firsts = [word for word in _partners(owner, held_out) if word not in taken]
        if not firsts:
            return secrets(rng, count, held_out=held_out)
        first = rng.choice(firsts)
        taken.add(first)
        seconds = [word for word in _partners(first, held_out) if word != owner]
        pairs.append((owner, f"{first} {rng.choice(seconds)}"))
    return pairs


@cache
def _partners(word: str, held_out: bool) -> tuple[str, ...]:
    """Nouns that make a pair with a word, one that is held out or one that is not."""
    nouns = (noun for noun in words.NOUNS if noun != word)
    return tuple(noun for noun in nouns if words.is_held_out(word, noun) == held_out)


def question_turns(
    rng: random.Random, hidden: list[tuple[str, str]], count: int, skill: str
) -> list[Turn]:
    """Questions for some of the passwords, each once, and their answers."""
    turns: list[Turn] = []
    for owner, password in rng.sample(hidden, min(count, len(hidden))):
        turns.append(Turn("user", (question(owner),)))
        told = needle(owner, password)
        turns.append(
            Turn("assistant", (answer(owner, password),), skill, told=told, value=password)
        )
    return turns


def haystack(
    rng: random.Random,
    sentences: list[str],
    lengths: list[int],
    *,
    num_tokens: int,
    num_needles: int,
    held_out: bool = False,
) -> Haystack:
    """A document of about a number of tokens, its needles spread over its whole length.

    Args:
        sentences, lengths: the plain sentences and how many tokens each has.
    """
    hidden = secrets(rng, num_needles, held_out=held_out)
    starts = sorted(rng.uniform(0, 1) * num_tokens for _ in hidden)
    told: list[str] = []
    total, pending = 0, list(zip(starts, hidden, strict=True))
    while total < num_tokens:
        while pending and pending[0][0] <= total:
            told.append(needle(*pending.pop(0)[1]))
        pick = rng.randrange(len(sentences))
        told.append(sentences[pick])
        total += lengths[pick]
    told += [needle(*pair) for _, pair in pending]
    return Haystack(tuple(told), tuple(hidden))


def _plain_sentence(rng: random.Random) -> str:
    first, second = rng.choice(words.NOUNS), rng.choice(words.NOUNS)
    kind = rng.randrange(4)
    if kind == 0:
        return f"The {rng.choice(words.ADJECTIVES)} {first} {rng.choice(words.VERBS)} the {second}."
    if kind == 1:
        return f"The {first} was {rng.choice(words.LINKS)} the {second}."
    if kind == 2:
        return f"There was a {rng.choice(words.ADJECTIVES)} {first} {rng.choice(words.LINKS)} it."
    return f"It was the {first} of the {rng.choice(words.ADJECTIVES)} {second}."
