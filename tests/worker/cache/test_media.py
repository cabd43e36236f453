"""What the media ledger promises, keeps and evicts."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.cache.media import MediaClaim, MediaLedger, media_key
from m3stack.types import MediaItem, MediaKind, PatchFormat, Span

ITEM = MediaItem(MediaKind.IMAGE, b"h" * 32, (1, 8, 10), 1, (Span(3, 20),), None)
FORMAT = PatchFormat((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 3, 14, 2, 2)


def claim(name: int, size: int = 10) -> MediaClaim:
    return MediaClaim(bytes([name]), size)


def test_key_covers_all_that_decides_the_features_and_nothing_else() -> None:
    variants = [
        media_key(ITEM, FORMAT),
        media_key(dataclasses.replace(ITEM, media_hash=b"i" * 32), FORMAT),
        media_key(dataclasses.replace(ITEM, kind=MediaKind.VIDEO), FORMAT),
        media_key(dataclasses.replace(ITEM, grid_thw=(1, 10, 8)), FORMAT),
        media_key(dataclasses.replace(ITEM, frames_per_patch=2), FORMAT),
        media_key(ITEM, dataclasses.replace(FORMAT, mean=(0.1, 0.2, 0.4))),
        media_key(ITEM, dataclasses.replace(FORMAT, std=(0.4, 0.5, 0.7))),
        media_key(ITEM, dataclasses.replace(FORMAT, merge_size=1)),
    ]
    assert len(set(variants)) == len(variants)
    elsewhere = dataclasses.replace(ITEM, spans=(Span(90, 20),), patches=b"x")
    assert media_key(elsewhere, FORMAT) == variants[0]


def test_item_is_held_once_encoded_and_while_room_lasts() -> None:
    ledger = MediaLedger(25)
    assert ledger.reserve([claim(1)]) == (False,)
    assert ledger.reserve([claim(1)]) == (False,), "promised is not held"
    ledger.mark_encoded(b"\x01")
    ledger.release([b"\x01", b"\x01"])
    assert ledger.reserve([claim(1), claim(2)]) == (True, False)
    ledger.mark_encoded(b"\x02")
    ledger.release([b"\x01", b"\x02"])
    assert ledger.reserve([claim(3)]) == (False,)
    assert ledger.take_evicted() == [b"\x01"], "the least recently used goes"
    assert ledger.take_evicted() == []


def test_pinned_items_are_never_evicted() -> None:
    ledger = MediaLedger(20)
    ledger.reserve([claim(1)])
    ledger.mark_encoded(b"\x01")
    assert ledger.reserve([claim(2), claim(3)]) is None
    assert ledger.is_encoded(b"\x01")
    assert ledger.take_evicted() == []
    ledger.release([b"\x01"])
    assert ledger.reserve([claim(2), claim(3)]) == (False, False)


def test_refused_reservation_pins_and_evicts_nothing() -> None:
    ledger = MediaLedger(20)
    ledger.reserve([claim(1)])
    ledger.mark_encoded(b"\x01")
    ledger.release([b"\x01"])
    ledger.reserve([claim(2)])
    assert ledger.reserve([claim(1), claim(3)]) is None
    assert ledger.num_pinned == 1
    assert ledger.take_evicted() == []
    assert ledger.reserve([claim(1)]) == (True,)


def test_item_named_twice_in_a_request_is_booked_once_and_pinned_twice() -> None:
    ledger = MediaLedger(10)
    assert ledger.reserve([claim(1), claim(1)]) == (False, False)
    ledger.mark_encoded(b"\x01")
    ledger.release([b"\x01"])
    assert ledger.reserve([claim(2)]) is None
    ledger.release([b"\x01"])
    assert ledger.reserve([claim(2)]) == (False,)


def test_item_never_encoded_is_forgotten_with_its_last_pin() -> None:
    ledger = MediaLedger(10)
    ledger.reserve([claim(1)])
    ledger.release([b"\x01"])
    assert ledger.booked_bytes == 0
    assert ledger.take_evicted() == []


def test_release_wakes_who_waits() -> None:
    calls: list[int] = []
    ledger = MediaLedger(10)
    ledger.on_release(lambda: calls.append(ledger.booked_bytes))
    ledger.reserve([claim(1)])
    ledger.release([b"\x01"])
    assert calls == [0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5)), max_size=60))
@settings(deadline=None)
def test_any_use_keeps_the_budget_and_every_promise(calls: list[tuple[int, int, int]]) -> None:
    ledger = MediaLedger(30)
    pins: list[list[bytes]] = []
    features: set[bytes] = set()
    promised: list[bytes] = []
    for kind, first, second in calls:
        if kind == 0:
            claims = [claim(name, 4 + 3 * name) for name in {first, second}]
            held = ledger.reserve(claims)
            if held is not None:
                pins.append([c.key for c in claims])
                promised += [c.key for c, is_held in zip(claims, held, strict=True) if is_held]
        elif kind == 1 and pins:
            features -= set(ledger.take_evicted())
            for key in pins[first % len(pins)]:
                if not ledger.is_encoded(key):
                    features.add(key)
                    ledger.mark_encoded(key)
        elif kind == 2 and pins:
            keys = pins.pop(first % len(pins))
            ledger.release(keys)
            promised = [key for key in promised if any(key in group for group in pins)]
        features -= set(ledger.take_evicted())
        assert ledger.booked_bytes <= 30
        assert set(promised) <= features
        assert {key for key in map(lambda n: bytes([n]), range(6)) if ledger.is_encoded(key)} == (
            features
        )
