"""`m3stack convert`: a checkpoint from BF16 to MXFP8 or back, streamed from disk to disk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from m3stack.checkpoint_tools.conversion_plan import SHARD_BYTES, Target
from m3stack.checkpoint_tools.convert import Settings, convert
from m3stack.checkpoint_tools.locate import locate_model
from m3stack.errors import StartupError
from m3stack.progress import TransferProgress


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack convert",
        description="Writes a MiniMax-M3 checkpoint in another weight format, as the released "
        "repositories store it. From BF16 to MXFP8 weights are rounded; from MXFP8 to BF16 nothing "
        "is lost. An interrupted run goes on when it is started again.",
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint directory, or hub id")
    parser.add_argument("destination", type=Path, metavar="DST", help="directory to be made")
    parser.add_argument(
        "--to", required=True, choices=[target.value for target in Target], help="format to write"
    )
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=SHARD_BYTES / 1e9,
        metavar="GB",
        help="largest file of weights, in 10^9 bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="what computes: cpu, cuda or cuda:N (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one conversion.

    Returns:
        0 done, 1 it could not be done and says why.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not arguments.shard_gb > 0:
        parser.error(f"--shard-gb is {arguments.shard_gb}, expected more than 0")
    settings = Settings(shard_bytes=int(arguments.shard_gb * 1e9), device=arguments.device)
    try:
        source = locate_model(arguments.source).directory
        with TransferProgress(f"converting to {arguments.to}") as progress:
            result = convert(
                source,
                arguments.destination,
                Target(arguments.to),
                settings=settings,
                progress=progress,
            )
    except (StartupError, OSError) as error:
        print(f"m3stack convert: {error}", file=sys.stderr)
        return 1
    print(f"{result.directory}: {result.num_tensors} tensors, {result.num_bytes / 1e9:.2f} GB")
    if result.losses.squared_values:
        print(f"rounding to MXFP8 moved the weights by {result.losses.relative:.2%} (RMS)")
    return 0
