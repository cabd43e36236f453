"""`m3stack doctor`: what this machine can and cannot do, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.console import Console

from m3stack import __version__
from m3stack.checkpoints import builtin_checkpoint
from m3stack.cli.up import port_is_free
from m3stack.errors import StartupError

MIN_FFMPEG = 5
# what common clips need, and the decoders of FFmpeg that read it
DECODERS = {
    "h264": {"h264"},
    "hevc": {"hevc"},
    "vp9": {"vp9", "libvpx-vp9"},
    "av1": {"av1", "libdav1d", "libaom-av1"},
    "mpeg4": {"mpeg4"},
    "mjpeg": {"mjpeg"},
}


class State(Enum):
    """How a finding is to be taken."""

    OK = ("ok", "green")
    # something works less well, or not at all, but `m3stack up` does
    NOTE = ("note", "yellow")
    BAD = ("MISSING", "red")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic: what was looked at.
        detail: what was found.
        remedy: what to do, or empty.
    """

    state: State
    topic: str
    detail: str
    remedy: str = ""


def main(argv: Sequence[str]) -> int:
    """Prints the findings.

    Returns:
        0 if `m3stack up` can serve here, 1 if something it needs is missing.
    """
    parser = argparse.ArgumentParser(prog="m3stack doctor", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=None, metavar="DIR", help="checkpoint to look at"
    )
    parser.add_argument("--port", type=int, default=8000, help="port `m3stack up` shall use")
    parser.add_argument(
        "--plan",
        nargs=5,
        default=None,
        metavar=("GPUS", "GIB", "FORMAT", "CONTEXT", "REQUESTS"),
        help="only plan the memory of M3 on GPUS GPUs of GIB each, weights in FORMAT (bf16, mxfp8, "
        "nvfp4), REQUESTS at once of CONTEXT tokens; e.g. --plan 8 139 mxfp8 131072 32",
    )
    parser.add_argument(
        "--kv", default="bf16", choices=("bf16", "fp8", "fp8-all"), help="cache format for --plan"
    )
    parser.add_argument(
        "--shard-index-keys", action="store_true", help="as the worker's setting, for --plan"
    )
    arguments = parser.parse_args(argv)
    if arguments.plan is not None:
        return plan(arguments.plan, arguments.kv, shard_index_keys=arguments.shard_index_keys)
    model = arguments.model if arguments.model is not None else builtin_checkpoint("tiny")
    checks: list[Callable[[], Iterator[Finding]]] = [
        machine,
        gateway_module,
        ffmpeg,
        torch_and_devices,
        lambda: kernels(model),
        lambda: checkpoint(model),
        lambda: port(arguments.port),
    ]
    console = Console(highlight=False)
    is_fit = True
    for check in checks:
        for finding in check():
            is_fit = is_fit and finding.state is not State.BAD
            show(console, finding)
    console.print(
        "\n`m3stack up` can serve here." if is_fit else "\n`m3stack up` cannot serve here yet.",
        style="bold",
        markup=False,
    )
    return 0 if is_fit else 1


def plan(numbers: Sequence[str], kv_format: str, *, shard_index_keys: bool = False) -> int:
    """Prints what of M3 fits where; 0 planned, 1 a number cannot be used."""
    # these need torch, and a doctor must work without it
    from m3stack import memory_plan

    gpus, gib, weight_format, context_tokens, concurrency = numbers
    try:
        planned = memory_plan.plan_memory(
            gpus=int(gpus),
            gpu_bytes=int(float(gib) * 2**30),
            weight_format=weight_format,
            context_tokens=int(context_tokens),
            concurrency=int(concurrency),
            kv_format=kv_format,
            shard_index_keys=shard_index_keys,
        )
    except (ValueError, StartupError) as error:
        print(f"m3stack doctor --plan: {error}", file=sys.stderr)
        return 1
    print(memory_plan.table(planned))
    return 0


def show(console: Console, finding: Finding) -> None:
    """One or two lines."""
    word, colour = finding.state.value
    console.print(f"{word:>8}", style=colour, end="  ", markup=False)
    console.print(f"{finding.topic:<12}{finding.detail}", markup=False, soft_wrap=True)
    if finding.remedy:
        console.print(f"{'':>22}-> {finding.remedy}", style="dim", markup=False, soft_wrap=True)


def machine() -> Iterator[Finding]:
    """Interpreter, cores, memory."""
    yield Finding(
        State.OK,
        "machine",
        f"m3stack {__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {memory_gib():.0f} GiB of memory",
    )


