"""Size and purity of a stream's packets, whatever the pieces in which tokens come."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.conftest import Api, deltas

PROSE = (
    "The quick brown fox jumps over the lazy dog, and then it rests a while in the shade of an "
    "old oak before it goes on. "
)
# joined by zero width, skin tones, flags, keycaps: many code points, and tokens that cut them
EMOJI = ["🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇨🇳", "1️⃣", "🧑🏿‍🚀", "❤️‍🔥", "你好", "ñ́"]


@pytest.mark.parametrize("thoughts", [PROSE * 4, ""])
def test_packets_are_neither_crumbs_nor_lumps(saying: Callable[..., Api], thoughts: str) -> None:
    # a token a message; the coalescer's patience outlasts what a busy machine may lose between two
    text = f"{thoughts}</mm:think>{PROSE * 8}"
    said = saying(text, "--set", "stream_hold_ms=5000", interval_s=0.003)
    thinking = {"type": "enabled"}
    chunks = said.chunks("Hi.", max_tokens=4000, thinking=thinking)
    texts = deltas(chunks, "content")
    assert "".join(texts) == PROSE * 8
    assert "".join(deltas(chunks, "reasoning_content")) == thoughts
    sizes = [len(text) for text in texts]
    assert len(sizes) > 40
    assert sum(size < 5 for size in sizes) <= 0.05 * len(sizes)
    assert sum(5 <= size <= 200 for size in sizes) >= 0.95 * len(sizes)
    assert sum(size > 200 for size in sizes) <= 0.02 * len(sizes)


def test_a_lump_from_the_worker_is_cut(saying: Callable[..., Api]) -> None:
    said = saying(PROSE * 30, tokens_per_message=10_000)
    texts = deltas(said.chunks("Hi.", max_tokens=9000), "content")
    assert "".join(texts) == PROSE * 30
    assert max(map(len, texts)) <= 200


def test_no_packet_mixes_thinking_and_answer(saying: Callable[..., Api]) -> None:
    said = saying("Let me see.</mm:think>I look.", tokens_per_message=50)
    chunks = said.chunks("Hi.", max_tokens=99, thinking={"type": "enabled"})
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert not (delta.get("content") and delta.get("reasoning_content"))
    assert "".join(deltas(chunks, "reasoning_content")) == "Let me see."
    assert "".join(deltas(chunks, "content")) == "I look."


@pytest.mark.parametrize("together", [1, 2, 3])
def test_no_character_is_ever_broken(saying: Callable[..., Api], together: int) -> None:
    text = " ".join(EMOJI * 4)
    said = saying(text, tokens_per_message=together)
    for _ in range(20):
        chunks = said.chunks("Hi.", max_tokens=9000)
        texts = deltas(chunks, "content")
        assert "\ufffd" not in "".join(texts)
        assert "".join(texts) == text
    whole = said.answer("Hi.", max_tokens=9000)
    assert whole["choices"][0]["message"]["content"] == text
