"""What a user may ask for: units by pattern, and modules that are left untraced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from galv.errors import ModelError, UsageError
from galv.planner.capture import capture
from galv.planner.capture.glue import glue_for
from galv.planner.capture.source import resolve_model
from galv.planner.graph import ModelGraph
from galv.planner.plan import TensorParallelLayout
from galv.runtime.borders import with_borders
from galv.runtime.pipeline import build_stage
from galv.runtime.sized_glue import sized
from tests.families import graph_of, pipelined


class Picky(nn.Module):
    """Doubles its input when most of it is positive: what meta tensors cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return 2 * x if (x > 0).float().mean() > 0.5 else x


class Chooser(nn.Module):
    """A chain with one picky module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.picky, self.last = nn.Linear(8, 8), Picky(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.picky(torch.relu(self.first(x)))).mean()
        return out


def captured(**wishes: tuple[str, ...]) -> ModelGraph:
    return capture(resolve_model(Chooser, torch.zeros(4, 8)), precision="fp32", device_kind="cpu", **wishes)


def test_a_module_that_cannot_be_traced_is_named_with_the_way_out() -> None:
    """The message has the module, its line, the operator, and the option that treats it as opaque."""
    with pytest.raises(ModelError) as caught:
        captured()
    message = str(caught.value)
    assert "in module 'picky' (Picky)" in message
    assert f"{__file__}:" in message and "aten." in message
    assert "opaque=['picky'], --opaque picky" in message


def test_an_opaque_module_is_one_replicated_unit() -> None:
    """It is counted as one run on made-up values shows it, held whole at any tensor degree, and a note says so."""
    graph = captured(opaque=("picky",))
    assert [unit.name for unit in graph.units] == ["embedding", "opaque picky", "head"]
    name = graph.units[1].unit_class
    facts = graph.source.facts(name, None, 4)
    assert graph.classes[name].is_opaque and "picky is opaque" in graph.notes[0]
    assert (facts.forward_flops, facts.backward_flops) == (2 * 4 * 8 * 8, 4 * 4 * 8 * 8)
    layout = graph.source.layout(name, 2, "megatron")
    assert isinstance(layout, TensorParallelLayout)
    assert {str(c.source) for part in layout.modules for c in part.parameters.values()} == {"R"}


def test_a_model_with_an_opaque_module_is_cut_into_stages() -> None:
    """Its stages compute what the model does."""
    graph, model, x = captured(opaque=("picky",)), Chooser(), torch.randn(4, 8)
    plan = pipelined(graph, (1, 2), 4)
    glue = with_borders(sized(glue_for(model, plan), plan), plan)
    stages = [build_stage(model, plan, glue, i, torch.device("cpu")) for i in range(3)]
    (first,) = stages[0](x=x)
    (second,) = stages[1](first)
    assert torch.equal(stages[2](second), model(x))


def test_patterns_make_units(tmp_path: Path) -> None:
    """The modules that patterns match are the units; what is around them is embedding, bridge and head."""
    graph = graph_of("unet", tmp_path, units=("downs.*", "ups.*"))
    names = [unit.name for unit in graph.units]
    assert [name for name in names if name.startswith(("downs", "ups"))] == [
        *(f"downs.{i}" for i in range(3)),
        *(f"ups.{i}" for i in range(3)),
    ]
    assert names[3] == "bridge 1" and names[-1] == "head"
    assert graph.no_pipeline is None


def test_skips_are_edges(tmp_path: Path) -> None:
    """What a U-Net carries across its body crosses every cut between."""
    graph = graph_of("unet", tmp_path, units=("downs.*", "ups.*"))
    place = {unit.name: i for i, unit in enumerate(graph.units)}
    skip = next(e for e in graph.edges if e.producer == place["downs.0"] and e.consumers[-1] > place["ups.1"])
    assert skip.bytes_per_sample == 8 * 16 * 16 * 4
    below = [e for e in graph.edges if e.crosses(place["ups.0"])]
    assert {e.producer for e in below} == {place["downs.0"], place["downs.1"], place["bridge 1"]}
    assert graph.crossing_bytes(place["ups.0"], 3) == sum(e.num_bytes(3) for e in below)


@pytest.mark.parametrize("role", ["units", "opaque"])
def test_a_pattern_that_matches_nothing_is_refused(role: str) -> None:
    """The message names the pattern and some modules that there are."""
    with pytest.raises(UsageError, match=r"'layers.\*' matches no module.*it has first, picky"):
        captured(**{role: ("layers.*",)})


def test_two_towers_are_two_chains(tmp_path: Path) -> None:
    """The blocks of CLIP's two encoders are units of two lists, and both towers flow into the head."""
    graph = graph_of("clip", tmp_path)
    lists = {unit.name.rpartition(".")[0] for unit in graph.units if ".layers." in unit.name}
    assert lists == {"text_model.encoder.layers", "vision_model.encoder.layers"}
    last = len(graph.units) - 1
    assert {e.producer for e in graph.edges if last in e.consumers} >= {last - 1}
    assert any(last in e.consumers and e.producer < last - 1 for e in graph.edges)


def test_an_encoder_flows_to_every_decoder_block(tmp_path: Path) -> None:
    """T5's encoder output goes to each block of its decoder, and is carried across every cut between them."""
    graph = graph_of("t5", tmp_path)
    decoder = tuple(i for i, unit in enumerate(graph.units) if unit.name.startswith("decoder.block"))
    assert any(edge.consumers == decoder and graph.units[edge.producer].name == "bridge 1" for edge in graph.edges)
