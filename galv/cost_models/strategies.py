"""What a unit class costs under many strategies at once: arrays over (row, recompute).

A row says everything of a strategy but what is recomputed. Communication of the data axes and copies to the host run
beside computation, and only what sticks out counts ("exposed"); both are slowed while they run together. Of two that
run beside the same computation, the longer one counts. All exposure of the galv runtime is decided in `_Times`.

First and last microbatch differ: what zero 0 and 1 reduce hides behind the last backward only, what zero 1 and 2
gather behind the first forward only. The model's first unit has nothing to hide behind: no unit computes before its
forward and none after its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from galv.cost_models.data_parallel import DataCost, Sharing, data_cost
from galv.cost_models.host import host_link_seconds
from galv.cost_models.memory import FP32_BYTES, Passing, passing
from galv.cost_models.unit import Degrees, FactsPricer, Outer, PricedFacts, UnitCost, WorkingBytes, exposed_array
from galv.cost_models.weight_gradients import factor_bytes
from galv.planner.plan import Offload, Recompute, Strategy


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy but for what it recomputes."""

    degrees: Degrees
    sharing: Sharing
    offload: tuple[Offload, ...] = ()


@lru_cache(maxsize=1 << 16)
def strategy_of(row: Row, recompute: Recompute) -> Strategy:
    """The strategy of a row with `recompute`."""
    return Strategy(
        tp=row.degrees.tp,
        sequence=row.degrees.sequence,
        cp=row.degrees.cp,
        ep=row.degrees.ep,
        dp_shard=row.sharing.dp_shard,
        dp_replicate=row.sharing.dp_replicate,
        zero=row.sharing.zero,
        recompute=recompute,
        offload=row.offload,
    )


FIGURES = (
    "forward_compute",
    "forward_exposed",
    "backward_compute",
    "backward_exposed",
    "step_exposed",
    "update",
    "weight",
    "state_bytes",
    "activation_bytes",
    "working_bytes",
)


@dataclass(frozen=True)
class ClassCosts:
    """The costs of one unit class: `figures[name][row, recompute]`, for each of `FIGURES`. Seconds and bytes."""

    rows: tuple[Row, ...]
    recomputes: tuple[Recompute, ...]
    figures: Mapping[str, np.ndarray]
    data: tuple[DataCost, ...]
    """Of each row."""
    priced: tuple[PricedFacts, ...]
    """Of each row."""
    loss_is_apart: bool
    """See `WorkingBytes`."""

    def strategy(self, row: int, recompute: int) -> Strategy:
        return strategy_of(self.rows[row], self.recomputes[recompute])

    def with_exposed(self, forward_seconds: float | np.ndarray, backward_seconds: float | np.ndarray) -> ClassCosts:
        """The same with so much more communication in every forward and backward: for all rows, or (rows, 1)."""
        more = {"forward_exposed": forward_seconds, "backward_exposed": backward_seconds}
        return replace(self, figures={name: values + more.get(name, 0.0) for name, values in self.figures.items()})

    def cost(self, row: int, recompute: int) -> UnitCost:
        """The cost of one strategy."""
        at = {name: float(self.figures[name][row, recompute]) for name in FIGURES}
        level, data, priced = self.recomputes[recompute], self.data[row], self.priced[row]
        return UnitCost(
            strategy=self.strategy(row, recompute),
            forward_compute_seconds=at["forward_compute"],
            forward_exposed_seconds=at["forward_exposed"],
            backward_compute_seconds=at["backward_compute"],
            backward_exposed_seconds=at["backward_exposed"],
            step_exposed_seconds=at["step_exposed"],
            optimizer_seconds=at["update"],
            states=data.states,
            activation_bytes=at["activation_bytes"],
            working_bytes=at["working_bytes"],
            weight_seconds=at["weight"],
            factor_bytes=factor_bytes(priced.facts, level),
            working=WorkingBytes(
                forward_bytes=priced.forward_working_bytes(level) + _in_transit(self.rows[row], priced, level),
                backward_bytes=priced.backward_working_bytes(level) + _in_transit(self.rows[row], priced, level),
                passing=data.passing,
                loss_is_apart=self.loss_is_apart,
            ),
        )


