"""What flows between units: read off the glue, by the rules by which the runtime cuts it into stages.

A module runs with its unit. Operators between modules run as early as they can; what they compute from nothing but the
model's inputs flows nowhere, because every stage makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from galv.planner.graph import Edge

Positions = dict[fx.Node, int | None]


def positions_of(graph: fx.Graph, owners: Mapping[str, int]) -> Positions:
    """The position of the unit that each node runs with, None where any can; a module of none is left out of account.

    `owners` are the positions of modules and of parameters used between them.
    """
    positions: Positions = {}
    for node in graph.nodes:
        before = max((p for source in node.all_input_nodes if (p := positions[source]) is not None), default=None)
        if node.op in ("call_module", "get_attr") and str(node.target) in owners:
            positions[node] = owners[str(node.target)]
        else:
            positions[node] = 0 if before is None and _is_random(node) else before
    return positions


def backward_steps(positions: Positions) -> list[tuple[fx.Node, int, int]]:
    """(module call, its position, the later one that it needs a value from): what no order of units can carry out."""
    steps = []
    for node, position in positions.items():
        if node.op == "call_module" and position is not None:
            needed = max((p for source in node.all_input_nodes if (p := positions[source]) is not None), default=-1)
            if needed > position:
                steps.append((node, position, needed))
    return steps


def edges_of(positions: Positions, num_samples: int) -> tuple[Edge, ...]:
    """The edges between units, for values traced with `num_samples` samples; those alike in both ends are one."""
    sizes: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    fed: set[fx.Node] = set()
    for node, position in positions.items():
        if node.op == "placeholder" or any(source in fed for source in node.all_input_nodes):
            fed.add(node)
        value = node.meta.get("val")
        if position is None or not isinstance(value, Tensor):
            continue
        later = sorted({p for user in node.users if (p := positions[user]) is not None and p > position})
        if later:
            fixed_and_growing = sizes.setdefault((position, tuple(later)), [0.0, 0.0])
            fixed_and_growing[node in fed and _grows(value, num_samples)] += value.numel() * value.element_size()
    ordered = sorted(sizes.items())
    return tuple(Edge(p, later, growing / num_samples, fixed) for (p, later), (fixed, growing) in ordered)


def _grows(value: Tensor, num_samples: int) -> bool:
    """Whether a value that depends on the inputs is one for each sample: these are counted along its first dim."""
    return value.ndim > 0 and value.shape[0] % num_samples == 0


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def why_no_pipeline(graph: fx.Graph, owners: Mapping[str, int], units: Sequence[str]) -> str | None:
    """Why units in this order cannot be stages of a pipeline; None when they can."""
    for node, position, needed in backward_steps(positions_of(graph, owners)):
        return (
            f"module {node.target!r} of unit {units[position]!r} is called again on what the later unit "
            f"{units[needed]!r} computes"
        )
    return None
