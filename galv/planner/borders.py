"""Between units: what it costs that neighbours lay their activation differently, and what a stage sends to the next."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from galv.cost_models.communication import p2p_seconds
from galv.cost_models.transitions import ActivationLayout, transition_seconds
from galv.cost_models.unit import Degrees, FactsPricer, Outer
from galv.planner.graph import ModelGraph
from galv.planner.space import Candidate, is_block, skip

Border = tuple[ActivationLayout, float]
"""How a unit's activation lies, and the bytes of one sample of what it gives to the next unit."""


def border_of(shared: FactsPricer, unit_class: str, degrees: Degrees) -> Border:
    """The border of a unit class under `degrees`. What ends the model gives nothing on; it counts as what it takes."""
    graph = shared.graph
    layout = ActivationLayout.of(degrees, is_block=is_block(graph, unit_class))
    ends = graph.units[-1].unit_class == unit_class and graph.counts[unit_class] == 1 and len(graph.units) > 1
    return layout, shared.sample_bytes(graph.units[-2].unit_class if ends else unit_class)


def transitions(
    shared: FactsPricer, candidate: Candidate, ids: Mapping[Border, int]
) -> dict[tuple[int, int], tuple[float, float]]:
    """(forward, backward) seconds per microbatch between borders, by their `ids`.

    Where an activation goes past its neighbour, all units must lay it alike.
    """
    samples = candidate.outer.global_batch / candidate.outer.num_microbatches
    alike = skip(shared.graph) is not None
    found = {}
    for (before, a), (after, b) in product(ids.items(), repeat=2):
        if a != b and not (alike and before[0] != after[0]):
            size = samples * before[1]
            found[a, b] = transition_seconds(before[0], after[0], size, candidate.num_devices, shared.network)
    return found


def border_seconds(
    shared: FactsPricer, outer: Outer, num_devices: int, unit_class: str, degrees: Mapping[str, Degrees]
) -> tuple[float, float]:
    """(forward, backward) seconds per microbatch that a unit around the blocks pays for both of its borders.

    For plans in which all units of a class have the same `degrees`. Blocks pay nothing: their neighbours are like them,
    or pay.
    """
    graph = shared.graph
    if is_block(graph, unit_class):
        return 0.0, 0.0
    names = [unit.unit_class for unit in graph.units]
    place, forward, backward = names.index(unit_class), 0.0, 0.0
    for left, right in ((place - 1, place), (place, place + 1)):
        if left < 0 or right == len(names) or (left == place and not is_block(graph, names[right])):
            continue
        before, after = (border_of(shared, names[i], degrees[names[i]]) for i in (left, right))
        size = before[1] * outer.global_batch / outer.num_microbatches
        there, back = transition_seconds(before[0], after[0], size, num_devices, shared.network)
        forward, backward = forward + there, backward + back
    return forward, backward


def sent_bytes(graph: ModelGraph, output_bytes: Mapping[str, float]) -> float:
    """What a stage sends of a microbatch, given what a unit of each class puts out: the most that any block does.

    An embedding that is alone on its stage is taken to send as much.
    """
    blocks = [size for name, size in output_bytes.items() if is_block(graph, name)]
    return max(blocks or output_bytes.values())


def send_seconds(shared: FactsPricer, candidate: Candidate, activation_bytes: float) -> float:
    """Seconds to send one microbatch's activation, `activation_bytes` on a device, to the next stage."""
    if candidate.outer.pp == 1:
        return 0.0
    return p2p_seconds(activation_bytes + _carried_bytes(shared, candidate), candidate.num_devices, shared.cluster)


def _carried_bytes(shared: FactsPricer, candidate: Candidate) -> float:
    """The most that a cut sends beside the largest tensor that crosses it: skips, an encoder's output."""
    graph, most = shared.graph, 0.0
    if all(edge.consumers[-1] == edge.producer + 1 for edge in graph.edges):
        return most
    ranks = 1 if candidate.uniform is None else candidate.uniform.num_ranks
    samples = -(-candidate.outer.global_batch * ranks // (candidate.outer.num_microbatches * candidate.num_devices))
    for border in range(1, len(graph.units)):
        sizes = [edge.num_bytes(samples) for edge in graph.edges if edge.crosses(border)]
        most = max(most, sum(sizes) - max(sizes, default=0.0))
    return most