def class_costs(
    shared: FactsPricer,
    unit_class: str,
    outer: Outer,
    rows: Sequence[Row],
    recomputes: Sequence[Recompute],
    *,
    tied_copy: bool = False,
    ddp: bool = False,
) -> ClassCosts:
    """The costs of `unit_class` under every row, each of which must exist for it.

    `tied_copy` leaves out parameters that another unit already holds; `ddp` says that DistributedDataParallel runs the
    whole plan.
    """
    priced = tuple(shared.priced(unit_class, row.degrees, _microbatch(outer, row)) for row in rows)
    data = tuple(_data_cost(shared, unit_class, outer, row, tied_copy, ddp) for row in rows)
    alone = shared.graph.units[0].unit_class == unit_class and len(shared.graph.units) > 1
    times = _Times(shared, rows, recomputes, priced, data, alone)
    apart = _loss_is_apart(shared, unit_class)
    beside = [_neighbours(shared, unit_class, row, outer) for row in rows]
    figures = times.figures() | _byte_figures(rows, recomputes, priced, data, beside, apart)
    return ClassCosts(tuple(rows), tuple(recomputes), figures, data, priced, apart)


def _microbatch(outer: Outer, row: Row) -> int:
    samples = outer.microbatch(row.sharing.dp)
    assert samples is not None, (outer, row)
    return samples


def _data_cost(shared: FactsPricer, unit_class: str, outer: Outer, row: Row, tied_copy: bool, ddp: bool) -> DataCost:
    parameters = shared.local_parameters(unit_class, row.degrees, tied_copy=tied_copy)
    key = (parameters, row, outer.num_microbatches > 1, outer.precision, outer.optimizer, ddp)
    found = shared.data_costs.get(key)
    if found is None:
        found = data_cost(parameters, row.degrees, row.sharing, row.offload, outer, shared.network, ddp=ddp)
        shared.data_costs[key] = found
    return found


# ----------------------------------------------------------------------------------------------- seconds


class _Times:
    """The seconds of one unit class; arrays are (rows, 1) or (rows, recomputes)."""

    def __init__(
        self,
        shared: FactsPricer,
        rows: Sequence[Row],
        recomputes: Sequence[Recompute],
        priced: Sequence[PricedFacts],
        data: Sequence[DataCost],
        alone: bool,
    ) -> None:
        self.data, self.alone = data, alone
        own = np.array(
            [(p.forward_seconds, p.backward_seconds, p.forward_sent_seconds, p.backward_sent_seconds) for p in priced]
        )
        again = np.array([[p.again[level] for level in recomputes] for p in priced])
        self.forward, backward, self.forward_sent, backward_sent = (column[:, None] for column in own.T)
        self.backward = backward + again[:, :, 0]
        self.backward_sent = backward_sent + again[:, :, 1]
        self.weight = np.array([[p.weight_seconds[level] for level in recomputes] for p in priced])
        self.copied = np.array([_copied_seconds(shared, r, p, recomputes) for r, p in zip(rows, priced, strict=True)])
        self.copy_slowdown = np.full((len(rows), 1), shared.cluster.device.overlap.between("compute", "host"))

    def figures(self) -> dict[str, np.ndarray]:
        data = np.array(
            [
                (
                    d.forward_seconds,
                    d.backward_seconds,
                    d.first_forward_seconds,
                    d.last_backward_seconds,
                    d.update_seconds,
                    d.slowdown,
                )
                for d in self.data
            ]
        )
        forward, backward, first, last, update, slowdown = (column[:, None] for column in data.T)
        each_forward = self._exposed(self.forward, forward, slowdown)
        each_backward = self._exposed(self.backward, backward, slowdown)
        step = self._exposed(self.forward, forward + first, slowdown) - each_forward
        step = step + self._exposed(self.backward, backward + last, slowdown) - each_backward
        zero = 0 * self.backward
        return {
            "forward_compute": self.forward + zero,
            "forward_exposed": self.forward_sent + np.maximum(each_forward, self._copies(self.forward)),
            "backward_compute": self.backward,
            "backward_exposed": self.backward_sent + np.maximum(each_backward, self._copies(self.backward)),
            "step_exposed": step,
            "update": update + zero,
            "weight": np.minimum(self.weight, self.backward),
        }

    def _exposed(self, compute: np.ndarray, communication: np.ndarray, slowdown: np.ndarray) -> np.ndarray:
        if self.alone:
            return np.asarray(communication + 0 * compute)
        return exposed_array(compute, communication, slowdown)

    def _copies(self, compute: np.ndarray) -> np.ndarray:
        return exposed_array(compute, self.copied, self.copy_slowdown)


