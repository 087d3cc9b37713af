"""Which sizes that are written into a model as constants must shrink for a call to run on a shard.

A call is known by its arguments when nothing is sharded (`Call`), by its arguments now, and by the shapes that its
results should have. Sizes that the model derives from the shapes of its tensors have shrunk by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from galv.planner.sharding.trace import Call
from galv.planner.sharding.watch import integers_in, shapes_in

Shape = tuple[int, ...]

_SIZES_ONLY = ("view", "reshape", "expand", "zeros", "ones", "full")


def local_sizes(
    call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Sequence[Shape], local: Sequence[Shape]
) -> dict[int, int]:
    """Among the call's integers by position: those to change for its results to have shapes `local`, not `whole`.

    Empty where nothing needs to change, and where no way to change it is known.
    """
    now = integers_in((args, kwargs))
    if len(now) != len(call.integers):
        return {}
    wanted = dict(_wanted(call, args, kwargs, now, whole, local))
    return {i: size for i, size in wanted.items() if now[i] not in (-1, size)}


def _wanted(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    now: tuple[int, ...],
    whole: Sequence[Shape],
    local: Sequence[Shape],
) -> Iterator[tuple[int, int]]:
    """The integers, by position, that a call should have."""
    function = call.site.function
    if function in ("__getitem__", "narrow"):
        yield from _cut_integers(call, args, kwargs)
    elif not local or list(whole) == list(local):
        return
    elif function in _SIZES_ONLY and len(now) == len(local[0]):
        yield from enumerate(local[0])
    elif function == "unflatten":
        dim = now[0] % (len(local[0]) - len(now) + 2)
        yield from enumerate(local[0][dim : dim + len(now) - 1], start=1)
    elif function in ("split", "split_with_sizes"):
        dim = next(i for i, (a, b) in enumerate(zip(whole[0], local[0], strict=True)) if a != b)
        listed = len(now) > len(local) and now[: len(local)] == tuple(shape[dim] for shape in whole)
        yield from enumerate(shape[dim] for shape in (local if listed else local[:1]))


def _cut_integers(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Where a part of a sharded dim is taken, the part's bounds."""
    before, after = call.shapes[0], shapes_in((args, kwargs))[0]
    for position, dim in _bounds(call, args, len(after)):
        degree = before[dim] // after[dim]
        bound = call.integers[position]
        if degree > 1 and bound % degree == 0:
            yield position, bound // degree


def _bounds(call: Call, args: tuple[Any, ...], rank: int) -> Iterator[tuple[int, int]]:
    """The positions of integers that bound a part of a dim, with that dim."""
    if call.site.function == "narrow":
        yield from ((position, call.integers[0] % rank) for position in (1, 2))
        return
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    position, dim = 0, 0
    for i, entry in enumerate(index):
        if entry is Ellipsis:
            dim = rank - sum(1 for later in index[i + 1 :] if later is not None)
            continue
        count = len(integers_in(entry))
        if isinstance(entry, slice):
            yield from ((position + j, dim) for j in range(count))
        position += count
        dim += entry is not None


def misplaced_bounds(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What is wrong with the bounds of a part that is taken of a sharded dim; "" if nothing.

    A wrong part can have the right shape, so shapes do not tell.
    """
    if call.site.function not in ("__getitem__", "narrow") or not isinstance(args[0], Tensor):
        return ""
    now, before, after = integers_in((args, kwargs)), call.shapes[0], shapes_in((args, kwargs))[0]
    if len(now) != len(call.integers):
        return "it has other arguments than when whole"
    for position, dim in _bounds(call, args, len(after)):
        if now[position] * before[dim] != call.integers[position] * after[dim]:
            return f"{now[position]} of {after[dim]} is not the place of {call.integers[position]} of {before[dim]}"
    return ""