def memory_gib() -> float:
    """Physical memory in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def gateway_module() -> Iterator[Finding]:
    """The compiled module and its version."""
    try:
        from m3stack import _gateway
    except ImportError as error:
        remedy = "build it with `make build`, or install the m3stack wheel"
        yield Finding(State.BAD, "gateway", f"the compiled module does not load: {error}", remedy)
        return
    if _gateway.__version__ != __version__:
        detail = f"module {_gateway.__version__}, package {__version__}"
        yield Finding(State.BAD, "gateway", detail, "build again with `make build`")
        return
    yield Finding(State.OK, "gateway", f"compiled module {_gateway.__version__}")


def ffmpeg() -> Iterator[Finding]:
    """Both programs, their version, the decoders clips need."""
    remedy = "clips will be refused; install it with: apt-get install ffmpeg"
    for name in ("ffmpeg", "ffprobe"):
        if shutil.which(name) is None:
            yield Finding(State.NOTE, name, "not found on PATH", remedy)
            return
    banner = output_of("ffmpeg", "-version")
    version = banner.split()[2] if len(banner.split()) > 2 else "?"
    major = version.lstrip("n").split(".")[0]
    if major.isdigit() and int(major) < MIN_FFMPEG:
        remedy = f"version {MIN_FFMPEG} or newer is what the tests run with"
        yield Finding(State.NOTE, "ffmpeg", f"version {version}", remedy)
        return
    rows = (line.split() for line in output_of("ffmpeg", "-decoders").splitlines())
    listed = {row[1] for row in rows if len(row) > 1}
    absent = [codec for codec, names in DECODERS.items() if not listed & names]
    if absent:
        yield Finding(
            State.NOTE,
            "ffmpeg",
            f"{version}, without {', '.join(absent)}",
            "such clips will be refused",
        )
        return
    yield Finding(State.OK, "ffmpeg", f"{version}, reads {', '.join(DECODERS)}")


def output_of(*command: str) -> str:
    """What a program prints, or nothing if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout if done.returncode == 0 else ""


def torch_and_devices() -> Iterator[Finding]:
    """torch and every GPU."""
    try:
        import torch
    except ImportError:
        remedy = "needed for a worker: pip install 'm3stack[worker]'"
        yield Finding(State.BAD, "torch", "not installed", remedy)
        return
    yield Finding(State.OK, "torch", f"{torch.__version__}")
    if not torch.cuda.is_available():
        detail = "none that torch can use: the worker runs on the CPU"
        yield Finding(State.NOTE, "GPU", detail, "fine for the built-in model, far too slow for M3")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        detail = f"{index}: {properties.name}, {size}, sm {capability}"
        is_hopper = properties.major == 9
        remedy = "" if is_hopper else "the CUDA kernels are made for Hopper (sm 9.0)"
        yield Finding(State.OK if is_hopper else State.NOTE, "GPU", detail, remedy)


def kernels(model: Path) -> Iterator[Finding]:
    """Every back end for this checkpoint, and why it cannot run where it cannot."""
    try:
        import torch

        from m3stack.kernels.build import KernelUnavailableError
        from m3stack.kernels.select import NAMES, build_kernels
        from m3stack.models.minimax_m3.config import M3Config
        from m3stack.rank_model import kernel_shape
    except ImportError as error:
        yield Finding(State.NOTE, "kernels", f"cannot be looked at: {error}")
        return
    try:
        config = M3Config.from_dir(model)
    except StartupError:
        # told by the check of the checkpoint itself
        return
    has_gpu = torch.cuda.is_available()
    shape = kernel_shape(config, torch.bfloat16 if has_gpu else torch.float32)
    device = torch.device("cuda" if has_gpu else "cpu")
    for name in NAMES:
        try:
            table = build_kernels(name, shape=shape, device=device)
        except KernelUnavailableError as error:
            yield Finding(State.NOTE, "kernels", f"{name}: {error}")
        else:
            used = "" if table.name == name else f" -> {table.name}"
            yield Finding(State.OK, "kernels", f"{name}{used}")


def checkpoint(path: Path) -> Iterator[Finding]:
    """Whether both sides can read the checkpoint, and agree about it."""
    try:
        from m3stack.models.minimax_m3.config import M3Config
    except ImportError:
        # told by the check of torch
        return
    try:
        config = M3Config.from_dir(path)
    except StartupError as error:
        yield Finding(
            State.BAD, "checkpoint", str(error), "give --model a checkpoint in the released layout"
        )
        return
    try:
        from m3stack.prepare import Preparer

        _, fingerprint = Preparer(path).chat({"messages": [{"role": "user", "content": "Hi"}]})
    except (ImportError, ValueError) as error:
        yield Finding(State.BAD, "checkpoint", f"the gateway cannot use {path}: {error}")
        return
    if fingerprint != config.facts().fingerprint():
        detail = f"{path}: gateway and worker read different facts from it"
        yield Finding(State.BAD, "checkpoint", detail, "please report this with its config.json")
        return
    size = f"{config.num_layers} layers, {config.max_position_embeddings} tokens of context"
    yield Finding(State.OK, "checkpoint", f"{path.name}: {size}")


def port(number: int) -> Iterator[Finding]:
    """Whether the REST port can be had."""
    if port_is_free("127.0.0.1", number):
        yield Finding(State.OK, "port", f"{number} is free")
    else:
        yield Finding(State.NOTE, "port", f"{number} is in use", "choose another with --port")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
