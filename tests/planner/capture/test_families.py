"""Every family of models that is promised: its facts are those of a real run, and its stages compute what it does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from galv.planner.capture.glue import glue_for
from galv.planner.capture.skeleton import differentiable
from galv.planner.graph import ModelGraph, UnitFacts
from galv.runtime.borders import with_borders
from galv.runtime.pipeline import build_stage
from galv.runtime.sized_glue import sized
from tests.families import FAMILIES, graph_of, pipelined, real_batch, real_model

NUM_SAMPLES = 2
SEED = 3
aten = torch.ops.aten


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def graph(name: str, folder: Path) -> ModelGraph:
    """One graph for all tests of a family."""
    return graph_of(name, folder)


def facts(graph: ModelGraph) -> list[UnitFacts]:
    """The facts of every unit."""
    return [graph.source.facts(unit.unit_class, None, NUM_SAMPLES) for unit in graph.units]


# ----------------------------------------------------------------------------------------------- real runs


def _grouped(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    size = 2 * right[-1]
    for length in left:
        size *= length
    return size


MISSING = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(
        g, q, k, v
    ),
    aten._grouped_mm: _grouped,
}
"""What torch's counter takes for nothing: the CPU's fused attention (it knows the GPU's) and products of experts."""


class Saved:
    """Bytes that autograd saves beyond parameters and inputs, each storage once."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self.given = {self._key(tensor) for tensor in (*model.parameters(), *batch.values())}
        self.storages: dict[int, int] = {}

    def _key(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def pack(self, tensor: Tensor) -> Tensor:
        if self._key(tensor) not in self.given:
            self.storages[self._key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_facts_are_those_of_a_real_run(name: str, folder: Path) -> None:
    """FLOPs of both directions equal torch's counter, parameters the module's, saved bytes autograd's within 2 %."""
    found, model, batch = graph(name, folder), real_model(name, folder), real_batch(name, folder, NUM_SAMPLES)
    saved = Saved(model, batch)
    forward, backward = (FlopCounterMode(display=False, custom_mapping=MISSING) for _ in range(2))
    # oneDNN runs a whole LSTM as one operator, which the counter cannot see into.
    torch.backends.mkldnn.set_flags(_enabled=name != "lstm")
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor), forward:
            (loss,) = differentiable(model(**batch))
        with backward:
            loss.backward()
    finally:
        torch.backends.mkldnn.set_flags(_enabled=True)

    units = facts(found)
    assert sum(unit.forward_flops for unit in units) == forward.get_total_flops()
    assert sum(unit.backward_flops for unit in units) == backward.get_total_flops()
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    kept = sum(unit.saved_bytes + (unit.input_bytes if unit.input_is_saved else 0) for unit in units)
    assert kept == pytest.approx(sum(saved.storages.values()), rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_units_hold_every_parameter(name: str, folder: Path) -> None:
    """Each parameter of the model lies in one unit, tied ones in each that uses them."""
    found, model = graph(name, folder), real_model(name, folder)
    held = [
        parameter
        for unit in found.units
        for parameter in (
            *unit.parameters,
            *(
                f"{m}.{p}"
                for m in unit.modules
                for p, _ in model.get_submodule(m).named_parameters(remove_duplicate=False)
            ),
        )
    ]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


# ----------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_compute_what_the_model_computes(name: str, folder: Path) -> None:
    """The stages cut from the glue, one after the other, give the bit-equal loss and gradients of the whole model."""
    found, model, batch = graph(name, folder), real_model(name, folder), real_batch(name, folder, NUM_SAMPLES)
    assert found.no_pipeline is None
    count = len(found.units)
    cuts = tuple(sorted({count // 3, 2 * count // 3, count - 1} - {0}))
    plan = pipelined(found, cuts, NUM_SAMPLES)
    expected, gradients = trained(model, lambda: differentiable(model(**batch))[0])
    glue = with_borders(sized(glue_for(model, plan), plan), plan)
    stages = [build_stage(model, plan, glue, i, torch.device("cpu")) for i in range(len(plan.stages))]

    def piped() -> Tensor:
        crossing: Any = ()
        for stage in stages:
            crossing = stage(*crossing, **{key: batch[key] for key in stage.input_names})
            if not stage.is_last:
                wanted = [crossed.needs_grad for crossed in stage.crossings_out]
                assert [tensor.requires_grad for tensor in crossing] == wanted
                sent = sum(t.numel() * t.element_size() for t in crossing)
                border = sum(len(s.units) for s in plan.stages[: stage.stage_index + 1])
                assert sent == pytest.approx(found.crossing_bytes(border, NUM_SAMPLES), rel=1e-6)
        assert isinstance(crossing, Tensor)
        return crossing

    loss, own = trained(model, piped)
    assert torch.equal(loss, expected)
    assert gradients.keys() == own.keys()
    # A tensor that several stages use has its gradients summed in another order.
    assert all(torch.allclose(own[key], gradients[key], rtol=1e-4, atol=1e-6) for key in gradients)


def trained(model: nn.Module, forward: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss that `forward` computes, with dropout as ever, and the gradients that it leaves)."""
    model.zero_grad()
    torch.manual_seed(SEED)
    loss = forward()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
