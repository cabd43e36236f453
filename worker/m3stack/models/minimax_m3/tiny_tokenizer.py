"""Makes the tokenizer of the built-in tiny checkpoint: byte-level BPE plus M3's 61 added tokens.

Training is our own and deterministic, so that the same corpus gives the same file everywhere.
Source: the released tokenizer.json, for names and order of the added tokens and the split pattern.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

BASE_TOKENS = 2400
"""Bytes and merges; the added tokens follow, as 200,000 + k in the released tokenizer."""

BEGIN_DOCUMENT, END_MESSAGE, IMAGE, VIDEO = "]~!b[", "[e~[", "]<]image[>[", "]<]video[>["

ADDED_TOKENS = (
    "]!p~[",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<fim_pad>",
    "<reponame>",
    "<filename>",
    "<gh_stars>",
    "<issue_start>",
    "<issue_comment>",
    "<issue_closed>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<empty_output>",
    "<commit_before>",
    "<commit_msg>",
    "<commit_after>",
    "]~b]",
    END_MESSAGE,
    "]!d~[",
    "<function_call>",
    "<code_interpreter>",
    "]<]speech[>[",
    IMAGE,
    VIDEO,
    "]<]start of speech[>[",
    "]<]end of speech[>[",
    "]<]start of image[>[",
    "]<]end of image[>[",
    "]<]start of video[>[",
    "]<]end of video[>[",
    "]<]vision pad[>[",
    BEGIN_DOCUMENT,
    "<jupyter_error>",
    "<add_file>",
    "<delete_file>",
    "<rename_file>",
    "<edit_file>",
    "<commit_message>",
    "<empty_source_file>",
    "<repo_struct>",
    "<code_context>",
    "<file_content>",
    "<source_files>",
    "<pr_start>",
    "<review_comment>",
    "<filepath>",
    "<file_sep>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "]<]frame[>[",
    "]<]start of frame[>[",
    "]<]end of frame[>[",
    "<|content_altered_placeholder|>",
    "]<]minimax[>[",
    "<mm:think>",
    "</mm:think>",
)

# these carry meaning for the output parser and survive decoding without special tokens
SPOKEN_TOKENS = frozenset(
    {
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "]<]minimax[>[",
        "<mm:think>",
        "</mm:think>",
    }
)

_SPLIT_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# a near relative of the split pattern for training text; `re` has no unicode classes
_TRAINING_SPLIT = re.compile(r" ?[^\W\d_]+|\d{1,3}| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+|_")

Pair = tuple[int, int]


def token_id(text: str) -> int:
    """Id of an added token."""
    return BASE_TOKENS + ADDED_TOKENS.index(text)


def train_merges(corpus: str, num_merges: int) -> list[Pair]:
    """Byte-pair merges learned from a corpus, in order; token 256 + i is the result of merge i.

    The corpus' first paragraph lists words, most frequent first; the rest is running text. Of two
    equally frequent pairs the one with the smaller ids is merged first.

    Raises:
        ValueError: the corpus is too small for so many merges.
    """
    counts = _piece_counts(corpus)
    pieces = [list(piece.encode()) for piece in counts]
    weights = list(counts.values())
    pair_weight: Counter[Pair] = Counter()
    users: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, piece in enumerate(pieces):
        _count_pairs(piece, weights[index], index, pair_weight, users)
    merges: list[Pair] = []
    while len(merges) < num_merges:
        best = min(pair_weight, key=lambda pair: (-pair_weight[pair], pair), default=None)
        if best is None or pair_weight[best] < 1:
            raise ValueError(f"the corpus yields {len(merges)} merges, {num_merges} were asked for")
        for index in sorted(users[best]):
            _count_pairs(pieces[index], -weights[index], index, pair_weight, users)
            pieces[index] = _merged(pieces[index], best, 256 + len(merges))
            _count_pairs(pieces[index], weights[index], index, pair_weight, users)
        del pair_weight[best], users[best]
        merges.append(best)
    return merges


def token_bytes(merges: list[Pair]) -> list[bytes]:
    """What each base token spells."""
    spelled = [bytes([value]) for value in range(256)]
    for left, right in merges:
        spelled.append(spelled[left] + spelled[right])
    return spelled


def tokenizer_object(merges: list[Pair]) -> dict[str, Any]:
    """The content of tokenizer.json."""
    letters = byte_letters()
    names = ["".join(letters[value] for value in spelled) for spelled in token_bytes(merges)]
    assert len(set(names)) == len(names), "two merges spell the same token"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(index) for index in range(len(ADDED_TOKENS))],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _SPLIT_PATTERN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _byte_level(add_prefix_space=False, use_regex=False),
            ],
        },
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: index for index, name in enumerate(names)},
            "merges": [[names[left], names[right]] for left, right in merges],
        },
    }


def tokenizer_settings(max_tokens: int) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    added = [_added_token(index) for index in range(len(ADDED_TOKENS))]
    return {
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in added
        },
        "bos_token": BEGIN_DOCUMENT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_MESSAGE,
        "model_max_length": max_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary.

    Source: GPT-2's byte alphabet; printable bytes stand for themselves, the others for 256 + n.
    """
    letters: list[str] = []
    moved = 0
    for value in range(256):
        if 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255:
            letters.append(chr(value))
        else:
            letters.append(chr(256 + moved))
            moved += 1
    return letters


def _piece_counts(corpus: str) -> dict[str, int]:
    words, text = corpus.split("\n\n", 1)
    counts: Counter[str] = Counter()
    for rank, word in enumerate(dict.fromkeys(words.split())):
        weight = 3000 // (rank + 10) + 2
        counts[" " + word] += 3 * weight
        counts[word] += weight
        counts[word.capitalize()] += weight
    for piece in _TRAINING_SPLIT.findall(text):
        counts[piece] += 6
    return dict(counts)


def _count_pairs(
    piece: list[int],
    weight: int,
    index: int,
    pair_weight: Counter[Pair],
    users: defaultdict[Pair, set[int]],
) -> None:
    for pair in pairwise(piece):
        pair_weight[pair] += weight
        users[pair].add(index)


def _merged(piece: list[int], pair: Pair, new: int) -> list[int]:
    result: list[int] = []
    index = 0
    while index < len(piece):
        if tuple(piece[index : index + 2]) == pair:
            result.append(new)
            index += 2
        else:
            result.append(piece[index])
            index += 1
    return result


def _added_token(index: int) -> dict[str, Any]:
    text = ADDED_TOKENS[index]
    return {
        "id": BASE_TOKENS + index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text not in SPOKEN_TOKENS,
    }


def _byte_level(*, add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
