"""Clips: containers, frame rates, size controls, limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.conftest import Api, data_url, image, video
from tests.e2e.media import clip, picture, text_part
from tests.e2e.test_chat import served_file

Film = Callable[..., str]
MIMES = {
    "mp4": "video/mp4",
    "mov": "video/quicktime",
    "mkv": "video/x-matroska",
    "avi": "video/x-msvideo",
}


@pytest.fixture
def film(tmp_path: Path) -> Film:
    """A moving test card as a data URL."""

    def filmed(suffix: str = "mp4", size: str = "112x112", seconds: int = 3) -> str:
        data = clip(tmp_path, size=size, seconds=seconds, name=f"card.{suffix}")
        return data_url(data, MIMES[suffix])

    return filmed


@pytest.mark.parametrize("suffix", MIMES)
def test_every_container_is_taken_as_data_and_by_url(
    api: Api, film: Film, tmp_path: Path, suffix: str
) -> None:
    question = text_part("What moves?")
    counts = {api.prompt_tokens([video(film(suffix)), question])}
    with served_file((tmp_path / f"card.{suffix}").read_bytes()) as url:
        counts.add(api.prompt_tokens([video(url), question]))
    assert len(counts) == 1
    assert counts.pop() > api.prompt_tokens([question]) + 2 * 4 * 4


def test_more_frames_a_second_cost_more(api: Api, film: Film) -> None:
    url = film(seconds=8)
    counts = [api.prompt_tokens([video(url, fps=fps)]) for fps in (0.5, 1, 2)]
    assert counts[0] < counts[1] < counts[2]
    assert api.prompt_tokens([video(url)]) == counts[1]


@pytest.mark.parametrize("fps", [0.2, 5])
def test_the_ends_of_the_frame_rates_are_taken(api: Api, film: Film, fps: float) -> None:
    api.answer([video(film(), fps=fps)])


@pytest.mark.parametrize("fps", [0.1, 5.1, 0, -1, "1"])
def test_frame_rates_beyond_them_are_refused(api: Api, film: Film, fps: object) -> None:
    assert "fps" in str(api.refusal([video(film(), fps=fps)]))


def test_a_longer_side_costs_more(api: Api, film: Film) -> None:
    url = film(size="1024x576", seconds=2)
    counts = [api.prompt_tokens([video(url, max_long_side_pixel=side)]) for side in (252, 504, 756)]
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("side", [140, 149, 3612, 253])
def test_a_long_side_beyond_the_limits_is_refused(api: Api, film: Film, side: int) -> None:
    assert "max_long_side_pixel" in str(api.refusal([video(film(), max_long_side_pixel=side)]))


def test_every_detail_is_taken(api: Api, film: Film) -> None:
    url = film(size="640x360", seconds=1)
    counts = [api.prompt_tokens([video(url, detail=d)]) for d in ("low", "default", "high")]
    assert counts == sorted(counts)


def test_twenty_clips_are_the_most(api: Api, film: Film) -> None:
    card = video(film(seconds=1), fps=0.2)
    message = api.refusal([card] * 21)["message"]
    assert "video" in message
    assert "larger than the limit: 20" in message


@pytest.mark.parametrize("url", ["data:video/mp4;base64,AAAA", "data:video/mp4;base64,", "x"])
def test_what_is_no_clip_is_the_callers_mistake(api: Api, url: str) -> None:
    assert "video_url" in api.refusal([video(url)])["param"]


def test_a_clip_and_a_picture_stand_together(api: Api, film: Film, tmp_path: Path) -> None:
    first, still = text_part("First"), image(data_url(picture(tmp_path), "image/jpeg"))
    moving = [first, video(film(seconds=1)), text_part("then")]
    cost_of_still = api.prompt_tokens([first, still]) - api.prompt_tokens([first])
    assert cost_of_still > 4 * 4
    assert api.prompt_tokens([*moving, still]) == api.prompt_tokens(moving) + cost_of_still
    assert api.prompt_tokens([still, *moving]) == api.prompt_tokens([*moving, still])
