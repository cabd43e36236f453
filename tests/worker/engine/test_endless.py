"""Schemas whose every value would hold another one of itself are told from those that end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from m3stack.engine.endless import is_endless

NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}},
    "required": ["value", "next"],
}
PAIR: dict[str, Any] = {
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
    },
    "$ref": "#/$defs/a",
}


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        PAIR,
        {"anyOf": [NODE, {"$ref": "#"}]},
        {"allOf": [{"type": "string"}, {"$ref": "#"}]},
        {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
        {"type": ["object", "array"], "required": ["x"], "minItems": 1, "items": {"$ref": "#"},
         "properties": {"x": {"$ref": "#"}}},
    ],
)  # fmt: skip
def test_what_requires_itself_never_ends(schema: object) -> None:
    assert is_endless(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        # impossible, which is another matter
        False,
        {"type": "object", "properties": {"x": False}, "required": ["x"]},
        {},
        {"type": "string"},
        {**NODE, "required": ["value"]},
        {**NODE, "properties": {"value": True, "next": {"anyOf": [{"$ref": "#"}, {"const": 0}]}}},
        {**PAIR, "$defs": {**PAIR["$defs"], "b": {"type": "array", "items": NODE}}},
        {"type": ["object", "null"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"enum": [1], "$defs": {"loop": {"$ref": "#/$defs/loop"}}},
        {"$ref": "other.json#/x"},
        {"$ref": "#/nowhere"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 0},
        {"type": "object", "required": [{}, ["x"], None, 3]},
        {"type": "array", "items": [{"$ref": "#"}], "minItems": "2"},
    ],
)  # fmt: skip
def test_what_can_end_is_let_through(schema: object) -> None:
    assert not is_endless(schema)


def test_chains_and_depths_beyond_reason_are_let_through() -> None:
    chain: dict[str, Any] = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(400)}
    chain["400"] = {"type": "null"}
    assert not is_endless({"$ref": "#/$defs/0", "$defs": chain})
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(3000):
        deep = {"anyOf": [deep]}
    assert not is_endless(deep)


def test_a_large_schema_takes_no_longer_than_a_bound() -> None:
    # every definition is visited in every round, and every round settles one
    names = range(150)
    wide = [{"type": "object", "properties": {str(n): {"type": "string"} for n in range(40)}}]
    chain: dict[str, Any] = {
        str(n): {"allOf": [*wide * 40, {"$ref": f"#/$defs/{n + 1}"}]} for n in names
    }
    chain["150"] = {"type": "null"}
    began_at = time.process_time()
    assert not is_endless({"$ref": "#/$defs/0", "$defs": chain})
    # the bound is some tens of milliseconds; without one it would be minutes
    assert time.process_time() - began_at < 5
