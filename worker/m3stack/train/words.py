"""Words that the training data is made of; every noun is one token of the tiny tokenizer."""

# ruff: noqa: SIM905 (a list of words reads best as words)

from __future__ import annotations

import zlib

COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (38, 84, 214),
    "yellow": (240, 214, 40),
    "orange": (244, 140, 30),
    "purple": (134, 50, 168),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("at the left", "in the centre", "at the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

# each ends in a token that no other ends in
NAMES = ("Anna", "Ben", "Tom", "Lucy", "Max", "Leo", "Sam", "Zoe", "Tim", "Jack", "Rose", "Mark")
CITIES = ("Paris", "London", "Rome", "Berlin", "Oslo", "Madrid", "Cairo", "Lima", "Delhi", "Tokyo")
FOODS = ("fruit", "fish", "bread", "rice", "cake", "soup", "cheese", "honey")
ANIMALS = ("cat", "dog", "bird", "horse", "fish", "tiger", "rabbit", "mouse")
THINGS = ("cup", "car", "clock", "book", "chair", "box", "lamp", "boat")
WORKPLACES = ("kitchen", "school", "church", "forest", "library", "garden", "station", "bank")

NOUNS = (
    "river sea wind forest clock cup car kitchen cat dog bird horse fish tree flower city animal "
    "fruit room light table book music list door house school church service interest "
    "family friend mind field line power water hand head face night day week month year hour "
    "minute morning evening company program business group question problem matter "
    "sense help name man world life work place point end side country area "
    "letter page token block layer index key value sentence model image frame pixel grid error "
    "warning limit option method class module package file path folder directory event stream "
    "request message reply server client"
).split()
ADJECTIVES = (
    "good little old great new small large early late high low long short young white black hot "
    "calm free true bright dark round tall wide narrow fast slow near distant empty full special "
    "single important national social"
).split()
VERBS = (
    "saw found left took used held met moved passed touched needed wanted called showed read "
    "changed kept opened closed covered"
).split()
LINKS = "near in under behind over before after with without against around above below".split()


def is_held_out(*parts: object) -> bool:
    """Whether a fact is kept out of training, by a hash of its parts: one in eight is."""
    return zlib.crc32("|".join(map(str, parts)).encode()) % 8 == 0
