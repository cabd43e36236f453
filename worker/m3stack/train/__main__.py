"""`python -m m3stack.train DIR`: trains the tiny model, or goes on where a run stopped."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.config import M3Config
from m3stack.train.batches import BatchMaker
from m3stack.train.encode import Encoder
from m3stack.train.loader import Loader
from m3stack.train.loop import (
    Budget,
    Source,
    Trainer,
    fast_operations,
    initial_student,
    json_lines,
)
from m3stack.train.model import write_checkpoint
from m3stack.train.plot import loss_plot
from m3stack.train.recipe import main_recipe

STATE_FILE, LOG_FILE, PLOT_FILE = "state.pt", "train.jsonl", "loss.svg"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m m3stack.train",
        description="Trains the tiny model from its initial weights and writes a checkpoint in "
        f"the released layout, {LOG_FILE}, {PLOT_FILE} and {STATE_FILE}. Run again with the same "
        "directory, it goes on from the last state.",
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=20_000, help="of the whole run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or time, if shorter")
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--longest", type=int, default=64, help="documents of so many k tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=0, help="that make data; 0: this one")
    parser.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--weights", type=Path, default=None, help="model.safetensors to start at")
    parser.add_argument("--peak-rate", type=float, default=1e-3)
    parser.add_argument(
        "--graphs", action="store_true", help="steps as CUDA graphs, where there is a GPU"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Trains.

    Returns:
        0; errors are exceptions.
    """
    arguments = build_parser().parse_args(argv)
    directory: Path = arguments.directory
    if not (directory / "config.json").is_file():
        tiny.write_tiny_checkpoint(directory)
    config_object = tiny.config_object()
    config, device = M3Config.from_object(config_object), torch.device(arguments.device)
    tokens, rate = arguments.batch_tokens, arguments.peak_rate
    recipe = main_recipe(tokens, longest=arguments.longest, peak_rate=rate)
    tokenizer = directory / "tokenizer.json"
    source: Source = BatchMaker(Encoder(tokenizer), recipe.seed).make
    if arguments.processes:
        source = Loader(
            tokenizer, recipe, num_processes=arguments.processes, pins=device.type == "cuda"
        )
    weights = tiny.initial_weights(config)
    if arguments.weights is not None:
        weights = iter(load_file(arguments.weights).items())
    student = initial_student(config, device, weights, **fast_operations(device))
    trainer = Trainer(
        student, recipe, source, json_lines(directory / LOG_FILE), uses_graphs=arguments.graphs
    )
    state = directory / STATE_FILE
    if state.is_file():
        trainer.resume(state)
        if isinstance(source, Loader):
            source.skip(trainer.used)

    saved_s = time.monotonic()

    def save() -> None:
        trainer.save(state)
        write_checkpoint(student, config_object, directory)

    def after_step(trainer: Trainer, progress: float) -> None:
        nonlocal saved_s
        if time.monotonic() - saved_s > arguments.save_every:
            save()
            saved_s = time.monotonic()

    trainer.run(Budget(arguments.steps, arguments.seconds), after_step=after_step)
    save()
    (directory / PLOT_FILE).write_text(loss_plot([directory / LOG_FILE]), encoding="utf-8")
    if isinstance(source, Loader):
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
