"""`m3stack bench`: each benchmark prints its figures and a ratio to a named peer or a ceiling."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name -> (module with `main(argv) -> int`, one line of help)
BENCHES = {
    "gateway": ("m3stack.bench.gateway", "overhead and throughput against a scripted worker"),
    "worker": ("m3stack.bench.worker", "tokens a second of one worker over gRPC"),
    "agentic": (
        "m3stack.bench.agentic.run",
        "conversations with tools through the engine, arm against arm",
    ),
    "media": ("m3stack.bench.media", "pictures and clips from bytes to patches"),
    "layers": ("m3stack.bench.layers", "where a step's time goes in layers of the real widths"),
    "kernels": (
        "m3stack.bench.kernels.__main__",
        "the GPU kernels, each checked before it is timed",
    ),
    "transfer": ("m3stack.bench.transfer", "pages from one worker to another over gRPC"),
    "multi-gpu": (
        "m3stack.bench.multi_gpu.__main__",
        "one model divided over GPUs in several ways",
    ),
}


def usage() -> str:
    lines = ["usage: m3stack bench WHAT [options]", "", "what:"]
    return "\n".join([*lines, *(f"  {name:<10}{text}" for name, (_, text) in BENCHES.items())])


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark.

    Returns:
        Its exit code: 0 measured, 1 something failed its check, 2 it cannot run here.
    """
    arguments = list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in BENCHES:
        print(f"m3stack bench: there is no benchmark {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(BENCHES[name][0])
    return module.main(rest)
