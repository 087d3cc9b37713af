"""What units cost under any strategy: conservation, what is exposed, what the data axes hold and send."""

from __future__ import annotations

import pytest

from galv.cost_models.communication import collective_seconds, mesh_group
from galv.cost_models.data_parallel import Sharing
from galv.cost_models.strategies import Row, class_costs
from galv.cost_models.unit import Degrees, FactsPricer, Outer, UnitCost, exposed_seconds
from galv.planner.plan import Precision, Recompute
from galv.planner.space import EVERYTHING, Candidate, recompute_levels, rows
from galv.profiles.cluster import ClusterProfile, load_cluster
from tests.planner.decoder import decoder

NODE = load_cluster("h100-sxm-80:8x1")
NODES = load_cluster("h100-sxm-80:8x4")


def outer(num_microbatches: int = 4, global_batch: int = 64, precision: Precision = "bf16") -> Outer:
    return Outer(1, num_microbatches, global_batch, precision, "adamw")


def cost(
    row: Row,
    cluster: ClusterProfile = NODE,
    recompute: Recompute = "none",
    shared: Outer | None = None,
    unit_class: str = "Block",
    **model: int | bool,
) -> UnitCost:
    """The cost of one block of a decoder with attention."""
    pricer = FactsPricer(decoder(attention=True, **model), cluster)  # type: ignore[arg-type]
    return class_costs(pricer, unit_class, shared or outer(), [row], [recompute]).cost(0, 0)


def zero(level: int, shard: int, replicate: int = 1) -> Row:
    return Row(Degrees(), Sharing(shard, replicate, level))


# ----------------------------------------------------------------------------------------------- conservation


def test_twice_the_tokens_are_twice_the_matmul_flops() -> None:
    """Whatever their layout."""
    source = decoder().source
    for layout in (None, source.layout("Block", 2, "megatron")):
        one, two = (source.facts("Block", layout, n) for n in (1, 2))  # type: ignore[arg-type]
        assert two.forward_flops == 2 * one.forward_flops
        assert two.backward_flops == 2 * one.backward_flops


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_a_context_axis_of_two_halves_computation_and_activations(mode: str) -> None:
    """At the same samples of a microbatch, up to what kernels lose on smaller shapes; states stay as they are."""
    wide = {"seq_len": 16384, "hidden": 8192, "num_heads": 64}
    alone = cost(Row(Degrees(), Sharing(1, 4, 0)), shared=outer(4, 64), **wide)
    halved = cost(Row(Degrees(1, mode, 2), Sharing(1, 4, 0)), shared=outer(4, 64), **wide)  # type: ignore[arg-type]

    assert halved.compute_seconds == pytest.approx(alone.compute_seconds / 2, rel=0.03)
    assert halved.activation_bytes == alone.activation_bytes / 2
    assert halved.states.optimizer_bytes == alone.states.optimizer_bytes
    assert halved.exposed_seconds > alone.exposed_seconds


def test_bytes_over_bandwidth_are_seconds() -> None:
    """A reduce-scatter of a block's fp32 gradients takes at least their bytes at the link's rate."""
    row = zero(2, 8)
    pricer = FactsPricer(decoder(), NODE)
    found = class_costs(pricer, "Block", outer(), [row], ["none"]).data[0]
    parameters = 12 * 1024**2

    least = 4 * parameters * 7 / 8 / NODE.intra_node.bytes_per_second
    assert least < found.backward_seconds < 10 * least


def faster(cluster: ClusterProfile, **what: float) -> ClusterProfile:
    """`cluster` with links or memory so many times faster."""
    links = {
        name: getattr(cluster, name).model_copy(
            update={"bytes_per_second": getattr(cluster, name).bytes_per_second * what.get(name, 1.0)}
        )
        for name in ("intra_node", "inter_node")
    }
    memory = cluster.device.memory_bytes_per_second * what.get("memory", 1.0)
    device = cluster.device.model_copy(update={"memory_bytes_per_second": memory})
    return cluster.model_copy(update={**links, "device": device})


@pytest.mark.parametrize("what", ["intra_node", "inter_node", "memory"])
def test_nothing_gets_slower_on_faster_hardware(what: str) -> None:
    """No strategy of any class of a mixture of experts, with links or memory three times as fast."""
    graph, candidate = decoder(attention=True, experts=8), Candidate(outer(2, 128), 32, None, EVERYTHING)
    slow, fast = FactsPricer(graph, NODES), FactsPricer(graph, faster(NODES, **{what: 3.0}))
    for name in graph.classes:
        found = rows(slow, candidate, name)
        levels = recompute_levels(graph, name)
        before, after = (class_costs(p, name, candidate.outer, found, levels).figures for p in (slow, fast))
        assert len(found) > 20
        # What overlaps may be shifted from one phase to another: together they never take longer.
        for parts in (("forward_compute", "forward_exposed"), ("backward_compute", "backward_exposed"), ("update",)):
            assert (sum(after[p] for p in parts) <= sum(before[p] for p in parts) * (1 + 1e-12)).all()


# ----------------------------------------------------------------------------------------------- the data axes


def test_states_by_level() -> None:
    """What zero shards falls with the ranks that shard it; replicas change nothing."""
    whole, sharded, hybrid = (cost(row).states for row in (zero(0, 1, 8), zero(3, 8), zero(3, 4, 2)))

    assert sharded.optimizer_bytes == whole.optimizer_bytes / 8
    assert hybrid.optimizer_bytes == whole.optimizer_bytes / 4
    assert sharded.parameters_bytes < hybrid.parameters_bytes < whole.parameters_bytes


