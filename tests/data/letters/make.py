"""Makes a tokenizer of single characters for the history model: one id a character.

Usage: python tests/data/letters/make.py
"""

from __future__ import annotations

import json
from pathlib import Path

# id 7 ends the output, 59 and 60 stand for media
CHARACTERS = '0123456{}[]:,"-.+ \\aebcdfghijklmnopqrstuvwxyzAEN789TF_/!?<'
ADDED = {7: "<end>", 59: "<image>", 60: "<video>"}


def document() -> dict[str, object]:
    """What tokenizer.json holds."""
    ids = [token_id for token_id in range(59) if token_id not in ADDED]
    vocab = dict(zip(CHARACTERS.replace(" ", "Ġ"), ids, strict=True))
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token_id, content in ADDED.items()
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


if __name__ == "__main__":
    text = json.dumps(document(), ensure_ascii=False, indent=1)
    Path(__file__).with_name("tokenizer.json").write_text(text + "\n", encoding="utf-8")
