"""Follows the storages behind tensors: which are alive, how large, since when. Shared by capture and dry runs.

A storage is followed by a weak reference, so what is seen are the lifetimes that a real run has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts, in reading order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storage_key(tensor: Tensor) -> int:
    """Names the tensor's storage as long as that lives."""
    return tensor.untyped_storage()._cdata


class Timeline:
    """Bytes alive over time, counted from storages as they are made, resized and dropped."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        """(storage number, bytes gained or lost)."""
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage, followed from now on; None when it was followed already."""
        storage = tensor.untyped_storage()
        return None if storage._cdata in self._numbers else self._follow(storage)

    def resized(self, storage: Any) -> int | None:
        """Takes note of a storage's new size; its number when it was not followed before."""
        number = self._numbers.get(storage._cdata)
        if number is None:
            return self._follow(storage)
        change = storage.nbytes() - self._sizes[number]
        self._sizes[number] += change
        self.events.append((number, change))
        return None

    def _follow(self, storage: Any) -> int:
        key, number = storage._cdata, len(self.events)
        self._numbers[key], self._sizes[number] = number, storage.nbytes()
        self.events.append((number, self._sizes[number]))

        def freed(_: Any) -> None:
            self.events.append((number, -self._sizes.pop(number, 0)))
            self._numbers.pop(key, None)
            self._references.pop(number, None)

        self._references[number] = weakref.ref(storage, freed)
        return number

    def number(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage, None when it is not followed."""
        return self._numbers.get(storage_key(tensor))

    def holds(self, key: int) -> bool:
        """Whether a storage is followed, and alive."""
        return key in self._numbers

    def peak(self, start: int, stop: int, without: frozenset[int] = frozenset()) -> int:
        """Most bytes alive within events [start, stop) beyond those at `start`, storages in `without` left out."""
        alive = highest = 0
        for number, change in self.events[start:stop]:
            if number not in without:
                alive += change
                highest = max(highest, alive)
        return highest

    def stop(self) -> None:
        """Follows nothing any more."""
        self._references.clear()
        self._numbers.clear()
        self._sizes.clear()