def _copied_seconds(shared: FactsPricer, row: Row, priced: PricedFacts, recomputes: Sequence[Recompute]) -> list[float]:
    """Seconds to copy a microbatch's activations to the host, or back, at each level of recomputation."""
    if "activations" not in row.offload:
        return [0.0] * len(recomputes)
    return [host_link_seconds(priced.activation_bytes(level), shared.cluster) for level in recomputes]


# ----------------------------------------------------------------------------------------------- bytes


def _loss_is_apart(shared: FactsPricer, unit_class: str) -> bool:
    last = shared.graph.units[-1]
    return last.unit_class == unit_class and shared.graph.counts[unit_class] == 1


def _neighbours(shared: FactsPricer, unit_class: str, row: Row, outer: Outer) -> tuple[float, float]:
    """(gathered parameters of the unit before, reduction input of the one after), the largest, if they do as this one.

    Those that no unit of the class stands next to are left out.
    """
    sides = shared.neighbours[unit_class]
    before, after = (max((_size(shared, name, row.degrees) for name in side), default=0.0) for side in sides)
    found = passing(before, zero=row.sharing.zero, dp_shard=1, precision=outer.precision)
    return found.gathered_bytes, FP32_BYTES * after


def _size(shared: FactsPricer, unit_class: str, degrees: Degrees) -> float:
    """Parameters of a unit on one rank, cut as a neighbour is where it can be."""
    ways = (degrees, Degrees(degrees.tp, degrees.sequence if degrees.cp == 1 else "none"), Degrees())
    way = next(way for way in ways if shared.exclusion(unit_class, way) is None)
    return shared.local_parameters(unit_class, way, tied_copy=unit_class in shared.tied_classes)[0]


def _byte_figures(
    rows: Sequence[Row],
    recomputes: Sequence[Recompute],
    priced: Sequence[PricedFacts],
    data: Sequence[DataCost],
    beside: Sequence[tuple[float, float]],
    apart: bool,
) -> dict[str, np.ndarray]:
    """States, activations and working bytes: the most of a unit's points in `memory_timeline`, activations taken off.

    `beside` is what neighbours have there at the same time, of each row.
    """
    facts = {
        id(p): [(p.activation_bytes(r), p.forward_working_bytes(r), p.backward_working_bytes(r)) for r in recomputes]
        for p in priced
    }
    kept, forward, backward = np.moveaxis(np.array([facts[id(p)] for p in priced]), 2, 0)
    states = np.array([d.states.total_bytes for d in data])[:, None]
    leaves = np.array(["activations" in row.offload for row in rows])[:, None]
    windows = [_windows(d.passing, *near, apart) for d, near in zip(data, beside, strict=True)]
    ahead, back, reduced = (column[:, None] for column in np.array(windows).T)
    held = np.where(leaves, 0.0, kept)
    working = np.maximum(np.maximum(forward + ahead, backward + back), reduced - held)
    return {
        "state_bytes": states + 0 * kept,
        "activation_bytes": held,
        "working_bytes": working + np.where(leaves, 2 * kept, 0.0),
    }


def _windows(own: Passing, before_bytes: float, after_bytes: float, apart: bool) -> tuple[float, float, float]:
    """What parameters and gradients on their way take beside forward, beside backward, and after it."""
    share = 1.0 if not own.accumulates else own.output_bytes / own.input_bytes if own.input_bytes else 0.0
    beside = own.gathered_bytes + before_bytes + share * after_bytes
    if own.accumulates:
        reduced = max(own.fresh_bytes, own.input_bytes)
    else:
        reduced = own.fresh_bytes + own.input_bytes + own.output_bytes
    after = max(before_bytes + reduced, beside + own.fresh_bytes)
    if apart:
        return own.buffer_bytes, 0.0, after
    return own.gathered_bytes + own.buffer_bytes, beside, after


def _in_transit(row: Row, priced: PricedFacts, recompute: Recompute) -> float:
    """Offloaded activations that are on the device for the moment: of this unit, and of the one that came or comes."""
    return 2 * priced.activation_bytes(recompute) if "activations" in row.offload else 0.0
