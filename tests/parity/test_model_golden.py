"""The worker's model against reference outputs of transformers 5.24 on the golden checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity import golden
from tests.parity.conftest import Golden
from tests.worker.support import PagedRunner, Track

# transformers' own two attention paths differ by 3e-6, its cached decode by 2e-6; a wrong choice
# of block or expert moves logits by more than 1
LOGITS = 5e-5
# tanh GELU instead of erf moves the features by 6.6e-4
FEATURES = 2e-5

SPARSE_LAYERS = (1, 2, 3)


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def assert_same_blocks(chosen_GTK: Tensor, expected_GTK: Tensor) -> None:
    # the goldens list the own block first and -1 last; ours ascend
    ours, theirs = chosen_GTK.sort(dim=-1).values, expected_GTK.sort(dim=-1).values
    assert torch.equal(ours.long(), theirs.long())


def dense(ids_Tk: Tensor, weights_Tk: Tensor, num_experts: int) -> Tensor:
    return torch.zeros(len(ids_Tk), num_experts).scatter(1, ids_Tk.long(), weights_Tk)


def test_text_logits_choices_and_hidden_states_equal_the_reference(golden_model: Golden) -> None:
    expected = golden.outputs("text")
    hidden: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: hidden.append(output))
        for layer in golden_model.model.layers
    ]
    try:
        logits = PagedRunner(golden_model.model).feed(Track(), expected["input_ids"][0].tolist())
    finally:
        for hook in hooks:
            hook.remove()
    assert largest_difference(logits, expected["logits"]) <= LOGITS
    for layer, output in enumerate(hidden):
        assert largest_difference(output[-64:], expected[f"layer{layer}.hidden.last64"]) <= LOGITS
    choices = golden_model.choices
    for index, layer in enumerate(SPARSE_LAYERS):
        assert_same_blocks(choices.blocks[index], expected[f"layer{layer}.block_indices"])
        ours = dense(choices.experts[index], choices.weights[index], 8)
        theirs = dense(
            expected[f"layer{layer}.topk_index"], expected[f"layer{layer}.topk_weights"], 8
        )
        assert torch.equal(ours > 0, theirs > 0)
        assert largest_difference(ours, theirs) <= 1e-5


@pytest.mark.parametrize("chunk", [7, 127, 128, 129, 512])
def test_chunked_prefill_equals_the_reference(golden_model: Golden, chunk: int) -> None:
    expected = golden.outputs("text")
    runner = PagedRunner(golden_model.model, seed=chunk)
    logits = runner.feed(Track(), expected["input_ids"][0].tolist(), chunk)
    assert largest_difference(logits, expected["logits"]) <= LOGITS
    for index, layer in enumerate(SPARSE_LAYERS):
        chosen = torch.cat(golden_model.choices.blocks[index :: len(SPARSE_LAYERS)], dim=1)
        assert_same_blocks(chosen, expected[f"layer{layer}.block_indices"])


def test_prefill_one_token_at_a_time_equals_the_reference(golden_model: Golden) -> None:
    # 500 tokens: past the 384 from which on selection leaves blocks out
    expected = golden.outputs("text")
    runner = PagedRunner(golden_model.model)
    logits = runner.feed(Track(), expected["input_ids"][0, :500].tolist(), 1)
    assert largest_difference(logits, expected["logits"][:500]) <= LOGITS


def test_decode_after_prefill_equals_the_reference(golden_model: Golden) -> None:
    expected = golden.outputs("decode")
    first = int(expected["first_position"])
    tokens = expected["input_ids"][0].tolist()
    runner, track = PagedRunner(golden_model.model), Track()
    last = runner.feed(track, tokens[: first + 1], 512)[-1:]
    steps = runner.feed(track, tokens[first + 1 : first + 41], 1)
    assert largest_difference(torch.cat([last, steps]), expected["decode_logits"]) <= LOGITS


def test_greedy_tokens_equal_those_of_repeated_full_forwards(golden_model: Golden) -> None:
    prompt = golden.outputs("text")["input_ids"][0, :500].tolist()
    runner, track = PagedRunner(golden_model.model), Track()
    decoded = [int(runner.feed(track, prompt, 128)[-1].argmax())]
    while len(decoded) < 24:
        decoded.append(int(runner.feed(track, decoded[-1:])[-1].argmax()))
    whole = PagedRunner(golden_model.model).feed(Track(), prompt + decoded)
    assert whole[len(prompt) - 1 : -1].argmax(-1).tolist() == decoded


def test_mixed_requests_get_what_each_gets_alone(golden_model: Golden) -> None:
    tokens = golden.outputs("text")["input_ids"][0].tolist()
    requests = [tokens[:700], tokens[700:713], tokens[300:941], tokens[5:6], tokens[1000:1300]]
    alone = [PagedRunner(golden_model.model).feed(Track(), request) for request in requests]
    runner = PagedRunner(golden_model.model, seed=5)
    tracks = [Track() for _ in requests]
    got: list[list[Tensor]] = [[] for _ in requests]
    # chunks of different sizes, joining and leaving at different steps, decode rows among them
    sizes, delays, step = [130, 1, 256, 1, 77], [0, 2, 1, 4, 3], 0
    while any(track.length < len(request) for track, request in zip(tracks, requests, strict=True)):
        active = [
            index
            for index, track in enumerate(tracks)
            if step >= delays[index] and track.length < len(requests[index])
        ]
        parts = [
            (tracks[i], requests[i][tracks[i].length : tracks[i].length + sizes[i]]) for i in active
        ]
        for index, logits in zip(active, runner.step(parts), strict=True):
            got[index].append(logits)
        step += 1
    for pieces, expected in zip(got, alone, strict=True):
        assert largest_difference(torch.cat(pieces), expected) <= LOGITS


def test_stills_sent_without_their_second_copy_equal_the_reference(golden_model: Golden) -> None:
    expected = golden.outputs("image")
    grids = [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    pixels = golden.still_bytes(golden.pixel_bytes(expected["pixel_values"]))
    patches = list(pixels.split([t * h * w for t, h, w in grids]))
    model = golden_model.model
    batch = golden.patch_batch(patches, [1, 1], grids)
    with torch.inference_mode():
        tower = model.vision(batch)
        features = model.encode_media(batch)
    assert largest_difference(tower, expected["vision_tower_out"]) <= FEATURES
    assert [len(item) for item in features] == [20, 6]
    assert largest_difference(torch.cat(features), expected["features"]) <= FEATURES
    ids = expected["input_ids"][0]
    for chunk in (None, 29):
        golden_model.choices.blocks.clear()
        track = Track(
            media_positions_N=(ids == model.config.image_token_id).nonzero()[:, 0],
            media_features_NM=torch.cat(features),
        )
        logits = PagedRunner(model).feed(track, ids.tolist(), chunk)
        assert largest_difference(logits, expected["logits"]) <= LOGITS
        for index, layer in enumerate(SPARSE_LAYERS):
            chosen = torch.cat(golden_model.choices.blocks[index :: len(SPARSE_LAYERS)], dim=1)
            assert_same_blocks(chosen, expected[f"layer{layer}.block_indices"])


def test_a_clip_is_cut_into_segments_and_equals_the_reference(golden_model: Golden) -> None:
    expected = golden.outputs("video")
    rows = expected["video_grid_thw"].tolist()
    # the reference gives a grid row per segment; we are given the clip as one item
    grid = (sum(row[0] for row in rows), *rows[0][1:])
    pixels = golden.pixel_bytes(expected["pixel_values_videos"])
    model = golden_model.model
    batch = golden.patch_batch([pixels], [2], [grid])
    with torch.inference_mode():
        tower = model.vision(batch)
        (features,) = model.encode_media(batch)
    assert largest_difference(tower, expected["vision_tower_out"]) <= FEATURES
    assert largest_difference(features, expected["features"]) <= FEATURES
    ids = expected["input_ids"][0]
    track = Track(
        media_positions_N=(ids == model.config.video_token_id).nonzero()[:, 0],
        media_features_NM=features,
    )
    logits = PagedRunner(model).feed(track, ids.tolist(), 50)
    assert largest_difference(logits, expected["logits"]) <= LOGITS


def test_items_encoded_together_get_what_each_gets_alone(golden_model: Golden) -> None:
    image, video = golden.outputs("image"), golden.outputs("video")
    stills = golden.still_bytes(golden.pixel_bytes(image["pixel_values"]))
    clip = golden.pixel_bytes(video["pixel_values_videos"])
    model = golden_model.model
    batch = golden.patch_batch(
        [stills[80:], clip, stills[:80]], [1, 2, 1], [(1, 4, 6), (6, 4, 6), (1, 8, 10)]
    )
    with torch.inference_mode():
        second, middle, first = model.encode_media(batch)
    assert largest_difference(torch.cat([first, second]), image["features"]) <= FEATURES
    assert largest_difference(middle, video["features"]) <= FEATURES
