"""Writes where fuzzing begins: corpus/TARGET and requests.dict here, from what the tests hold.

From the root of the tree: `python3 gateway/fuzz/seeds.py [MORE_PARSER_CASES.json ...]`. Tiny
clips are made with FFmpeg, where it is installed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent.parent
DATA = ROOT / "tests" / "data"
MAX_SEED_BYTES = 1 << 16
# a byte below 32 stands for a piece of output: the one that is a line end in each dialect
NEW_LINE = {"m3": 24, "m2": 22}
THINKING = {"enabled": 0, "disabled": 1}
CLIPS = (
    ("avc.mp4", "-c:v libx264 -bf 2 -g 4"),
    ("avc_front.mp4", "-c:v libx264 -bf 0 -g 1 -movflags faststart"),
    ("hevc.mp4", "-c:v libx265 -g 4 -x265-params log-level=none -tag:v hvc1"),
    ("mjpeg.mov", "-c:v mjpeg -pix_fmt yuvj420p"),
    ("vp9.mp4", "-c:v libvpx-vp9 -g 4"),
    ("mpeg4.mp4", "-c:v mpeg4"),
    ("turned.mp4", "-c:v libx264 -metadata:s:v rotate=90"),
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "says",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"s": {"type": "string"}, "n": {"$ref": "#/$defs/n"}},
            "required": ["s"],
            "additionalProperties": False,
            "$defs": {"n": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}},
        },
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"s":"x"}'}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
CLIP = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4", "fps": 1.0}}
TURNS = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": [{"type": "text", "text": "look"}, PICTURE, CLIP]},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "and?"},
]
BODIES = (
    (0, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stop": ["a", "b"]}),
    (0, {"messages": TURNS, "tools": [WEATHER], "tool_choice": "required", "stream": True}),
    (
        1,
        {
            "messages": [TURNS[0], TURNS[4]],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"thinking_mode": "enabled"},
            "logit_bias": {"1": -100},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "seed": 1,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        2,
        {
            "messages": [TURNS[4]],
            "reasoning_effort": "low",
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "strict": True,
                    "schema": WEATHER["function"]["parameters"],
                },
            },
        },
    ),
    (2, {"messages": [TURNS[4]], "guided_regex": "[a-z]+"}),
    (
        3,
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "x"},
                        {"type": "tool_use", "id": "u", "name": "f", "input": {"s": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "u", "content": "1"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
                        },
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": WEATHER["function"]["parameters"]}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
        },
    ),
    (
        4,
        {
            "instructions": "i",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "json_object"}},
            "reasoning": {"effort": "low"},
            "store": False,
        },
    ),
    (5, {"prompt": ["a", "b"], "max_tokens": 1, "echo": True, "logprobs": 1}),
    (6, {"prompt": "a", "tokens": [1, 2], "add_special_tokens": False}),
)


def keep(target: str, seed: bytes) -> None:
    """Writes one seed, named by its content."""
    if len(seed) <= MAX_SEED_BYTES:
        folder = FUZZ / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


def cases_of(path: Path) -> list[dict]:
    """Parser cases of a file; some files hold cases of other kinds too."""
    held = json.loads(path.read_text())
    cases = held["cases"] if isinstance(held, dict) else held
    return [case for case in cases if isinstance(case.get("raw_output"), str)]


def outputs(paths: list[Path]) -> None:
    """Outputs of the model, and schemas that they are read by."""
    for path in paths:
        for number, case in enumerate(cases_of(path)):
            dialect = "m2" if "minimax:tool_call" in case["raw_output"] else "m3"
            line = bytes([NEW_LINE[dialect]])
            raw = b"".join(
                line if byte == 10 else bytes([byte])
                for byte in case["raw_output"].encode()
                if byte == 10 or byte >= 32
            )
            thinking = THINKING.get(case.get("thinking_mode", ""), 2)
            head = bytes([thinking + (3 if dialect == "m2" else 0), number % 16])
            keep("output_parser", head + raw)
            for tool in case.get("tools") or []:
                function = tool.get("function", tool)
                schema = json.dumps(function.get("parameters") or {}, separators=(",", ":"))
                name = str(function.get("name", "f")).encode()
                renamed = raw.replace(b'"' + name + b'"', b'"f"')
                keep("schemas", schema.encode() + b"\xff" + head + renamed)
                keep("json", schema.encode())


def media() -> None:
    """Pictures as they are; clips too, and tiny ones of every coding that is looked into."""
    for path in sorted((DATA / "media").iterdir()):
        if path.name.startswith(("img_", "pair_")):
            keep("pictures", path.read_bytes())
        elif path.name.startswith("vid_"):
            for target in ("clips", "clip_plans"):
                keep(target, path.read_bytes())
    for path in sorted((DATA / "avif").glob("*.avif")):
        keep("avif", path.read_bytes())
        keep("pictures", path.read_bytes())
    sets = [DATA / folder / "data_urls.json" for folder in ("media", "media_own")]
    for text in strings([json.loads(path.read_text()) for path in sets]):
        if text.startswith("data:"):
            keep("data_url", text.encode())
    program = shutil.which("ffmpeg")
    if program is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, options in CLIPS:
            made = Path(folder) / name
            source = ["testsrc=size=32x32:rate=5:duration=2"]
            command = [program, "-v", "error", "-f", "lavfi", "-i", *source, *options.split()]
            if subprocess.run([*command, "-y", str(made)], check=False).returncode == 0:
                for target in ("clips", "clip_plans"):
                    keep(target, made.read_bytes())


def strings(value: object) -> list[str]:
    """Every string within a JSON value."""
    match value:
        case str():
            return [value]
        case list():
            return [text for part in value for text in strings(part)]
        case dict():
            return [text for part in [*value, *value.values()] for text in strings(part)]
        case _:
            return []


def requests() -> None:
    """Bodies of each protocol, and the words that they are made of."""
    for kind, body in BODIES:
        keep("requests", bytes([kind]) + json.dumps(body).encode())
        keep("json", json.dumps(body).encode())
    for words in ("<x>", "]<]minimax[>[<tool_call>", "</mm:think>", "[e~[", "\u0000\u2028"):
        keep("requests", b"\x07" + words.encode())
    document = json.loads((ROOT / "gateway/server/assets/openapi.json").read_text())
    words = {text for text in strings(document["components"]) if text.isidentifier()}
    lines = [f'"\\"{word}\\""' for word in sorted(words)]
    (FUZZ / "requests.dict").write_text("\n".join(lines) + "\n")


def numbers() -> None:
    """Sizes, lengths and rates; stop strings and texts."""
    sizes = [(1920, 1080), (1, 1), (28, 28), (6000, 2), (1, 200), (30000, 30000), (640, 480)]
    for number, (width, height) in enumerate(sizes):
        for count, rate in [(300, 30_000), (1, 1000), (108_000, 29_970), (5_000_000, 240_000)]:
            kinds = number % 6 | (number % 8) << 8 | (number % 2) << 16
            fields = (kinds, 512, 2000, width, height, count, rate)
            keep("plans", struct.pack("<7I", *fields))
    for stops, text in [
        ("ab\0abc\0b", "xabcab"),
        ("aa\0aab", "aaab"),
        ("é", "caf\u00e9"),
        ("", "x"),
    ]:
        keep("stops", b"\x02" + stops.encode() + b"\xff" + text.encode())


def main() -> None:
    """Writes all of them."""
    parser = DATA / "parser"
    outputs([parser / "m3_output.json", parser / "m2_output.json", *map(Path, sys.argv[1:])])
    media()
    requests()
    numbers()


if __name__ == "__main__":
    main()
