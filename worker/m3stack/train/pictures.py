"""Drawn stills and clips with known content, and questions about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from m3stack.train import words
from m3stack.train.encode import Media, Pixels, Turn

PICTURE_SIDE, CLIP_SIDE, CLIP_FRAMES = 112, 56, 8
_CELL = PICTURE_SIDE / 3

# digits in 3 columns and 5 rows, top row first
_DIGITS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)

Image = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Figure:
    """One drawn shape.

    Attributes:
        cell: row and column of a 3 x 3 grid over the picture.
    """

    shape: str
    colour: str
    cell: tuple[int, int]

    @property
    def place(self) -> str:
        return words.PLACES[self.cell[0]][self.cell[1]]


def draw_figures(figures: list[Figure], rng: random.Random) -> Media:
    """A picture of some figures on a grey ground."""
    image = _ground(PICTURE_SIDE, rng.randint(0, 255))
    for figure in figures:
        row, column = figure.cell
        centre = (
            (column + 0.5) * _CELL + rng.uniform(-3, 3),
            (row + 0.5) * _CELL + rng.uniform(-3, 3),
        )
        _paint(image, figure.shape, centre, rng.uniform(11, 16), words.COLOURS[figure.colour], rng)
    return Media(_finished(image[None], rng), is_clip=False)


def draw_digit(digit: int, colour: str, rng: random.Random) -> Media:
    """A picture of one large digit."""
    image = _ground(PICTURE_SIDE, rng.randint(0, 255))
    scale = rng.randint(12, 18)
    pattern = np.array([int(bit) for bit in _DIGITS[digit]], bool).reshape(5, 3)
    mask = pattern.repeat(scale, 0).repeat(scale, 1)
    top = rng.randint(2, PICTURE_SIDE - mask.shape[0] - 2)
    left = rng.randint(2, PICTURE_SIDE - mask.shape[1] - 2)
    image[top : top + mask.shape[0], left : left + mask.shape[1]][mask] = words.COLOURS[colour]
    return Media(_finished(image[None], rng), is_clip=False)


def draw_motion(direction: str, shape: str, colour: str, rng: random.Random) -> Media:
    """A figure that crosses the frame and comes back in on the other side.

    Where it stands in any one frame, and in all of them together, is as likely for a direction as
    for its opposite: only the order of the frames tells.
    """
    step = rng.uniform(5, 9)
    across = rng.uniform(14, CLIP_SIDE - 14)
    along, size = rng.uniform(0, CLIP_SIDE), rng.uniform(8, 11)
    dx, dy = words.DIRECTIONS[direction]
    ground = rng.randint(0, 255)
    frames = []
    for index in range(CLIP_FRAMES):
        at = (along + step * index * (dx + dy)) % CLIP_SIDE
        image = _ground(CLIP_SIDE, ground)
        for shown in (at - CLIP_SIDE, at, at + CLIP_SIDE):
            centre = (shown, across) if dx else (across, shown)
            _paint(image, shape, centre, size, words.COLOURS[colour], rng)
        frames.append(image)
    return Media(_finished(np.stack(frames), rng), is_clip=True)


def draw_colours(colours: list[str], rng: random.Random) -> Media:
    """A clip whose whole frame takes one colour after the other, each for two frames or more."""
    lengths = [2] * len(colours)
    for _ in range(CLIP_FRAMES - sum(lengths)):
        lengths[rng.randrange(len(lengths))] += 1
    frames = np.empty((CLIP_FRAMES, CLIP_SIDE, CLIP_SIDE, 3), np.float32)
    start = 0
    for colour, length in zip(colours, lengths, strict=True):
        frames[start : start + length] = words.COLOURS[colour]
        start += length
    return Media(_finished(frames, rng), is_clip=True)


def draw_flashes(count: int, rng: random.Random) -> Media:
    """A dark clip with bright single frames, never two in a row."""
    free = list(range(CLIP_FRAMES))
    lit: list[int] = []
    while len(lit) < count:
        if not free:
            free, lit = list(range(CLIP_FRAMES)), []
        pick = rng.choice(free)
        lit.append(pick)
        free = [index for index in free if abs(index - pick) > 1]
    frames = np.full((CLIP_FRAMES, CLIP_SIDE, CLIP_SIDE, 3), rng.randint(0, 50), np.float32)
    frames[lit] = rng.randint(210, 255)
    return Media(_finished(frames, rng), is_clip=True)


def random_figures(rng: random.Random, count: int) -> list[Figure]:
    """Figures in different cells, of any shape and colour."""
    cells = rng.sample([(row, column) for row in range(3) for column in range(3)], count)
    return [
        Figure(rng.choice(words.SHAPES), rng.choice(list(words.COLOURS)), cell) for cell in cells
    ]


def figure_questions(figures: list[Figure], rng: random.Random) -> list[tuple[str, str, str]]:
    """(question, answer, skill) of everything that may be asked about a picture of figures."""
    asked: list[tuple[str, str, str]] = []
    shapes = [figure.shape for figure in figures]
    colours = [figure.colour for figure in figures]
    for figure in figures:
        if shapes.count(figure.shape) == 1:
            what = f"the {figure.shape}"
            answer = f"The {figure.shape} is {figure.colour}."
            asked.append((f"What colour is {what}?", answer, "picture_colour"))
            answer = f"The {figure.shape} is {figure.place}."
            asked.append((f"Where is {what}?", answer, "picture_position"))
        if colours.count(figure.colour) == 1:
            question = f"What shape is {figure.colour}?"
            answer = f"The {figure.colour} shape is a {figure.shape}."
            asked.append((question, answer, "picture_shape"))
    asked.append(("How many shapes are there?", _there_are(len(figures)), "picture_count"))
    shape = rng.choice(words.SHAPES)
    question = f"How many {shape} shapes are there?"
    asked.append((question, _there_are(shapes.count(shape)), "count_kind"))
    figure = rng.choice(figures)
    seen = f"There is a {figure.colour} {figure.shape} {figure.place}."
    asked.append((f"What is {figure.place}?", seen, "picture_cell"))
    absent = [shape for shape in words.SHAPES if shape not in shapes]
    if absent:
        shape = rng.choice(absent)
        question = rng.choice((f"What colour is the {shape}?", f"Where is the {shape}?"))
        asked.append((question, f"There is no {shape}.", "refusal"))
    return asked


def description(figures: list[Figure]) -> tuple[str, str, str]:
    """All figures of a picture, in reading order."""
    told = [
        f"a {figure.colour} {figure.shape} {figure.place}"
        for figure in sorted(figures, key=lambda figure: figure.cell)
    ]
    return "What is in this picture?", f"There is {', '.join(told)}.", "picture_description"


def picture_episode(rng: random.Random) -> list[Turn]:
    """A picture and a few questions about it."""
    if rng.random() < 0.2:
        digit, colour = rng.randrange(10), rng.choice(list(words.COLOURS))
        return _with_media(draw_digit(digit, colour, rng), [digit_question(digit)])
    figures = random_figures(rng, rng.choice((1, 1, 1, 2, 2, 3, 3, 4, 5, 6)))
    questions = figure_questions(figures, rng)
    # few a picture: later ones could be answered from the text of earlier ones
    questions = rng.sample(questions, rng.randint(1, 3))
    if rng.random() < 0.35:
        questions = [description(figures), *questions[:1]]
    return _with_media(draw_figures(figures, rng), questions)


def digit_question(digit: int) -> tuple[str, str, str]:
    return "Which digit is this?", f"It is {digit}.", "picture_digit"


def motion_questions(direction: str, shape: str) -> list[tuple[str, str, str]]:
    """The direction among all four, and among the two of its axis."""
    pair = "left or right" if direction in ("left", "right") else "up or down"
    answer = f"The {shape} moves {direction}."
    return [
        (f"Does the {shape} move {pair}?", answer, "clip_motion"),
        (f"Which way does the {shape} move?", answer, "clip_motion"),
    ]


def order_question(colours: list[str]) -> tuple[str, str, str]:
    first, second, third = colours
    answer = f"First {first}, then {second}, then {third}."
    return "In what order do the colours appear?", answer, "clip_order"


def flash_question(count: int) -> tuple[str, str, str]:
    return "How many flashes are there?", _there_are(count), "clip_flashes"


def clip_episode(rng: random.Random) -> list[Turn]:
    """A clip and a question about it."""
    kind = rng.randrange(4)
    if kind <= 1:
        direction, shape = rng.choice(list(words.DIRECTIONS)), rng.choice(words.SHAPES)
        colour = rng.choice(list(words.COLOURS))
        questions = motion_questions(direction, shape)
        questions.append(
            (f"What colour is the {shape}?", f"The {shape} is {colour}.", "clip_colour")
        )
        rng.shuffle(questions)
        clip = draw_motion(direction, shape, colour, rng)
        return _with_media(clip, questions[: rng.randint(1, 2)])
    if kind == 2:
        colours = rng.sample(list(words.COLOURS), 3)
        return _with_media(draw_colours(colours, rng), [order_question(colours)])
    count = rng.randint(0, 4)
    return _with_media(draw_flashes(count, rng), [flash_question(count)])


def _with_media(item: Media, questions: list[tuple[str, str, str]]) -> list[Turn]:
    turns: list[Turn] = []
    for index, (question, answer, skill) in enumerate(questions):
        parts = (item, question) if index == 0 else (question,)
        turns += [Turn("user", parts), Turn("assistant", (answer,), skill=skill)]
    return turns


def _there_are(count: int) -> str:
    if count == 0:
        return "There are none."
    verb = "is" if count == 1 else "are"
    return f"There {verb} {words.NUMBERS[count]}."


def _ground(side: int, grey: int) -> Image:
    return np.full((side, side, 3), grey, np.float32)


def _paint(
    image: Image,
    shape: str,
    centre: tuple[float, float],
    size: float,
    colour: tuple[int, int, int],
    rng: random.Random,
) -> None:
    """Paints a figure of a radius; parts outside the image are cut off."""
    side = image.shape[0]
    left, top = int(centre[0] - size) - 1, int(centre[1] - size) - 1
    right, bottom = int(centre[0] + size) + 2, int(centre[1] + size) + 2
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, side), min(bottom, side)
    if left >= right or top >= bottom:
        return
    x = (np.arange(left, right, dtype=np.float32) + 0.5 - centre[0]) / size
    y = (np.arange(top, bottom, dtype=np.float32) + 0.5 - centre[1])[:, None] / size
    # half a pixel of soft edge
    cover = np.clip(0.5 - _distance(shape, x, y) * size, 0, 1)[..., None]
    shade = np.array(colour, np.float32) * rng.uniform(0.88, 1.08)
    box = image[top:bottom, left:right]
    box += cover * (shade - box)


def _distance(shape: str, x: Image, y: Image) -> Image:
    """Signed distance from a figure of radius one, negative inside."""
    if shape == "circle":
        return np.hypot(x, y) - 0.95
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.72) - 0.22
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.82
    if shape == "triangle":
        return np.maximum(0.873 * np.abs(x) - 0.488 * y - 0.464, y - 0.75)
    if shape == "cross":
        ax, ay = np.abs(x), np.abs(y)
        return np.minimum(np.maximum(ax - 0.28, ay - 0.95), np.maximum(ay - 0.28, ax - 0.95))
    assert shape == "star", shape
    radius, angle = np.hypot(x, y), np.arctan2(x, -y)
    turn = 2 * np.pi / 5
    folded = np.abs((angle + turn / 2) % turn - turn / 2)
    return radius - (0.38 + 0.62 * np.clip(1 - folded / (turn / 2), 0, 1) ** 1.3)


def _finished(frames: Image, rng: random.Random) -> Pixels:
    """Rounds to bytes, with a little noise as cameras and codecs leave it."""
    strength = rng.choice((0.0, 2.0, 5.0))
    if strength:
        bank = _noise_bank()
        start = rng.randrange(bank.size - frames.size)
        frames = frames + bank[start : start + frames.size].reshape(frames.shape) * np.float32(
            strength
        )
    return (np.clip(frames, 0, 255) + np.float32(0.5)).astype(np.uint8)


@cache
def _noise_bank() -> Image:
    """Normal noise to cut from: drawing it anew for every picture would take most of the time."""
    generator = np.random.Generator(np.random.SFC64(7))
    return generator.standard_normal(1 << 20, np.float32)
