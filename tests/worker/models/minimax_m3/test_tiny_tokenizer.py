"""Byte-pair training follows its rule and says when a corpus is too small."""

from __future__ import annotations

import pytest

from m3stack.models.minimax_m3.tiny_tokenizer import (
    ADDED_TOKENS,
    byte_letters,
    token_bytes,
    token_id,
    tokenizer_object,
    train_merges,
)


def test_the_most_frequent_pair_is_merged_first_and_ties_go_to_the_smaller() -> None:
    # pieces are "ab", " abab", " bb", " ba": "ab" stands three times, " b" twice; then all tie
    merges = train_merges("\n\nab abab bb ba", 3)
    assert token_bytes(merges)[256:] == [b"ab", b" b", b" ab"]


def test_merges_build_on_merges() -> None:
    merges = train_merges("\n\naaaa aaaa", 2)
    spelled = token_bytes(merges)
    assert spelled[256] == b"aa"
    assert spelled[257] == b"aaaa"
    assert merges[1] == (256, 256)


def test_a_corpus_too_small_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"yields 2 merges, 5 were asked for"):
        train_merges("\n\nabc", 5)


def test_the_alphabet_is_printable_and_has_a_letter_a_byte() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert letters[ord("A")] == "A"
    assert letters[ord(" ")] == "Ġ"
    assert letters[ord("\n")] == "Ċ"
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)


def test_added_tokens_are_distinct_and_mostly_special() -> None:
    assert len(set(ADDED_TOKENS)) == 61
    assert token_id("]!p~[") + 60 == token_id("</mm:think>")
    added = tokenizer_object(train_merges("\n\nab", 1))["added_tokens"]
    plain = {token["content"] for token in added if not token["special"]}
    assert {"]<]minimax[>[", "<mm:think>", "</mm:think>"} <= plain
    assert not plain & {"]~b]", "[e~[", "]~!b[", "]<]image[>[", "]<]video[>["}