def test_ranks_of_a_context_axis_shard_states_as_well() -> None:
    """Zero 3 over two data ranks with four context ranks each holds an eighth."""
    whole = cost(zero(0, 1, 8)).states.optimizer_bytes

    assert cost(Row(Degrees(1, "ulysses", 4), Sharing(2, 1, 3))).states.optimizer_bytes == whole / 8
    assert cost(Row(Degrees(1, "ulysses", 8), Sharing(1, 1, 1))).states.optimizer_bytes == whole / 8


def test_hybrid_sharding_keeps_gathers_inside_the_node() -> None:
    """Over four nodes, zero 3 within each is quicker per microbatch than over all, and pays once a step instead."""
    over_all, within = (cost(row, NODES, shared=outer(4, 128), hidden=4096) for row in (zero(3, 32), zero(3, 8, 4)))

    assert within.exposed_seconds < over_all.exposed_seconds
    assert within.step_exposed_seconds > 0.0 == over_all.step_exposed_seconds


def test_zero_1_reduces_once_and_zero_2_every_microbatch() -> None:
    """The same bytes: once a step behind the last backward, or in each."""
    one, two = cost(zero(1, 8)), cost(zero(2, 8))

    assert one.backward_exposed_seconds == 0.0 < two.backward_exposed_seconds
    assert one.step_exposed_seconds == pytest.approx(two.step_exposed_seconds + two.backward_exposed_seconds)


def test_the_first_unit_has_nothing_to_hide_behind() -> None:
    """All of the embedding's gradient reduction is exposed, though a block hides most of its own."""
    pricer = FactsPricer(decoder(), NODE)
    costs = class_costs(pricer, "embedding", outer(), [zero(0, 1, 8)], ["none"])

    whole = collective_seconds("all_reduce", 4 * 32000 * 1024, mesh_group(NODE, stride=1, size=8), NODE)
    assert costs.cost(0, 0).step_exposed_seconds == pytest.approx(whole)


def test_experts_are_reduced_over_fewer_ranks() -> None:
    """Shared out over all eight data ranks, experts have no gradient to reduce, and a rank holds an eighth of them."""
    model = {"experts": 8}
    together = cost(Row(Degrees(), Sharing(1, 8, 0)), **model)
    shared_out = cost(Row(Degrees(ep=8), Sharing(1, 8, 0)), **model)

    assert shared_out.states.total_bytes == together.states.total_bytes / 8
    assert shared_out.step_exposed_seconds == 0.0 < together.step_exposed_seconds
    assert shared_out.forward_exposed_seconds > together.forward_exposed_seconds


# ----------------------------------------------------------------------------------------------- the context axis


def test_a_ring_hides_behind_attention() -> None:
    """With long sequences keys and values travel for less time than attention takes; exchanged heads never hide."""
    wide = {"seq_len": 65536, "hidden": 4096, "num_heads": 32}
    ring, ulysses, alone = (
        cost(Row(degrees, Sharing(1, 1, 0)), shared=outer(1, 1), **wide)
        for degrees in (Degrees(1, "ring", 4), Degrees(1, "ulysses", 4), Degrees())
    )

    assert alone.forward_exposed_seconds == 0.0
    group = mesh_group(NODE, stride=1, size=4)
    message = 2 * 2 * 65536 / 4 * 4096
    sent = 3 * collective_seconds("p2p", message, group, NODE)
    assert 0 < ring.forward_exposed_seconds < sent
    assert ulysses.forward_exposed_seconds == pytest.approx(
        4 * collective_seconds("all_to_all", message / 2, group, NODE)
    )


def test_full_recompute_sends_again() -> None:
    """Forward's collectives are repeated in backward, and its computation; the ring not where attention is kept."""
    row = Row(Degrees(1, "ring", 4), Sharing(1, 2, 0))
    none, selective, full = (cost(row, recompute=level) for level in ("none", "selective", "full"))  # type: ignore[arg-type]

    assert full.backward_exposed_seconds == pytest.approx(none.backward_exposed_seconds + none.forward_exposed_seconds)
    assert full.backward_compute_seconds == pytest.approx(none.backward_compute_seconds + none.forward_compute_seconds)
    assert selective.backward_exposed_seconds == pytest.approx(none.backward_exposed_seconds)
    assert full.activation_bytes < selective.activation_bytes < none.activation_bytes


# ----------------------------------------------------------------------------------------------- the host


def test_offloaded_activations_leave_the_device_and_take_copies() -> None:
    """Nothing is kept; copies beside computation stick out where they take longer."""
    kept, left = (cost(Row(Degrees(), Sharing(1, 8, 0), what)) for what in ((), ("activations",)))

    assert left.activation_bytes == 0.0 < kept.activation_bytes
    assert left.working_bytes > kept.working_bytes
    assert left.forward_exposed_seconds > kept.forward_exposed_seconds
    assert left.states == kept.states


def test_an_optimizer_on_the_host_is_slower_and_smaller() -> None:
    """Its state leaves the device; with zero 3 the parameters can follow, which are then brought for every gather."""
    here, there, all_there = (
        cost(Row(Degrees(), Sharing(8, 1, 3), what), hidden=4096)
        for what in ((), ("optimizer",), ("optimizer", "parameters"))
    )

    assert (there.states.optimizer_bytes, all_there.states.total_bytes) == (0, 0)
    assert there.optimizer_seconds > here.optimizer_seconds
    assert all_there.exposed_seconds > there.exposed_seconds == here.exposed_seconds


def test_exposure_is_what_sticks_out() -> None:
    """Communication shorter than computation costs only the slowdown of both."""
    assert exposed_seconds(2.0, 1.0, 1.0) == 0.0
    assert exposed_seconds(2.0, 3.0, 1.0) == 1.0
    assert exposed_seconds(2.0, 1.0, 1.25) == pytest.approx(0.25)
