"""The `m3stack` command: one word after it says which job, the rest belongs to that job."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from m3stack import __version__

# command -> (module with `main(argv) -> int`, one line of help). Modules are imported by name so
# that `m3stack chat` need not load torch.
COMMANDS = {
    "up": ("m3stack.cli.up", "gateway and worker together, on one machine"),
    "gateway": ("m3stack.cli.gateway", "the REST gateway alone, in front of running workers"),
    "worker": ("m3stack.cli.worker", "one worker alone, behind gRPC"),
    "chat": ("m3stack.cli.chat", "talk to a running gateway; takes pictures and clips"),
    "top": ("m3stack.cli.top", "what gateways and workers of a cluster do, live"),
    "explain": ("m3stack.cli.explain", "where a request's time went in a worker"),
    "doctor": ("m3stack.cli.doctor", "say what this machine can and cannot do"),
    "convert": ("m3stack.cli.convert", "write a checkpoint in MXFP8, or back in BF16"),
    "verify": ("m3stack.cli.verify", "compare a checkpoint's logits with transformers"),
    "eval": ("m3stack.cli.eval", "ask the tiny model what it was taught; scores a skill"),
    "bench": ("m3stack.cli.bench", "measure the gateway, the worker or the kernels"),
}


def usage() -> str:
    """The text of `m3stack --help`."""
    lines = [
        "usage: m3stack COMMAND [options]      (m3stack COMMAND --help tells more)",
        "",
        "Serves MiniMax-M3: text, pictures and clips through OpenAI-compatible REST.",
        "",
        "commands:",
        *(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()),
        "",
        "first steps:",
        "  m3stack up                           serve the built-in tiny model",
        '  m3stack chat "What is in it?" --image cat.jpg',
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Its exit code: 0 done, 1 it failed and said why, 2 the command line is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"m3stack {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"m3stack: there is no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module_name, _ = COMMANDS[name]
    try:
        module = importlib.import_module(module_name)
        return module.main(rest)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as missing:
        print(explain_missing(missing, name), file=sys.stderr)
        return 1


def explain_missing(missing: ModuleNotFoundError, command: str) -> str:
    """What to install when a command's module is not there."""
    package = (missing.name or "").split(".")[0]
    if missing.name == "m3stack._gateway":
        return (
            "m3stack: the compiled gateway module is missing; build it with `make build`, "
            "or install the m3stack wheel"
        )
    of_worker = ("worker", "up", "bench", "convert", "verify", "eval")
    extra = "worker" if command in of_worker else "demo"
    return (
        f"m3stack {command}: the Python package {package!r} is not installed; "
        f"install it with: pip install 'm3stack[{extra}]'"
    )
