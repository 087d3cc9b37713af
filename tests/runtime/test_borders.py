"""What goes between units of different degrees arrives right, whatever it is and wherever its samples lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from galv.errors import ModelError
from galv.planner.capture.glue import trace_glue
from galv.planner.plan import InputSpec, Plan, Stage, Strategy, TensorParallelLayout, Unit
from galv.runtime.borders import UNIT, with_borders
from galv.runtime.module import ParallelModule
from galv.runtime.parallelize import parallelize
from galv.runtime.sized_glue import SizedGlue, sized
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, leaves, random_batch
from tests.runtime.test_unlike_units import FOUR, MIXED, ONE, TWO, plan_of

pytestmark = pytest.mark.slow

TIME, WIDTH, SAMPLES = 3, 4, 8


class Block(nn.Module):
    """Takes a mask beside its activation, and notes a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawn = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if not hidden.is_meta:
            self.drawn = float(torch.rand(()))
        return hidden + self.linear(hidden).masked_fill(mask.t().unsqueeze(-1), 0.0)


class Crossing(nn.Module):
    """Samples along the second dim, a table for all samples, masks, a skip connection and a second loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.table, self.last = nn.Linear(WIDTH, WIDTH), nn.Embedding(TIME, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        table = self.table(torch.arange(TIME, device=x.device))
        hidden = skip = self.first(x)
        hidden = nn.functional.dropout(hidden + table.unsqueeze(1), self.dropout)
        size = hidden.square().mean()
        for block in self.blocks:
            hidden = nn.functional.dropout(block(hidden, mask.logical_not()), self.dropout)
        output = self.last(hidden * skip.sigmoid() + table.unsqueeze(1))
        return nn.functional.mse_loss(output, y) + 0.1 * size


UNITS = {
    "embedding": ("first", "table"),
    "block0": ("blocks.0",),
    "block1": ("blocks.1",),
    "head": ("last",),
}


def batch_of(num_samples: int) -> dict[str, Tensor]:
    """Made-up inputs, the same for the same samples."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(TIME, SAMPLES, WIDTH, generator=generator) for _ in range(2))
    mask = torch.rand(SAMPLES, TIME, generator=generator) < 0.5
    return {"x": x[:, :num_samples], "mask": mask[:num_samples], "y": y[:, :num_samples]}


