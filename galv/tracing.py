"""The model behind a request: traced, and ready to be priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from galv.arguments import check_patterns
from galv.errors import ModelError
from galv.planner.graph import ModelGraph
from galv.planner.reporter import Reporter
from galv.profiles.cluster import ClusterProfile

if TYPE_CHECKING:
    from torch import nn

    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture.source import ModelSource
    from galv.planner.space import Request


def captured(
    model: str | nn.Module | Callable[[], nn.Module],
    example_inputs: Any,
    cluster: ClusterProfile,
    request: Request,
    reporter: Reporter,
    units: Sequence[str] | None,
    opaque: Sequence[str],
) -> tuple[ModelSource, FactsPricer]:
    """The traced model, ready to be priced on `cluster`."""
    reporter.phase("tracing the model")
    check_patterns("units", units or ())
    check_patterns("opaque", opaque)
    from galv.cost_models.unit import FactsPricer
    from galv.planner.capture import capture
    from galv.planner.capture.source import resolve_model

    source = resolve_model(model, example_inputs, seq_len=request.seq_len)
    graph = capture(source, precision=request.precision, device_kind=cluster.device.kind, units=units, opaque=opaque)
    beside = [name for unit in graph.units for name in unit.parameters]
    if beside:
        raise ModelError(
            f"{', '.join(beside)} cannot be sharded: a parameter must lie in a module that one unit holds, and these "
            "lie directly in a module around several units; put them, and their use, into a module of their own"
        )
    return source, FactsPricer(graph, cluster)


_PRICERS: WeakKeyDictionary[Any, dict[ClusterProfile, FactsPricer]] = WeakKeyDictionary()


def pricer_of(graph: ModelGraph, cluster: ClusterProfile) -> FactsPricer:
    """What is already priced of `graph` on `cluster`, for as long as the graph lives."""
    from galv.cost_models.unit import FactsPricer

    known = _PRICERS.setdefault(graph.source, {})
    if cluster not in known:
        known[cluster] = FactsPricer(graph, cluster)
    return known[cluster]
