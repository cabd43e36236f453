"""M3's own prompts and token ids, which SMG's source package carries, against our prompt builder.

`python -m tests.oracles.smg_prompts [FOLDER]` takes the folder with `chat_template.jinja` and
`render_fixtures.json`, or gets it with pip from the source package smg 1.13.0. Nothing of it is
kept: the files are MiniMax's and SMG's. The package has no vocabulary of M3, so ids are compared
where they can be: every control token, in order, with as much text between them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m3stack.checkpoints import builtin_checkpoint
from m3stack.errors import WorkerError
from m3stack.prepare import Preparer

PACKAGE = "smg==1.13.0"
PLACE = "crates/tokenizer/tests/fixtures/minimax_m3"


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else download(Path(scratch))
        checkpoint = Path(scratch) / "checkpoint"
        shutil.copytree(
            builtin_checkpoint("tiny"), checkpoint, ignore=shutil.ignore_patterns("*.safetensors")
        )
        shutil.copy(folder / "chat_template.jinja", checkpoint)
        preparer = Preparer(checkpoint)
        added = added_tokens(checkpoint)
        cases = json.loads((folder / "render_fixtures.json").read_text())["cases"]
        findings = [compare(preparer, added, case) for case in cases]
    for case, finding in zip(cases, findings, strict=True):
        print(f"{case['name']}: {finding or 'the same'}")
    return int(any(findings))


def download(scratch: Path) -> Path:
    """Unpacks the source package; its metadata cannot be built here, and need not be."""
    command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps", "--quiet"]
    command += ["--no-binary", "smg", "--dest", str(scratch), PACKAGE]
    # without a compiler in reach the build of its metadata ends at once
    environment = os.environ | {"TMPDIR": str(scratch), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = list(scratch.glob(f"**/{PLACE}"))
    if not found:
        raise SystemExit(f"no {PLACE} in the source package\n{done.stderr[-2000:]}")
    return found[0]


def added_tokens(checkpoint: Path) -> dict[int, str]:
    tokens = json.loads((checkpoint / "tokenizer.json").read_text())["added_tokens"]
    return {token["id"]: token["content"] for token in tokens}


def compare(preparer: Preparer, added: Mapping[int, str], case: Mapping[str, Any]) -> str:
    """What differs, or nothing."""
    body = {"messages": case["messages"], **({"tools": case["tools"]} if "tools" in case else {})}
    try:
        request, _ = preparer.chat(body)
    except WorkerError as error:
        return f"refused: {error}"
    ours = list(request.prompt_token_ids)
    text = preparer.detokenize(ours)
    if text != case["text"]:
        pairs = enumerate(zip(text, case["text"], strict=False))
        at = next(
            (at for at, (one, other) in pairs if one != other), min(len(text), len(case["text"]))
        )
        return f"text differs at {at}: {text[at : at + 60]!r}, not {case['text'][at : at + 60]!r}"
    # M3's added tokens stand in the same order behind a larger vocabulary
    first = min(added)
    shift = case["ids"][0] - ours[0]
    marks = [token + shift for token in ours if token >= first]
    wanted = [token for token in case["ids"] if token >= first + shift]
    if marks != wanted:
        return f"control tokens differ: {marks}, not {wanted}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
