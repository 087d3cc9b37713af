"""What a plan says of sequences that are cut over a context axis, and what it must not say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from galv.planner.plan import Layout, Plan, SequenceLayout, Strategy
from tests.layouts import llama_layouts
from tests.plans import hand_made_plan, tiny_llama

TP, RING = Strategy(tp=2), Strategy(cp=2, sequence="ring")
LAYOUTS = tuple(llama_layouts(2, "none"))


def _cut(**changes: Any) -> dict[str, Any]:
    layout = SequenceLayout(
        unit_class="block",
        mode="ring",
        degree=2,
        balanced=True,
        arguments={"0": (Layout(kind="S", dim=1),), "mask": (Layout(kind="R"),)},
        activation="0",
        output_dim=1,
        attention=("exchanged",),
    )
    return layout.model_dump() | changes


def _plan(strategies: Sequence[Strategy], *cuts: dict[str, Any]) -> Plan:
    """Embedding, three blocks and head of a tiny model."""
    data = hand_made_plan(tiny_llama(), [TP] * 5, layouts=LAYOUTS).model_dump()
    for unit, strategy in zip(data["stages"][0]["units"], strategies, strict=True):
        unit["strategy"] = strategy.model_dump()
    return Plan.model_validate(data | {"sequence_layouts": cuts})


def test_a_plan_carries_its_cuts() -> None:
    """Through its file, in its table, and by unit; the tensor axis has its own layouts beside them."""
    plan = _plan([TP, RING, RING, TP, TP], _cut())
    again = Plan.from_json(plan.to_json())

    assert again == plan
    assert "cp2 ring" in str(again)
    _, first, _, other, _ = again.units()
    cut = again.sequence_layout_of(first)
    assert cut is not None
    assert (cut.activation_cut.degree, cut.activation_cut.dim, cut.activation_cut.balanced) == (2, 1, True)
    assert again.layout_of(first) is None
    assert again.sequence_layout_of(other) is None


def test_rings_of_tensor_ranks_use_the_layout_of_whole_sequences() -> None:
    """The sequence mode of a context axis is none of the tensor axis."""
    both = Strategy(tp=2, cp=2, sequence="ring")
    data = hand_made_plan(tiny_llama(), [Strategy(tp=4)] * 5, layouts=llama_layouts(4, "none")).model_dump()
    data["stages"][0]["units"][1]["strategy"] = both.model_dump()
    data["layouts"] += tuple(layout.model_dump() for layout in LAYOUTS)
    plan = Plan.model_validate(data | {"sequence_layouts": [_cut()]})
    block = list(plan.units())[1]

    layout = plan.layout_of(block)
    assert layout is not None
    assert (layout.degree, layout.sequence) == (2, "none")


@pytest.mark.parametrize(
    ("strategies", "cuts", "message"),
    [
        ([TP, RING, TP, TP, TP], (), "unit block1: no sequence layout for ring over 2 ranks"),
        ([TP, Strategy(cp=2, sequence="ulysses"), TP, TP, TP], (_cut(),), "no sequence layout for ulysses over 2"),
        ([RING, TP, TP, TP, TP], (_cut(),), "unit embedding: cp 2; only repeated blocks"),
        ([TP, Strategy(cp=2), TP, TP, TP], (_cut(),), "unit block1: cp 2 with sequence 'none'"),
        ([TP, RING, TP, TP, TP], (_cut(), _cut()), "sequence_layouts: two layouts for"),
        ([TP, RING, TP, TP, TP], (_cut(activation="1"),), "the activation '1' must be S1"),
        ([TP, RING, TP, TP, TP], (_cut(output_dim=2),), "the activation '0' must be S2"),
        ([TP, RING, TP, TP, TP], (_cut(degree=1),), "sequence_layouts.0.degree"),
    ],
)
def test_what_cannot_be_is_refused(strategies: list[Strategy], cuts: tuple[dict[str, Any], ...], message: str) -> None:
    """By the plan itself, in words."""
    with pytest.raises(ValueError, match=message):
        _plan(strategies, *cuts)
