"""`m3stack verify`: whether a loaded checkpoint computes what transformers computes from it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from m3stack.checkpoint_tools.locate import locate_model
from m3stack.errors import StartupError
from m3stack.kernels.reference_table import reference_kernels

if TYPE_CHECKING:
    from m3stack.checkpoint_tools.verify import Comparison

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXIT_AGREES, EXIT_DIFFERS, EXIT_IMPOSSIBLE = 0, 1, 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack verify",
        description="Runs short prompts, one of them with a picture, through transformers and "
        "through m3stack's model, one after the other, and compares all logits. Needs the "
        "transformers package. Quantised weights are decoded to a temporary folder for it.",
        epilog="exit status: 0 they agree, 1 they differ, 2 it could not be found out",
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, or hub id")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        default="float32",
        help="of both models; float32 shows the least (default: %(default)s)",
    )
    parser.add_argument(
        "--long-tokens",
        type=int,
        default=600,
        metavar="N",
        help="length of the longest prompt; blocks are left out only beyond 2048 tokens of the "
        "released model (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-quantised",
        action="store_true",
        help="compute with MXFP8 weights as they are instead of decoding them at load",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Verifies one checkpoint.

    Returns:
        0 if the logits agree, 1 if they differ, 2 if they could not be compared.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.long_tokens < 1:
        parser.error(f"--long-tokens is {arguments.long_tokens}, expected at least 1")
    try:
        # an optional package that nothing else of the worker needs
        from m3stack.checkpoint_tools.verify import Settings, verify
    except ModuleNotFoundError as missing:
        print(
            f"m3stack verify: the package {missing.name!r}, which it compares with or through, is "
            "not installed; install it with: pip install 'transformers>=5.24'",
            file=sys.stderr,
        )
        return EXIT_IMPOSSIBLE
    settings = Settings(
        kernels=reference_kernels(),
        device=torch.device(arguments.device),
        dtype=DTYPES[arguments.dtype],
        long_tokens=arguments.long_tokens,
        keep_quantised=arguments.keep_quantised,
    )
    try:
        comparisons = verify(locate_model(arguments.model).directory, settings)
    except StartupError as error:
        print(f"m3stack verify: {error}", file=sys.stderr)
        return EXIT_IMPOSSIBLE
    return report(comparisons, settings.dtype)


def report(comparisons: Sequence[Comparison], dtype: torch.dtype) -> int:
    """Prints the figures and the verdict; returns the exit status."""
    print(
        f"{'prompt':<14}{'tokens':>7}{'max diff':>12}{'mean diff':>12}"
        f"{'logit std':>11}{'same argmax':>13}"
    )
    for item in comparisons:
        print(
            f"{item.prompt:<14}{item.num_tokens:>7}{item.max_difference:>12.3g}"
            f"{item.mean_difference:>12.3g}{item.deviation:>11.3g}{item.same_argmax:>13.1%}"
            f"{'' if item.agrees(dtype) else '  differs'}"
        )
    agrees = all(item.agrees(dtype) for item in comparisons)
    print("m3stack and transformers " + ("agree" if agrees else "DIFFER"))
    return EXIT_AGREES if agrees else EXIT_DIFFERS
