"""The layout algebra of a plan, with real collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from galv.errors import RunError
from galv.planner.plan import Layout, ModuleLayout, Redistribution, TensorParallelLayout
from galv.runtime.randomness import ShardRegions
from galv.runtime.tensor_parallel import apply_tensor_parallel, cut, joined, redistributor, with_activation
from galv.runtime.ties import Ties
from tests.distributed_pool import Pool

SHAPE = (2, 12, 12)
GATHER, REDUCE, SCATTER = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"
# What each change may cost: collectives forward, collectives backward.
ALGEBRA: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("R", "R+"): ([], [REDUCE]),
    ("S1", "R+"): ([GATHER], [SCATTER]),
    ("S0", "R+"): ([GATHER], [SCATTER]),
    ("P", "R"): ([REDUCE], []),
    ("P", "R+"): ([REDUCE], [REDUCE]),
    ("P", "S1"): ([SCATTER], [GATHER]),
    ("S2", "R"): ([GATHER], []),
    ("R", "S2"): ([], [GATHER]),
    ("R", "P"): ([], []),
    ("S2x3", "R"): ([GATHER], []),
    ("S2x3", "R+"): ([GATHER], [SCATTER]),
    ("R", "S2x3"): ([], [GATHER]),
    ("P", "S2x3"): ([SCATTER], [GATHER]),
    ("S1x2", "S2x3"): ([GATHER], [GATHER]),
}


def pieces(full: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """What `rank` holds of a value under a layout; summands are unequal."""
    if layout.kind == "P":
        shares = torch.arange(1, degree + 1, dtype=full.dtype)
        return full * (shares[rank] / shares.sum())
    return cut(full, layout, degree, rank).clone()


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a value with that layout lies: R+ has summands, P has it everywhere."""
    kinds = {"R+": "P", "P": "R"}
    return layout.model_copy(update={"kind": kinds.get(layout.kind, layout.kind)})


def move(source: str, target: str) -> dict[str, object]:
    """What one rank sees of a redistribution: the results, what they should be, and the collectives."""
    rank, degree = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
    change = Redistribution.model_validate({"source": source, "target": target})
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    local = pieces(value, change.source, rank, degree).requires_grad_()
    with CommDebugMode() as forward:
        moved = redistributor(mesh)(local, change)
    with CommDebugMode() as backward:
        moved.backward(pieces(gradient, gradient_layout(change.target), rank, degree))
    assert local.grad is not None
    return {
        "value": (_whole(moved.detach(), change.target), pieces(value, _plainly(change.target), rank, degree)),
        "gradient": (local.grad, pieces(gradient, gradient_layout(change.source), rank, degree)),
        "collectives": (_names(forward), _names(backward)),
    }


def _plainly(layout: Layout) -> Layout:
    return layout if layout.kind == "S" else Layout(kind="R")


def _whole(moved: Tensor, layout: Layout) -> Tensor:
    if layout.kind == "P":
        dist.all_reduce(moved)
    return moved


def _names(mode: CommDebugMode) -> list[str]:
    counts = Counter({str(key).rsplit(".", 1)[-1]: count for key, count in mode.get_comm_counts().items()})
    return sorted(counts.elements())


@pytest.mark.parametrize("change", ALGEBRA, ids=">".join)
def test_changes_of_layout(pool: Pool, change: tuple[str, str]) -> None:
    """Values and gradients arrive in the layouts that the pair promises, by its collectives and no others."""
    for seen in pool.run(move, 2, *change):
        for name in ("value", "gradient"):
            found, expected = seen[name]
            torch.testing.assert_close(found, expected)
        assert seen["collectives"] == ALGEBRA[change]


