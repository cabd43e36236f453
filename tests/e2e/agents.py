"""Coding agents, unmodified, before a worker that calls their tools: is the file written?

`python -m tests.e2e.agents claude=PROGRAM codex=PROGRAM opencode=PROGRAM` runs each agent that is
named, in an empty folder and with a home of its own, and prints what it did. Each is asked to write
a file; the worker calls the agent's own tool, with text that markup and quoting would spoil.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from m3stack.checkpoints import builtin_checkpoint
from m3stack.local_ports import free_port
from m3stack.prepare import Preparer
from m3stack.worker.v1 import worker_pb2 as pb
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for
from tests.e2e.scripted_worker import scripted_worker

TASK = "Write the file note.txt, then say that you are done."
CONTENT = (
    "def f(x):\n    return x < 1 and x > \"0\" & 'y'  # </parameter> ]] \u00fcber \U0001f642\n"
)
ENDING = "The note is written."
MARK = "]<]minimax[>["
# the agents ask their vendors for news otherwise, which nobody here answers
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "NO_COLOR": "1",
}
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Place:
    """Where one agent works, and the gateway it asks."""

    folder: Path
    home: Path
    url: str

    @property
    def note(self) -> Path:
        return self.folder / "note.txt"


def claude(program: str, place: Place) -> tuple[list[str], dict[str, str]]:
    """Speaks Anthropic's Messages."""
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    models = dict.fromkeys(names, MODEL_NAME)
    command = [program, "-p", TASK, "--allowedTools", "Write", "--output-format", "text"]
    return command, {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_AUTH_TOKEN": "none", **models}


def codex(program: str, place: Place) -> tuple[list[str], dict[str, str]]:
    """Speaks OpenAI's Responses."""
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(f"""
model = "{MODEL_NAME}"
model_provider = "m3stack"
web_search = "disabled"

[model_providers.m3stack]
name = "m3stack"
base_url = "{place.url}/v1"
wire_api = "responses"
""")
    command = [program, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK]
    return command, {"CODEX_HOME": str(folder)}


def opencode(program: str, place: Place) -> tuple[list[str], dict[str, str]]:
    """Speaks Chat Completions."""
    model = {"name": MODEL_NAME, "limit": {"context": 100_000, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "m3stack",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {MODEL_NAME: model},
    }
    config = {
        "provider": {"m3stack": provider},
        "permission": {"edit": "allow"},
        "share": "disabled",
    }
    (place.folder / "opencode.json").write_text(json.dumps(config))
    return [program, "run", "--model", f"m3stack/{MODEL_NAME}", TASK], {}


AGENTS = {"claude": claude, "codex": codex, "opencode": opencode}


def tool_calls(place: Place) -> dict[str, dict[str, str]]:
    """How the agents' tools write the note; an agent declares one of them."""
    quoted = CONTENT.replace("'", "'\\''")
    shell = f"printf '%s' '{quoted}' > note.txt"
    return {
        "Write": {"file_path": str(place.note), "content": CONTENT},
        "exec_command": {"cmd": shell},
        "shell_command": {"command": shell},
        "write": {"filePath": str(place.note), "content": CONTENT},
    }


@dataclass
class Script:
    """Calls the agent's tool once, then ends; remembers what it was asked."""

    preparer: Preparer
    calls: dict[str, dict[str, str]]
    num_requests: int = 0
    num_calls: int = 0
    prompt_tokens: int = 0

    def __call__(self, header: pb.GenerateHeader) -> list[int]:
        prompt = self.preparer.detokenize(list(header.prompt_token_ids))
        self.num_requests += 1
        self.prompt_tokens = max(self.prompt_tokens, len(header.prompt_token_ids))
        is_answered = "]~b]tool" in prompt
        name = next((name for name in self.calls if f'"name": "{name}"' in prompt), None)
        if name is None or is_answered:
            return self.preparer.tokenize(ENDING)
        self.num_calls += 1
        members = "".join(
            f"{MARK}<{key}>{text}{MARK}</{key}>" for key, text in self.calls[name].items()
        )
        invoke = f'{MARK}<invoke name="{name}">{members}{MARK}</invoke>\n'
        return self.preparer.tokenize(f"I write it.{MARK}<tool_call>\n{invoke}{MARK}</tool_call>")


@contextlib.contextmanager
def gateway_before(worker: Server, script: Script, stack: Stack) -> Iterator[Server]:
    """A gateway whose worker follows the script, a token a message."""
    with scripted_worker(worker, script, tokens_per_message=1) as url:
        address = f"127.0.0.1:{free_port()}"
        server = stack.start("gateway", address, "", "--workers", url)
        wait_for(server, "/ready")
        yield server
        server.stop()


def try_agent(name: str, program: str, stack: Stack, worker: Server) -> dict[str, object]:
    """What an agent did with its task."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root, "work"), Path(root, "home"), "")
        place.folder.mkdir()
        place.home.mkdir()
        script = Script(Preparer(builtin_checkpoint("tiny")), tool_calls(place))
        with gateway_before(worker, script, stack) as server:
            place = Place(place.folder, place.home, server.url)
            command, own = AGENTS[name](program, place)
            environment = {"PATH": os.environ["PATH"], "HOME": str(place.home), **QUIET, **own}
            began = time.monotonic()
            done = subprocess.run(
                command,
                cwd=place.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
        is_written = place.note.is_file() and place.note.read_text() == CONTENT
        report: dict[str, object] = {
            "agent": name,
            "exit_code": done.returncode,
            "is_file_right": is_written,
            "is_ending_shown": ENDING in done.stdout,
            "requests": script.num_requests,
            "calls": script.num_calls,
            "longest_prompt_tokens": script.prompt_tokens,
            "seconds": round(time.monotonic() - began, 1),
        }
        if not is_written or done.returncode:
            report["told"] = (done.stdout + done.stderr)[-3000:]
        return report


def main(arguments: Sequence[str]) -> int:
    """0 if every named agent wrote the file."""
    programs = dict(argument.split("=", 1) for argument in arguments)
    unknown = sorted(programs.keys() - AGENTS.keys())
    if not programs or unknown:
        print(__doc__, f"unknown: {unknown}" if unknown else "")
        return 2
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        try:
            worker = stack.worker()
            first = stack.gateway(worker)
            wait_for(first, "/ready")
            for name, program in programs.items():
                reports.append(try_agent(name, program, stack, worker))
                print(json.dumps(reports[-1]), flush=True)
        finally:
            stack.close()
    return int(not all(report["is_file_right"] for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
