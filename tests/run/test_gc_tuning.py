"""When the cyclic garbage collector looks while a run is on."""

import asyncio
import gc
import sys
import weakref
from typing import Any

import pytest

from rollwright.run import gc_tuning
from rollwright.run.gc_tuning import growth, no_collections, rare_collections, short_collections


class Loop:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def test_a_large_process_may_grow_by_more_before_it_is_looked_at() -> None:
    assert growth(0) == growth(100_000) == gc_tuning.LEAST_GROWTH
    assert growth(9_000_000) == 3_000_000


def test_nothing_is_collected_while_very_much_ends() -> None:
    began: list[str] = []

    def note(phase: str, info: Any) -> None:
        began.append(phase)

    gc.callbacks.append(note)
    try:
        with no_collections():
            kept = [Loop() for _ in range(100_000)]
            collections = len(began)
        more = [Loop() for _ in range(10)]
        assert (collections, len(kept), gc.isenabled()) == (0, 100_000, True)
        assert not began, f"nor by the first {len(more)} objects after it"
    finally:
        gc.callbacks.remove(note)


def test_cycles_from_while_very_much_ended_are_found_later_and_frozen_objects_stay_frozen() -> None:
    with no_collections():
        lost = weakref.ref(Loop())
    assert lost() is not None
    gc.collect()
    assert lost() is None
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with no_collections():
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def test_what_was_set_before_is_set_again() -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    with rare_collections():
        assert gc.get_threshold()[0] >= gc_tuning.LEAST_GROWTH
        with rare_collections():
            pass
        assert gc.get_threshold()[0] >= gc_tuning.LEAST_GROWTH
    assert (gc.get_threshold(), list(gc.callbacks)) == before


def test_as_long_as_as_much_ends_as_begins_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def look(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            looks.append(info["generation"])

    monkeypatch.setattr(gc_tuning, "LEAST_GROWTH", 20_000)
    monkeypatch.setattr(gc_tuning, "BLOCKS_PER_GROWTH", 10**9)
    with rare_collections():
        held: list[list[int]] = [[n] for n in range(10_000)]
        gc.callbacks.append(look)
        try:
            for number in range(200_000):
                held[number % len(held)] = [number]
            assert looks == []
            held += [[n] for n in range(30_000)]
            assert looks != []
        finally:
            gc.callbacks.remove(look)


def test_cycles_that_make_the_process_grow_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "LEAST_GROWTH", 2_000)
    monkeypatch.setattr(gc_tuning, "BLOCKS_PER_GROWTH", 10**9)
    with rare_collections():
        there = [weakref.ref(Loop()) for _ in range(20_000)]
        alive = sum(each() is not None for each in there)
        assert alive < 10_000


def test_a_servers_look_is_at_what_is_new_however_much_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(len(gc.get_objects()))

    monkeypatch.setattr(gc_tuning, "LEAST_GROWTH", 5_000)
    before = gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()
    with short_collections(whole=False):
        gc.callbacks.append(look)
        try:
            held = [[n] for n in range(100_000)]
        finally:
            gc.callbacks.remove(look)
    assert len(held) == 100_000
    assert len(seen) > 10
    assert max(seen) < 8_000
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == before


async def test_a_server_finds_cycles_that_ended_after_a_look_once_it_has_grown_to_twice_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc_tuning, "LEAST_GROWTH", 5_000)
    gc.collect()
    with short_collections(whole=True):
        old = Loop()
        gone = weakref.ref(old)
        held = [[n] for n in range(10_000)]
        assert gc.get_freeze_count() > 10_000
        del old
        assert gone() is not None
        blocks = sys.getallocatedblocks()
        while sys.getallocatedblocks() < 2 * blocks + 20_000:
            held += [[n] for n in range(10_000)]
        await asyncio.sleep(0)
        assert gone() is None
    assert held


def test_a_server_finds_new_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_tuning, "LEAST_GROWTH", 2_000)
    with short_collections(whole=False):
        first = weakref.ref(Loop())
        held = [[n] for n in range(5_000)]
        assert first() is None
    assert held