def crossing_plan(strategies: list[Strategy], cut: int | None = None) -> Plan:
    """`Crossing` with these strategies for its units; at a tensor axis every rank does the same."""
    base = hand_made_plan(
        MODELS["llama"](2),
        strategies,
        stages=None if cut is None else (cut, 4 - cut),
        schedule="none" if cut is None else "gpipe",
        layouts=[
            TensorParallelLayout(unit_class=kind, degree=tp, sequence="none", modules=())
            for kind in ("embedding", "block", "head")
            for tp in (2, 4)
        ],
    )
    units = [
        unit.model_copy(update={"modules": names}) for unit, names in zip(base.units(), UNITS.values(), strict=True)
    ]
    cuts = (units,) if cut is None else (units[:cut], units[cut:])
    dims = {"x": 1, "mask": 0, "y": 1}
    inputs = tuple(
        InputSpec(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."), batch_dim=dim)
        for (name, value), dim in zip(batch_of(2).items(), dims.values(), strict=True)
    )
    model = base.model.model_copy(update={"tied": (), "inputs": inputs})
    stages = tuple(Stage(units=tuple(part)) for part in cuts)
    return Plan.model_validate(base.model_copy(update={"stages": stages, "model": model}).model_dump())


def crossing_module(plan: Plan, dropout: float = 0.0) -> ParallelModule:
    """`Crossing` under a plan."""
    model = Crossing(dropout)

    def glue(num_samples: int) -> fx.GraphModule:
        return trace_glue(model, [name for names in UNITS.values() for name in names], batch_of(num_samples))

    return parallelize(model, plan, glue=glue)


def step(plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the weights after one update."""
    module = crossing_module(plan)
    loss = float(module.train_step(module.shard_batch(batch_of(SAMPLES))))
    module.optimizer("sgd", lr=0.5).step()
    return loss, module.full_state_dict()


ORDERS = {
    "fewer": [FOUR, TWO, ONE, ONE],
    "more": [ONE, TWO, FOUR, FOUR],
    "to and fro": [TWO, FOUR, ONE, TWO],
}


@pytest.mark.parametrize(
    ("order", "cut"), [("fewer", None), ("more", None), ("to and fro", None), ("to and fro", 2), ("fewer", 1)]
)
def test_all_kinds_of_values_cross(pool: Pool, order: str, cut: int | None) -> None:
    """Loss and update equal those of one device: gathered and cut samples, shared values, means."""
    model = Crossing()
    loss = model(**batch_of(SAMPLES))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()

    plan = crossing_plan(ORDERS[order], cut)
    ranks = pool.run(step, plan.num_devices, plan)
    assert [found for found, _ in ranks] == pytest.approx([float(loss.detach())] * plan.num_devices, rel=1e-5)
    torch.testing.assert_close(ranks[0][1], {k: v.detach() for k, v in model.state_dict().items()})


# ----------------------------------------------------------------------------------------------- random numbers


def drawn(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """The numbers that the two blocks drew, and this rank's weights after a few updates with dropout."""
    module = crossing_module(plan, dropout=0.2)
    update = module.optimizer("sgd", lr=0.5)
    for _ in range(3):
        module.train_step(module.shard_batch(batch_of(SAMPLES)))
        update.step()
        update.zero_grad()
    blocks = [block for block in module.modules() if isinstance(block, Block)]
    return [block.drawn for block in blocks], module.full_state_dict(all_ranks=True)


def test_random_numbers_follow_the_samples(pool: Pool) -> None:
    """Ranks draw alike in a unit exactly where they have the same samples there, hence keep the same weights."""
    plan = crossing_plan([TWO, FOUR, TWO, ONE])
    ranks = pool.run(drawn, 4, plan)
    in_groups_of_one, in_pairs = ([numbers[block] for numbers, _ in ranks] for block in (0, 1))
    assert len(set(in_groups_of_one)) == 4
    assert in_pairs[0] == in_pairs[1] != in_pairs[2] == in_pairs[3]
    for _, weights in ranks[1:]:
        torch.testing.assert_close(weights, ranks[0][1], rtol=0, atol=1e-6)
    assert [numbers for numbers, _ in pool.run(drawn, 4, plan)] == [numbers for numbers, _ in ranks]


# ----------------------------------------------------------------------------------------------- the traced forward


def llama_glue(num_samples: int) -> fx.GraphModule:
    """The forward of a small Llama around its units."""
    model = MODELS["llama"]()
    return trace_glue(model, leaves(model), random_batch(num_samples, 0))


def test_sizes_are_those_of_a_trace() -> None:
    """Constants and values for another number of samples are what a trace of that many has."""
    two_sizes, traced = SizedGlue(llama_glue(2), llama_glue(4), 2, 4), llama_glue(6)
    for node, other in list(zip(two_sizes.graph.nodes, traced.graph.nodes, strict=True))[:-1]:
        value = two_sizes.value(node, 6)
        assert (None if value is None else value.shape) == getattr(other.meta["val"], "shape", None)
        constants = fx.node.map_arg(two_sizes.arguments(node, 6), lambda _: None)
        assert constants == fx.node.map_arg((tuple(other.args), dict(other.kwargs)), lambda _: None)


def test_units_redistribute_what_they_take() -> None:
    """Each redistribution runs with the unit that needs it; what follows from inputs is computed for each degree."""
    name, strategies, options = MIXED["every unit another"]
    plan = plan_of(name, strategies, **options)
    graph = with_borders(sized(llama_glue, plan), plan).graph
    moved = [
        node
        for node in graph.nodes
        if node.target.__class__.__name__ == "function" and "borders" in str(node.target.__module__)
    ]
    assert [node.meta[UNIT] for node in moved if node.meta["grad"]] == [1, 2, 3, 4]
    assert [node.meta["val"].shape[0] for node in moved if node.meta["grad"]] == [1, 2, 1, 4]


def test_one_size_serves_one_degree() -> None:
    """A graph for one number of samples cannot be resized; the degrees are named."""
    name, strategies, options = MIXED["every unit another"]
    with pytest.raises(ModelError, match="degrees 1, 2, 4, so its traced forward"):
        sized(llama_glue(2), plan_of(name, strategies, **options))


class Mixer(nn.Module):
    """Gives its head rows in which the samples take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).transpose(0, 1).reshape(-1, WIDTH)
        return self.last(rows).square().mean()


def test_samples_in_turns_are_refused() -> None:
    """Rows that are no runs of samples cannot be shared out, and the message says so."""
    model, plan = Mixer(), plan_of("llama", [TWO, FOUR, FOUR, FOUR, FOUR])
    units = [
        Unit(name=name, unit_class=name, modules=(module,), strategy=strategy)
        for name, module, strategy in (("embedding", "first", TWO), ("head", "last", FOUR))
    ]
    plan = plan.model_copy(update={"stages": (Stage(units=tuple(units)),)})

    def glue(num_samples: int) -> Any:
        return trace_glue(model, ["first", "last"], {"x": torch.randn(num_samples, TIME, WIDTH)})

    with pytest.raises(ModelError, match="do not lie in a row"):
        with_borders(sized(glue, plan), plan)
