"""Which placements an operator can compute with, forward and backward, without moving anything between ranks.

From the correspondence of dims (`factors`) these kinds of choice follow, each sound for the gradients too:

* whole: every tensor R, or every tensor R+. The backward of any operator is linear in the gradient of its output, so
  from a summand of that gradient come summands of the inputs' gradients.
* cut: one factor is divided. Tensors in which it stands are S; other inputs are R+, because each rank uses them for its
  own share of the work; the output is P where the factor is summed over, and then what is added once is P as well.
* made: a tensor made from nothing, with one value everywhere, is cut along any dim.
* summands: P passes through an operator that is linear in it. Every rank meets the whole gradient of the output, so
  the gradient of a P input is whole as well, while other inputs see one summand of the work each: R+.

Where no gradient flows into a tensor, R and R+ are one and the same, spelled R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from galv.planner.sharding.factors import Dims, Factors
from galv.planner.sharding.place import PARTIAL, USED, WHOLE, Place, shard


class Rule(NamedTuple):
    """One way to compute an operator."""

    inputs: tuple[Place, ...]
    output: Place
    is_cut: bool = False
    """Whether each rank does 1/degree of the work."""


def settled(place: Place, differentiable: bool) -> Place:
    """`place` for a tensor into which a gradient flows, or does not."""
    return place if differentiable or place != USED else WHOLE


def rules(
    factors: Factors, given: Sequence[set[Place]], input_grads: Sequence[bool], output_grad: bool, degree: int
) -> list[Rule]:
    """The ways to compute an operator whose inputs can be had as `given`; the flags say where gradients flow."""
    found: dict[Rule, None] = {}
    for rule in (*_whole(factors), *_made(factors, degree), *_summands(factors), *_cuts(factors, given, degree)):
        inputs = tuple(settled(place, grad) for place, grad in zip(rule.inputs, input_grads, strict=True))
        if all(place in places for place, places in zip(inputs, given, strict=True)):
            found[Rule(inputs, settled(rule.output, output_grad), rule.is_cut)] = None
    return list(found)


def _whole(factors: Factors) -> Iterator[Rule]:
    for place in (WHOLE, USED):
        yield Rule((place,) * len(factors.inputs), place)


def _made(factors: Factors, degree: int) -> Iterator[Rule]:
    for dim, composed in enumerate(factors.output if factors.is_uniform else ()):
        if composed and factors.sizes[composed[0]] % degree == 0:
            yield Rule((), shard(dim), is_cut=True)


def _summands(factors: Factors) -> Iterator[Rule]:
    for together in factors.linear:
        yield Rule(tuple(PARTIAL if i in together else USED for i in range(len(factors.inputs))), PARTIAL)


def _cuts(factors: Factors, given: Sequence[set[Place]], degree: int) -> Iterator[Rule]:
    seen: dict[tuple[int, int], None] = {}
    for dims, places in zip(factors.inputs, given, strict=True):
        for place in sorted(places):
            if place.is_sharded:
                seen.update(dict.fromkeys(_factors_cut(factors, dims, place, degree)))
    for factor, chunks in seen:
        output = _place(factors, factors.output, factor, chunks)
        if output is None and factor not in factors.summed:
            continue
        inputs = tuple(_cut_input(factors, i, factor, chunks) for i in range(len(factors.inputs)))
        yield Rule(inputs, output or PARTIAL, is_cut=True)


def _cut_input(factors: Factors, i: int, factor: int, chunks: int) -> Place:
    rest = PARTIAL if i in factors.addends and factor in factors.summed else USED
    return _place(factors, factors.inputs[i], factor, chunks) or rest


def _factors_cut(factors: Factors, dims: Dims, place: Place, degree: int) -> Iterator[tuple[int, int]]:
    """The factors that `place` divides in a tensor with `dims`, each with the number of chunks that it is divided in.

    To divide the second of the factors (p f) is to divide f within each of p equal chunks of the dim.
    """
    slower = 1
    for factor in dims[place.dim]:
        chunks, rest = divmod(place.chunks, slower)
        size = factors.sizes[factor]
        if not rest and factor not in factors.fixed and chunks and size % (degree * chunks) == 0:
            yield factor, chunks
        slower *= size


def _place(factors: Factors, dims: Dims, factor: int, chunks: int) -> Place | None:
    """How a tensor with `dims` lies when `factor` is divided; None when the factor does not stand in it."""
    for i, dim in enumerate(dims):
        slower = 1
        for other in dim:
            if other == factor:
                return shard(i, slower * chunks)
            slower *= factors.sizes[other]
    return None
