"""Reads a JSON object in which every key must be known, present and of the right kind."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from m3stack.errors import StartupError


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        StartupError: the file is absent, unreadable, not JSON, not an object, or names a key twice.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist; a model directory needs {path.name}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise StartupError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise StartupError(f"{path} holds {_kind(data)}, expected a JSON object")
    return data


class Section:
    """One object of a settings file.

    Args:
        name: shown in errors, e.g. `config.json: text_config`.
        data: the object.
        required: keys that must be there.
        optional: keys that may be there.

    Raises:
        StartupError: names every missing and every unknown key at once.
    """

    def __init__(
        self,
        name: str,
        data: Mapping[str, Any],
        *,
        required: Collection[str],
        optional: Collection[str],
    ) -> None:
        self._name = name
        self._data = data
        missing = sorted(set(required) - set(data))
        unknown = sorted(set(data) - set(required) - set(optional))
        complaints = []
        if missing:
            complaints.append(f"missing {_plural(missing)} {', '.join(missing)}")
        if unknown:
            complaints.append(f"unknown {_plural(unknown)} {', '.join(unknown)}")
        if complaints:
            raise StartupError(f"{name}: {'; '.join(complaints)}")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def is_set(self, key: str) -> bool:
        """Whether a key that is there is not null."""
        return self._data[key] is not None

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self._data[key]
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def whole(self, key: str, *, at_least: int = 1) -> int:
        """An integer of at least `at_least`."""
        value = self._data[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(key, "an integer")
        if value < at_least:
            raise self.refusal(key, f"at least {at_least}")
        return value

    def number(self, key: str, *, above: float = 0.0) -> float:
        """A finite number above `above`."""
        value = self._data[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "a number")
        if not above < value < float("inf"):
            raise self.refusal(key, f"a finite number above {above:g}")
        return float(value)

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        """A list of `length` zeros and ones."""
        value = self._data[key]
        if not isinstance(value, list) or len(value) != length:
            raise self.refusal(key, f"a list of {length} zeros and ones")
        if any(isinstance(flag, bool) or flag not in (0, 1) for flag in value):
            raise self.refusal(key, f"a list of {length} zeros and ones")
        return tuple(flag == 1 for flag in value)

    def one_of(self, key: str, names: Collection[str]) -> str:
        """A string out of `names`."""
        value = self._data[key]
        if not isinstance(value, str) or value not in names:
            raise self.refusal(key, f"one of {', '.join(sorted(names))}")
        return value

    def inner(self, key: str) -> Mapping[str, Any]:
        """An object, to be made a Section of."""
        value = self._data[key]
        if not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return value

    def pin(self, values: Mapping[str, Any]) -> None:
        """Refuses keys, where present, whose value is not the only one this code computes."""
        for key, expected in values.items():
            if key in self._data and not _same(self._data[key], expected):
                raise self.refusal(key, f"{json.dumps(expected)}, the only supported value")

    def refusal(self, key: str, expected: str) -> StartupError:
        """The error for a value that was not `expected`."""
        shown = json.dumps(self._data[key])
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return StartupError(f"{self._name}.{key} is {shown}, expected {expected}")


def _same(value: Any, expected: Any) -> bool:
    # true must not pass for 1, while 7 and 7.0 are the same number
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _plural(keys: list[str]) -> str:
    return "key" if len(keys) == 1 else "keys"


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice")
        result[key] = value
    return result
