"""Pictures: formats, ways to send them, size controls, limits."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.conftest import Api, data_url, image
from tests.e2e.media import picture, text_part
from tests.e2e.test_chat import served_file

Draw = Callable[..., bytes]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    """Draws a test card of a size in the format of a suffix."""

    def drawn(size: str = "112x112", suffix: str = "png") -> bytes:
        return picture(tmp_path, size=size, name=f"card.{suffix}")

    return drawn


def tokens(api: Api, part: dict) -> int:
    """What a picture adds to a prompt, its two marks left out."""
    question = text_part("What is this?")
    return api.prompt_tokens([part, question]) - api.prompt_tokens([question]) - 2


@pytest.mark.parametrize(
    ("suffix", "mime"),
    [("png", "image/png"), ("jpg", "image/jpeg"), ("gif", "image/gif"), ("webp", "image/webp")],
)
def test_every_format_is_taken_as_data_and_by_url(
    api: Api, draw: Draw, suffix: str, mime: str
) -> None:
    data = draw(suffix=suffix)
    assert tokens(api, image(data_url(data, mime))) == 4 * 4
    with served_file(data) as url:
        assert tokens(api, image(url)) == 4 * 4


@pytest.mark.parametrize(
    "url",
    [
        "data:IMAGE/PNG;base64,{}",
        "DATA:image/png;BASE64,{}",
        "data:image/jpeg;base64,{}",
        "data:application/octet-stream;base64,{}",
        "data:image/png;charset=utf-8;name=card.png;base64,{}",
        "data:image/png;base64,\n{}\n",
    ],
)
def test_the_head_of_a_data_url_may_be_odd(api: Api, draw: Draw, url: str) -> None:
    encoded = base64.b64encode(draw()).decode()
    assert tokens(api, image(url.format(encoded))) == 4 * 4


@pytest.mark.parametrize(
    "change", [lambda text: text.rstrip("="), lambda text: text[:76] + "\n" + text[76:]]
)
def test_base64_without_padding_or_in_lines_is_no_failure_of_ours(
    api: Api, draw: Draw, change: Callable[[str], str]
) -> None:
    for size in ("112x112", "113x112", "114x112"):
        encoded = change(base64.b64encode(draw(size)).decode())
        assert api.ask([image(f"data:image/png;base64,{encoded}")]).status_code in (200, 400)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,!!!not base64!!!",
        "data:image/png;base64,",
        "data:image/png;base64,AAAA",
        "data:image/png,plain",
        "not a url",
        "ftp://127.0.0.1/card.png",
        "file:///etc/passwd",
        "",
    ],
)
def test_what_is_no_picture_is_the_callers_mistake(api: Api, url: str) -> None:
    assert "image_url" in api.refusal([image(url)])["param"]


def test_every_detail_is_taken_and_another_word_never_breaks(api: Api, draw: Draw) -> None:
    url = data_url(draw("1400x700"), "image/png")
    counts = [tokens(api, image(url, detail=detail)) for detail in ("low", "default", "high")]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]
    assert tokens(api, image(url, detail="auto")) == counts[1]
    assert api.ask([image(url, detail="blurry")]).status_code in (200, 400)


def test_a_longer_side_costs_more(api: Api, draw: Draw) -> None:
    url = data_url(draw("1400x700"), "image/png")
    counts = [tokens(api, image(url, max_long_side_pixel=side)) for side in (252, 504, 1008)]
    assert counts[0] < counts[1] < counts[2]
    # 252 x 126 has its short side raised to 112 at least, in steps of 28
    assert counts[0] in (9 * 4, 9 * 5)


@pytest.mark.parametrize("side", [0, -28, 253, "252"])
def test_a_long_side_that_is_no_multiple_of_28_is_refused(
    api: Api, draw: Draw, side: object
) -> None:
    url = data_url(draw(), "image/png")
    assert "max_long_side_pixel" in str(api.refusal([image(url, max_long_side_pixel=side)]))


def test_a_tiny_picture_is_raised(api: Api, draw: Draw) -> None:
    assert tokens(api, image(data_url(draw("20x20"), "image/png"))) >= 2 * 2


def test_pictures_stand_anywhere_text_does(api: Api, draw: Draw) -> None:
    card = image(data_url(draw(), "image/png"))
    words = text_part("Look.")
    in_system = [{"role": "system", "content": [words, card]}, {"role": "user", "content": "Hi."}]
    api.answer(messages=in_system)
    twice = api.prompt_tokens([card, words, card])
    once = api.prompt_tokens([card, words])
    assert twice - once == 4 * 4 + 2
    in_tool = [
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": [words, card]},
    ]
    api.answer(messages=in_tool)


def test_two_hundred_pictures_are_the_most(api: Api, draw: Draw) -> None:
    card = image(data_url(draw("28x28"), "image/png"))
    error = api.refusal([card] * 201)
    assert "200" in error["message"]
    assert api.ask([card] * 200).status_code == 200
