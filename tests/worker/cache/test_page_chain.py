"""Page keys are those of `tests/data/routing/chain.json`, which the gateway computes too.

`python tests/worker/cache/test_page_chain.py` writes the file anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from m3stack.cache.pages import PageAllocator
from m3stack.cache.prefix import PrefixCache, Salt
from m3stack.engine.sequence import Sequence
from m3stack.types import MediaItem, MediaKind, PatchFormat, Request, Sampling, Span

CHAIN = Path(__file__).parents[2] / "data" / "routing" / "chain.json"
PAGE_TOKENS = 8
IMAGE = {
    "hash": "11" * 32,
    "kind": "image",
    "grid": [1, 4, 6],
    "frames_per_patch": 1,
    "spans": [[3, 6]],
}
VIDEO = {
    "hash": "22" * 32,
    "kind": "video",
    "grid": [3, 2, 4],
    "frames_per_patch": 2,
    "spans": [[12, 2], [17, 2], [22, 2]],
}
CASES: list[dict[str, Any]] = [
    {"name": "text", "tokens": 33, "tenant": "", "salt": "", "epoch": 0, "media": []},
    {"name": "a page that ends the prompt", "tokens": 32, "media": []},
    {"name": "short of a page", "tokens": 8, "media": []},
    {"name": "tenant and salt", "tokens": 17, "tenant": "änne", "salt": "s", "media": []},
    {"name": "after a flush", "tokens": 17, "epoch": 3, "media": []},
    {"name": "a picture over two pages", "tokens": 20, "media": [IMAGE]},
    {"name": "a picture and a clip", "tokens": 41, "tenant": "t", "media": [IMAGE, VIDEO]},
    {"name": "the clip named first", "tokens": 41, "tenant": "t", "media": [VIDEO, IMAGE]},
]


def chain(case: dict[str, Any]) -> list[int]:
    """First eight bytes of the keys of the pages a request can share, as the worker makes them."""
    cache = PrefixCache(PageAllocator(4))
    for _ in range(case.get("epoch", 0)):
        cache.reset()
    sequence = Sequence(
        1,
        request(case),
        page_tokens=PAGE_TOKENS,
        stop_ids=frozenset(),
        max_context_tokens=4096,
    )
    sequence.root_key = cache.root_key(Salt(case.get("tenant", ""), case.get("salt", "")), 1)
    return [int.from_bytes(key[:8], "little") for key in sequence.matchable_keys()]


def request(case: dict[str, Any]) -> Request:
    media = tuple(
        MediaItem(
            kind=MediaKind[item["kind"].upper()],
            media_hash=bytes.fromhex(item["hash"]),
            grid_thw=tuple(item["grid"]),
            frames_per_patch=item["frames_per_patch"],
            spans=tuple(Span(*span) for span in item["spans"]),
            patches=None,
        )
        for item in case["media"]
    )
    return Request(
        request_id="chain",
        prompt_token_ids=tuple(7 * place % 1000 for place in range(case["tokens"])),
        sampling=Sampling(
            1.0, 1.0, 0, 0.0, 0, 1, 0, False, 1.0, 0.0, 0.0, False, 0, frozenset(), {}
        ),
        media=media,
        patch_format=PatchFormat((0.5, 0.25, 0.125), (0.5, 0.75, 1.0), 3, 14, 2, 2),
    )


def test_the_worker_makes_the_committed_keys() -> None:
    committed = json.loads(CHAIN.read_text())
    assert [{**case, "keys": [str(key) for key in chain(case)]} for case in CASES] == committed
    assert len({tuple(entry["keys"]) for entry in committed}) == len(CASES) - 1


if __name__ == "__main__":
    whole = [{**case, "keys": [str(key) for key in chain(case)]} for case in CASES]
    CHAIN.write_text(json.dumps(whole, indent=1) + "\n")
