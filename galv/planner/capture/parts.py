"""Cuts a model in which nothing repeats into parts: at single-tensor bottlenecks, then at borders of its modules.

A bottleneck is a value through which everything passes that flows from the inputs to the loss: it dominates the loss in
the graph of the modules and operators. Between two bottlenecks a large stretch (a U-Net's body, all of it spanned by
skip connections) is cut where one of the model's own larger modules ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import networkx as nx
from torch import fx

from galv.planner.capture.flow import backward_steps, positions_of

MOST_PARTS = 16
LARGE_SHARE = 0.25
"""A stretch between bottlenecks with more than this share of all modules is cut further."""

Part = tuple[str, ...]


def parts_of(graph: fx.Graph, weights: Mapping[str, float]) -> list[Part]:
    """The leaf modules of the glue `graph` in consecutive parts, in the order of execution.

    `weights` are the sizes of the leaves, in any measure: the smallest neighbours are joined while there are too many.
    """
    calls = [node for node in graph.nodes if node.op == "call_module"]
    leaves = list(dict.fromkeys(str(node.target) for node in calls))
    cuts = set(_bottleneck_cuts(graph, leaves))
    parts = [tuple(leaves[a:b]) for a, b in pairwise(sorted({0, len(leaves), *cuts}))]
    parts = [piece for part in parts for piece in _dependent(graph, _pieces(part, len(leaves)))]
    return _fewer(_in_order(graph, parts), weights)


def _bottleneck_cuts(graph: fx.Graph, leaves: Sequence[str]) -> list[int]:
    """How many leaves come before each bottleneck."""
    positions = positions_of(graph, {name: i for i, name in enumerate(leaves)})
    flow: nx.DiGraph = nx.DiGraph()
    for node, position in positions.items():
        if position is None:
            continue
        sources = [source for source in node.all_input_nodes if positions[source] is not None]
        flow.add_edges_from((source, node) for source in sources)
        if not sources:
            flow.add_edge("inputs", node)
    output = next(reversed(graph.nodes))
    if output not in flow:
        return []
    dominators = nx.immediate_dominators(flow, "inputs")
    found, node = [], dominators.get(output, "inputs")
    while node != "inputs":
        before = nx.ancestors(flow, node) | {node}
        names = {str(n.target) for n in before if n != "inputs" and n.op == "call_module"}
        found.append(max((leaves.index(name) + 1 for name in names), default=0))
        node = dominators[node]
    return found


def _pieces(part: Part, num_leaves: int) -> list[Part]:
    """A large part by the modules just below the one that holds all of it."""
    if len(part) < 2 or len(part) <= LARGE_SHARE * num_leaves:
        return [part]
    paths = [name.split(".") for name in part]
    depth = next(i for i in range(max(map(len, paths)) + 1) if len({tuple(path[: i + 1]) for path in paths}) > 1)
    keys = [_key(path, depth) for path in paths]
    return [
        tuple(name for name, _ in group) for _, group in groupby(zip(part, keys, strict=True), key=lambda pair: pair[1])
    ]


def _dependent(graph: fx.Graph, pieces: list[Part]) -> list[Part]:
    """Pieces joined so that each takes something from the one before: branches side by side are left together."""
    if len(pieces) < 2:
        return pieces
    makers = _makers(graph, {name: i for i, piece in enumerate(pieces) for name in piece})
    groups: list[list[int]] = [[0]]
    for i in range(1, len(pieces)):
        if makers[i] & set(groups[-1]):
            groups.append([i])
        else:
            groups[-1].append(i)
    return [tuple(name for i in group for name in pieces[i]) for group in groups]


def _makers(graph: fx.Graph, owners: Mapping[str, int]) -> dict[int, set[int]]:
    """For each piece, those whose results it takes, nothing but operators and other pieces in between."""
    reaching: dict[fx.Node, set[int]] = {}
    makers: dict[int, set[int]] = {i: set() for i in owners.values()}
    for node in graph.nodes:
        reached = set().union(*(reaching[source] for source in node.all_input_nodes))
        own = owners.get(str(node.target)) if node.op == "call_module" else None
        if own is not None:
            makers[own] |= reached
            reached |= {own}
        reaching[node] = reached
    return makers


def _key(path: Sequence[str], depth: int) -> tuple[str, ...]:
    """The path down to `depth`, and one step into a list of modules."""
    inner = path[depth + 1 : depth + 2]
    return tuple(path[: depth + 1]) + (tuple(inner) if inner and inner[0].isdigit() else ())


def _in_order(graph: fx.Graph, parts: list[Part]) -> list[Part]:
    """Parts joined until none needs a value from a later one."""
    while True:
        owners = {name: i for i, part in enumerate(parts) for name in part}
        steps = backward_steps(positions_of(graph, owners))
        if not steps:
            return parts
        _, first, last = steps[0]
        parts = [*parts[:first], tuple(name for part in parts[first : last + 1] for name in part), *parts[last + 1 :]]


def _fewer(parts: list[Part], weights: Mapping[str, float]) -> list[Part]:
    """At most `MOST_PARTS` parts: neighbours joined, the smallest together first."""
    parts = list(parts)
    while len(parts) > MOST_PARTS:
        sizes = [sum(weights.get(name, 0.0) for name in part) for part in parts]
        at = min(range(len(parts) - 1), key=lambda i: sizes[i] + sizes[i + 1])
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def part_names(parts: Sequence[Part]) -> list[str]:
    """A name for each part: the module that holds just it, else its number."""
    counts: dict[str, int] = {}
    commons = [_common(part) for part in parts]
    for common in commons:
        counts[common] = counts.get(common, 0) + 1
    return [f"part {c if c and counts[c] == 1 else i + 1}" for i, c in enumerate(commons)]


def _common(part: Part) -> str:
    paths = [name.split(".") for name in part]
    length = next((i for i, step in enumerate(zip(*paths, strict=False)) if len(set(step)) > 1), min(map(len, paths)))
    return ".".join(paths[0][:length])
