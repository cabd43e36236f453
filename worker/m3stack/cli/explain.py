"""`m3stack explain REQUEST`: where a request's time went in a worker, step by step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc

from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

TIMEOUT_S = 30.0
# chunks of a prompt that are shown one by one unless all are asked for
SHOWN_CHUNKS = 8


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack explain",
        description="Shows where a request's time went: queue, media, prompt, tokens. A worker "
        "remembers its latest requests by the id of the reply, with the number of the choice "
        "behind a dash (chatcmpl-...-0); without a number, the first choice is shown.",
    )
    parser.add_argument("request", metavar="REQUEST", help="id of the reply")
    parser.add_argument(
        "--worker",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="gRPC address of the worker (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="show every step of a long prompt")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints one account.

    Returns:
        0 if there is one, 1 if the worker knows none or cannot be reached.
    """
    arguments = build_parser().parse_args(argv)
    with grpc.insecure_channel(arguments.worker) as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        try:
            account = find(stub, arguments.request)
        except grpc.RpcError as error:
            what = error.details() if isinstance(error, grpc.Call) else str(error)
            print(f"m3stack explain: {arguments.worker}: {what}", file=sys.stderr)
            return 1
    print(render(account, show_all=arguments.all))
    return 0


def find(stub: pb_grpc.AdminServiceStub, name: str) -> pb.ExplainResponse:
    """The account of a request, or of the first choice of a reply.

    Raises:
        grpc.RpcError: there is neither, or the worker cannot be reached.
    """
    try:
        return stub.Explain(pb.ExplainRequest(request_id=name), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        is_unknown = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND
        if not is_unknown:
            raise
    return stub.Explain(pb.ExplainRequest(request_id=f"{name}-0"), timeout=TIMEOUT_S)


def render(account: pb.ExplainResponse, *, show_all: bool) -> str:
    """The account as a table for people."""
    last = account.entries[-1] if account.entries else pb.AccountEntry()
    total_ms = last.start_ms + last.duration_ms
    lines = [
        f"request {account.request_id}: {account.outcome}, {total_ms:.1f} ms in the worker",
        f"  prompt {account.prompt_tokens} tokens, {account.cached_tokens} of them cached; "
        f"output {account.output_tokens}; preempted {account.preemptions} times",
        "",
        f"  {'at ms':>10} {'took ms':>10}  {'phase':<10}{'tokens':>8} {'steps':>6} "
        f"{'in steps':>10}  notes",
    ]
    entries = list(account.entries) if show_all else folded(account.entries)
    for entry in entries:
        lines.append(
            f"  {entry.start_ms:>10.1f} {entry.duration_ms:>10.1f}  {entry.phase:<10}"
            f"{entry.tokens or '':>8} {entry.steps or '':>6} "
            f"{f'{entry.steps_ms:.1f}' if entry.steps else '':>10}  {note_of(entry)}".rstrip()
        )
    lines += ["", *shares(account.entries, total_ms)]
    return "\n".join(lines)


def folded(entries: Sequence[pb.AccountEntry]) -> list[pb.AccountEntry]:
    """The entries with all but the first chunks of each run of prompt steps in one line."""
    result: list[pb.AccountEntry] = []
    run = 0
    for entry in entries:
        is_chunk = entry.phase == "prefill"
        run = run + 1 if is_chunk and result and result[-1].phase == "prefill" else int(is_chunk)
        if run <= SHOWN_CHUNKS:
            result.append(entry)
            continue
        last = result[-1]
        if run == SHOWN_CHUNKS + 1:
            last = pb.AccountEntry()
            last.CopyFrom(entry)
            last.note = "further prompt steps together (--all shows each)"
            result.append(last)
            continue
        last.duration_ms = entry.start_ms + entry.duration_ms - last.start_ms
        last.tokens += entry.tokens
        last.steps += entry.steps
        last.steps_ms += entry.steps_ms
        last.batch_tokens += entry.batch_tokens
    return result


def note_of(entry: pb.AccountEntry) -> str:
    """What a person should know of an entry."""
    notes = [entry.note] if entry.note else []
    if entry.phase == "prefill" and entry.batch_tokens > entry.tokens:
        notes.append(f"beside {entry.batch_tokens - entry.tokens} tokens of others")
    if entry.phase == "decode" and entry.steps:
        mean_ms = entry.duration_ms / entry.steps
        between_ms = max(0.0, entry.duration_ms - entry.steps_ms)
        notes.append(f"{mean_ms:.2f} ms a token, {between_ms:.1f} ms between steps")
        if entry.mixed_steps:
            notes.append(
                f"{entry.mixed_steps} steps ({entry.mixed_ms:.1f} ms) held prompts of others"
            )
    return "; ".join(notes)


def shares(entries: Sequence[pb.AccountEntry], total_ms: float) -> list[str]:
    """How the whole time divides, phases in the order they came up."""
    sums: dict[str, float] = {}
    for entry in entries:
        sums[entry.phase] = sums.get(entry.phase, 0.0) + entry.duration_ms
    sums["between steps"] = max(0.0, total_ms - sum(sums.values()))
    whole = max(total_ms, 1e-9)
    return [f"  {name:<14}{ms:>10.1f} ms {100 * ms / whole:>5.1f} %" for name, ms in sums.items()]
