"""What a setting's value must be: each gives what is expected, or None if it is good."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from typing import Any


def at_least(low: int) -> Callable[[Any], str | None]:
    return lambda value: None if value >= low else f"at least {low}"


def one_of(names: tuple[str, ...]) -> Callable[[Any], str | None]:
    return lambda value: None if value in names else f"one of {', '.join(names)}"


def anything(_: Any) -> str | None:
    return None


def fraction(value: float) -> str | None:
    return None if 0 < value <= 1 else "above 0 and at most 1"


def seconds(value: float) -> str | None:
    return None if 0 < value < math.inf else "a finite number above 0"


def drain(value: float) -> str | None:
    return None if 0 <= value < math.inf else "a finite number, 0 or more"


def first_steps(value: float) -> str | None:
    is_good = value == -1 or 0 <= value < math.inf
    return None if is_good else "-1 or a finite number, 0 or more"


def slowdown(value: float) -> str | None:
    is_good = value in (-1, 0) or 1 < value < math.inf
    return None if is_good else "-1, 0 or a number above 1"


def address(value: str) -> str | None:
    host, colon, port = value.rpartition(":")
    is_good = bool(host and colon and port.isascii() and port.isdigit() and int(port) <= 65535)
    return None if is_good else "host:port, for example 127.0.0.1:50051"


def address_or_off(value: str) -> str | None:
    return None if value == "off" or address(value) is None else "host:port or off"


def address_or_none(value: str) -> str | None:
    return None if value == "" or address(value) is None else "host:port"


def sources(value: str) -> str | None:
    is_good = all(_is_source(entry.strip()) for entry in value.split(",")) if value else True
    return None if is_good else "names, *.suffixes, addresses or networks, separated by commas"


def _is_source(entry: str) -> bool:
    if re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", entry):
        return True
    try:
        ipaddress.ip_network(entry)
    except ValueError:
        return False
    return True


def device(value: str) -> str | None:
    name, _, index = value.partition(":")
    is_good = value in ("auto", "cpu", "cuda") or (name == "cuda" and index.isdigit())
    return None if is_good else "auto, cpu, cuda or cuda:N"
