"""Training data is laid out as the gateway lays out requests: same ids, same patches."""

from __future__ import annotations

import base64
import io
import json
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m3stack.checkpoints import builtin_checkpoint
from m3stack.models.minimax_m3 import tiny_tokenizer
from m3stack.prepare import Preparer
from m3stack.train import needles, pictures, text_tasks
from m3stack.train.encode import Call, Conversation, Encoder, Media, Turn, patches_of

TINY = builtin_checkpoint("tiny")


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    return Preparer(TINY)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(TINY / "tokenizer.json")


def body_of(conversation: Conversation) -> dict[str, Any]:
    """The request whose prompt is this conversation and the opening of an answer."""
    messages: list[dict[str, Any]] = []
    for turn in conversation.turns:
        if turn.role == "assistant":
            message: dict[str, Any] = {"role": "assistant", "content": turn.text}
            if turn.reasoning:
                message["reasoning_content"] = turn.reasoning
            if turn.calls:
                message["tool_calls"] = [call_of(call) for call in turn.calls]
            messages.append(message)
        elif turn.role == "tool":
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": turn.text})
        else:
            content = [part_of(part) for part in turn.parts]
            messages.append({"role": "user", "content": content})
    body = {"model": "tiny", "messages": messages, "thinking": {"type": conversation.mode}}
    if conversation.tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in conversation.tools]
    return body


def call_of(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": "call_1", "type": "function", "function": function}


def part_of(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    assert not part.is_clip
    buffer = io.BytesIO()
    Image.fromarray(part.frames[0]).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def conversations() -> list[Conversation]:
    rng = random.Random(3)
    tools = text_tasks.tool_choice(rng)
    found = [
        Conversation(tuple(text_tasks.passage(rng, thinks=True)), "enabled"),
        Conversation(tuple(text_tasks.arithmetic(rng, thinks=True)), "adaptive"),
        Conversation(tuple(text_tasks.copying(rng))),
        Conversation(tuple(pictures.picture_episode(rng)), "adaptive"),
        Conversation(tuple(pictures.picture_episode(rng) + pictures.picture_episode(rng))),
    ]
    for _ in range(12):
        found.append(Conversation(tuple(text_tasks.tool_use(rng, tools)), "disabled", tools))
    sentences = needles.plain_sentences()
    found.append(Conversation((Turn("user", (" ".join(sentences[:300]),)),)))
    return found


@pytest.mark.parametrize("number", range(18))
def test_ids_and_patches_equal_the_gateways(
    number: int, preparer: Preparer, encoder: Encoder
) -> None:
    conversation = conversations()[number]
    turns = conversation.turns
    if turns[-1].role == "assistant":
        turns = turns[:-1]
    prompt = Conversation(turns, conversation.mode, conversation.tools)
    request, _ = preparer.chat(body_of(prompt))
    encoded = encoder.conversation(prompt)
    opening = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": ""}
    ids = encoded.ids + encoder.text_ids("]~b]ai\n" + opening[conversation.mode])
    assert list(request.prompt_token_ids) == ids
    assert len(request.media) == len(encoded.media)
    for theirs, ours in zip(request.media, encoded.media, strict=True):
        assert np.array_equal(np.frombuffer(theirs.patches, np.uint8), patches_of(ours).ravel())


def test_text_is_split_as_the_tokenizer_splits_it(preparer: Preparer, encoder: Encoder) -> None:
    texts = [
        "What's 12.5 plus -7?  It isn't.\n\n\tEnd  of ABCdef GHI,jkl\r\n x",
        '<tool>{"name": "get_weather"}</tool>\n  [1, 2, 345678]',
        "]~b]user\nHi[e~[\n]<]minimax[>[</mm:think>",
    ]
    for text in texts:
        assert encoder.text_ids(text) == preparer.tokenize(text)
    assert tiny_tokenizer.token_id("]~b]") in encoder.text_ids(texts[2])


def test_a_clips_patches_hold_two_frames_each(encoder: Encoder) -> None:
    frames = np.arange(3 * 28 * 28 * 3, dtype=np.uint32).reshape(3, 28, 28, 3).astype(np.uint8)
    rows = patches_of(Media(frames, is_clip=True)).reshape(2, 4, 3, 2, 14, 14)
    # square by square: the second patch stands to the right of the first
    assert np.array_equal(rows[0, 1, 2, 1], frames[1, :14, 14:, 2])
    # the odd last frame is repeated
    assert np.array_equal(rows[1, 2, 0, 0], frames[2, 14:, :14, 0])
    assert np.array_equal(rows[1, 2, 0, 1], frames[2, 14:, :14, 0])
    encoded = encoder.conversation(
        Conversation((Turn("user", (Media(frames, is_clip=True), "Hi")),))
    )
    assert [count for _, count in encoded.runs] == [1, 1]