def move_across_dims() -> tuple[Tensor, Tensor]:
    """S1 to S2, and what it should be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    value = torch.arange(2.0 * 4 * 6).view(2, 4, 6)
    part = cut(value, Layout.parse("S1"), mesh.size(), mesh.get_local_rank())
    moved = redistributor(mesh)(part, Redistribution.model_validate({"source": "S1", "target": "S2"}))
    return moved, cut(value, Layout.parse("S2"), mesh.size(), mesh.get_local_rank())


def test_shards_move_to_another_dim(pool: Pool) -> None:
    """S to S along another dim exchanges the parts."""
    for moved, expected in pool.run(move_across_dims, 2):
        torch.testing.assert_close(moved, expected)


class Tokens(nn.Module):
    """Puts a trained token in front of others and adds two trained tables to all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, 1, 4))
        self.places, self.kinds = nn.Parameter(torch.ones(1, 3, 4)), nn.Parameter(torch.ones(1, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        """One token more, for one sample."""
        return torch.cat((self.first, x), 1) + self.places + self.kinds


def accumulated(samples: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of all samples, one after the other, under tensor parallelism over the last dim."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cut_last = Redistribution.model_validate({"source": "S2", "target": "S2"})
    part = ModuleLayout(
        module="",
        parameters=dict.fromkeys(("first", "places", "kinds"), cut_last),
        inputs={"0": Redistribution.model_validate({"source": "R", "target": "S2"})},
        outputs={"0": Redistribution.model_validate({"source": "S2", "target": "R"})},
    )
    layout = TensorParallelLayout(unit_class="tokens", degree=2, sequence="none", modules=(part,))
    model = Tokens()
    regions = ShardRegions(torch.device("cpu"), mesh.get_local_rank())
    apply_tensor_parallel(model.get_submodule, layout, mesh, Ties(model), regions)
    for sample in samples:
        model(sample).square().sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


def test_gradients_of_one_sample_do_not_share_storage(pool: Pool) -> None:
    """Where nothing is summed over samples, gradients of several parameters are one tensor or parts of it."""
    samples = [torch.full((1, 2, 4), float(value)) for value in (1, 2, 3)]
    alone = Tokens()
    for sample in samples:
        alone(sample).square().sum().backward()

    for found in pool.run(accumulated, 2, samples):
        torch.testing.assert_close(found, {name: p.grad for name, p in alone.named_parameters()})


def cut_unevenly() -> str:
    """The message for a sequence that does not divide."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    change = Redistribution.model_validate({"source": "P", "target": "S1"})
    try:
        redistributor(mesh)(torch.zeros(2, 5, 4), change)
    except RunError as error:
        return str(error)
    return ""


def test_uneven_activations_are_refused(pool: Pool) -> None:
    """A sequence that does not divide is named with the degree that it should divide by."""
    for message in pool.run(cut_unevenly, 2):
        assert "length 5 is no multiple of 2" in message


@pytest.mark.parametrize("layout", ["R", "S0", "S1", "S1x3", "S0x2"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_cut_parts_join_to_the_whole(layout: str, degree: int) -> None:
    """Every rank's part, side by side, is the full tensor again, chunked layouts included."""
    spec = Layout.parse(layout)
    full = torch.arange(24.0 * 24).view(24, 24)
    parts = [cut(full, spec, degree, rank) for rank in range(degree)]

    whole = parts[0] if spec.dim is None else joined(torch.cat(parts, spec.dim), spec, degree)

    assert torch.equal(whole, full)
    assert all(part.numel() * (degree if spec.kind == "S" else 1) == full.numel() for part in parts)


def test_a_chunked_part_holds_its_share_of_every_chunk() -> None:
    """Cut as q|k|v, the second of two ranks holds the second half of each."""
    full = torch.arange(12.0)
    assert cut(full, Layout.parse("S0x3"), 2, 1).tolist() == [2, 3, 6, 7, 10, 11]


def test_the_activation_is_found() -> None:
    """It is the first positional tensor; by keyword it is `hidden_states` or the first floating-point tensor."""
    hidden, mask = torch.zeros(1), torch.zeros(1, dtype=torch.bool)

    def changed(*args: Tensor, **kwargs: Tensor) -> object:
        return with_activation(args, kwargs, lambda tensor: tensor + 1)

    assert changed(hidden, mask=mask) == ((torch.ones(1),), {"mask": mask})
    assert changed(mask=mask, x=hidden) == ((), {"mask": mask, "x": torch.ones(1)})
    assert changed(other=hidden, hidden_states=hidden) == ((), {"other": hidden, "hidden_states": torch.ones(1)})
    with pytest.raises(RunError, match="without a tensor"):
        changed(mask=mask)
