"""The student is the served model: same logits, and gradients where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from m3stack.batch import PatchBatch
from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.train.batches import Batch, BatchKind, BatchMaker
from m3stack.train.encode import Encoder
from m3stack.train.loop import initial_student, loss_positions
from m3stack.train.model import Student, write_checkpoint
from m3stack.train.operations import Layout, Selection
from tests.worker import support

MEAN = tuple(tiny.IMAGE_PREPROCESSOR["image_mean"])
STD = tuple(tiny.IMAGE_PREPROCESSOR["image_std"])
KIND = BatchKind(1, 1024, 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.write_tiny_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def student(directory: Path) -> Student:
    config = M3Config.from_dir(directory)
    student = initial_student(config, torch.device("cpu"), tiny.initial_weights(config))
    student.load(
        {
            # biases and norms that matter, values that bf16 holds
            name: (tensor + 0.1 * torch.randn(tensor.shape)).bfloat16().float()
            for name, tensor in student.weights().items()
        }
    )
    write_checkpoint(student, tiny.config_object(), directory)
    return student


@pytest.fixture(scope="module")
def batch(directory: Path) -> Batch:
    return BatchMaker(Encoder(directory / "tokenizer.json"), seed=1).make(0, KIND)


def served_logits(model: M3Model, batch: Batch, student: Student) -> Tensor:
    """Of every row, through the vision tower as it is served and a paged cache."""
    track = support.Track()
    positions, features = [], []
    for grid, patches in batch.patches.items():
        length = grid[0] * grid[1] * grid[2]
        frames = patches.shape[1] // (3 * 14 * 14)
        count = patches.shape[0] // length
        items = PatchBatch(patches.split(length), (frames,) * count, (grid,) * count, MEAN, STD)
        with torch.inference_mode():
            features += model.encode_media(items)
        positions.append(batch.media_rows[grid])
    track.media_positions_N, track.media_features_NM = torch.cat(positions), torch.cat(features)
    return support.PagedRunner(model).feed(track, batch.ids_T.tolist(), 300)


def test_logits_equal_the_served_models_with_top_k(
    directory: Path, student: Student, batch: Batch
) -> None:
    layout = Layout(1, KIND.num_tokens, Selection.OWN)
    with torch.no_grad():
        ours = student.logits(batch, layout)
    theirs = served_logits(support.load(directory), batch, student)[batch.loss_rows_S]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    with torch.no_grad():
        dense = student.logits(batch, Layout(1, KIND.num_tokens, Selection.ALL))
    # eight blocks, four of them chosen: selection matters
    assert (dense - theirs).abs().max() > 1e-2


def test_the_index_branch_learns_from_its_own_loss_alone(student: Student, batch: Batch) -> None:
    layout = Layout(
        1, KIND.num_tokens, Selection.OWN, loss_positions_RS=loss_positions(batch, 64, seed=0)
    )
    main_rows = (8 + 2 * 4) * 32

    def touched() -> tuple[set[str], bool, bool]:
        """Parameters with a gradient, and whether the fused input's two parts have one."""
        found, main, index = set(), False, False
        for name, parameter in student.model.named_parameters():
            if parameter.grad is not None and bool(parameter.grad.any()):
                found.add(name)
                if name.endswith("in_proj.weight") and "layers.2" in name:
                    main = bool(parameter.grad[:main_rows].any())
                    index = bool(parameter.grad[main_rows:].any())
            parameter.grad = None
        return found, main, index

    student.logits(batch, layout)
    torch.stack(student.operations.tape.index_losses).sum().backward()
    names, main, index = touched()
    assert (main, index) == (False, True)
    assert all("index_" in name or name.endswith("in_proj.weight") for name in names), names
    student.logits(batch, layout).logsumexp(-1).sum().backward()
    names, main, index = touched()
    assert (main, index) == (True, False)
    assert not any("index_" in name for name in names)
    assert {"embedding", "vision.patch_embedding", "layers.4.feed_forward.router"} <= names
