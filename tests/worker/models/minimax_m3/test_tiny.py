"""The built-in tiny checkpoint is what its maker makes, and behaves as a served model must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from m3stack.checkpoints import builtin_checkpoint
from m3stack.models.minimax_m3 import tiny_tokenizer
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.tiny import main
from tests.worker import support

TINY = builtin_checkpoint("tiny")

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
}

TEXTS = [
    "What is in this picture? I don't know, HELLO World's 1234567 it'S",
    "def f(x):\n    return x * 2  # */\n/** comment\n\n\n\ttab",
    "Größe, naïve, 你好，世界。 Привет 😀👩‍👩‍👧 مرحبا \u200b\u00a0e\u0301",
    "   leading and trailing   ",
    "\r\n\r\n mixed \n ends\r",
    "".join(chr(code) for code in range(1, 0x250)),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_the_maker_gives_the_shipped_files_but_for_what_was_learned(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == FILES
    for name in FILES - {"model.safetensors"}:
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name
    made, shipped = (load_file(path / "model.safetensors") for path in (tmp_path, TINY))
    assert made.keys() == shipped.keys()
    for name, tensor in made.items():
        assert (tensor.dtype, tensor.shape) == (shipped[name].dtype, shipped[name].shape), name
        assert bool(shipped[name].isfinite().all()), name
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 12_000_000


def test_the_maker_refuses_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_special_ids_follow_the_base_vocabulary_in_the_released_order() -> None:
    config = M3Config.from_dir(TINY)
    base = tiny_tokenizer.BASE_TOKENS
    # the released model's ids are 200000 + k
    assert config.image_token_id == base + 25
    assert config.video_token_id == base + 26
    assert config.bos_token_id == base + 34
    assert config.eos_token_id == base + 20
    assert config.vocab_size == base + 64
    assert len(tiny_tokenizer.ADDED_TOKENS) == 61
    generation = json.loads((TINY / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config.eos_token_id
    assert (generation["temperature"], generation["top_p"], generation["top_k"]) == (1.0, 0.95, 40)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < tiny_tokenizer.BASE_TOKENS


def test_the_base_vocabulary_holds_every_byte_and_real_words(tokenizer: Tokenizer) -> None:
    letters = tiny_tokenizer.byte_letters()
    assert [tokenizer.token_to_id(letter) for letter in letters] == list(range(256))
    sentence = "Explain how a clock works, and describe this picture."
    assert len(tokenizer.encode(sentence).ids) <= 16
    assert len(tokenizer.encode("12345").tokens) >= 2


def test_markers_are_single_tokens_and_the_spoken_ones_survive_decoding(
    tokenizer: Tokenizer,
) -> None:
    for index, text in enumerate(tiny_tokenizer.ADDED_TOKENS):
        assert tokenizer.encode(f"a{text}b").ids[1] == tiny_tokenizer.BASE_TOKENS + index
    text = "]~b]ai\n<mm:think>x</mm:think>]<]minimax[>[<tool_call>[e~["
    ids = tokenizer.encode(text).ids
    spoken = "ai\n<mm:think>x</mm:think>]<]minimax[>[<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == spoken


def test_transformers_reads_the_tokenizer_and_template() -> None:
    theirs = AutoTokenizer.from_pretrained(TINY)
    assert theirs.bos_token_id == 2434
    assert theirs.eos_token_id == 2420
    text = theirs.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("]~!b[]~b]system\nYour model version is MiniMax-M3")
    assert text.endswith("]~b]user\nHi[e~[\n]~b]ai\n")


def test_the_model_equals_transformers_where_selection_acts() -> None:
    transformers_logging.disable_progress_bar()
    theirs = AutoModelForImageTextToText.from_pretrained(TINY, dtype=torch.float32)
    choices = support.Choices()
    kernels = support.recording(support.reference_kernels(), choices)
    ours = support.load(TINY, kernels=kernels)
    ids = torch.randint(0, 2400, (900,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(input_ids=ids[None]).logits[0]
    logits = support.PagedRunner(ours).feed(support.Track(), ids.tolist(), 300)
    # logits reach 30 on random tokens: relative to that, the golden's limit
    assert (logits - expected).abs().max() < 5e-5 * expected.abs().max()
    last = choices.blocks[-1][:, -1]
    assert last.shape == (4, 4)
    # 8 blocks are visible, 4 are kept, the own one among them
    assert (last[:, -1] == 7).all()
