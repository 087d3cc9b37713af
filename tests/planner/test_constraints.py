"""What users demand is read as it is meant, and what cannot be meant is refused by name."""

from __future__ import annotations

import pytest

from galv.errors import UsageError
from galv.planner.constraints import (
    PipelineChoice,
    UnitKind,
    matches,
    read_constraints,
    strategy_obstacle,
)
from galv.planner.plan import Strategy

BLOCK = UnitKind("model.layers.3", is_block=True, can_recompute=True, has_experts=False)
HEAD = UnitKind("head", is_block=False, can_recompute=False, has_experts=False)
DEEP = PipelineChoice(pp=8, schedule="interleaved", virtual_stages=4, num_microbatches=32)


def meets(text: str, strategy: Strategy, *, unit: UnitKind = BLOCK, microbatch: int = 1, forbid: bool = False) -> bool:
    constraints = read_constraints(forbid=[text]) if forbid else read_constraints([text])
    return strategy_obstacle(constraints.of_unit(unit), strategy, microbatch) is None


@pytest.mark.parametrize(
    "text, strategy, holds",
    [
        ("tp=8", Strategy(tp=8), True),
        ("tp=8", Strategy(tp=4), False),
        ("tp=2,4", Strategy(tp=4), True),
        ("tp<=4", Strategy(tp=8), False),
        ("tp", Strategy(), False),
        ("zero=2,3", Strategy(zero=2, dp_shard=2), True),
        ("zero>1", Strategy(zero=1, dp_shard=2), False),
        ("dp=4", Strategy(zero=1, dp_shard=2, dp_replicate=2), True),
        ("recompute!=full", Strategy(recompute="selective"), True),
        ("recompute", Strategy(), False),
        ("selective", Strategy(recompute="selective"), True),
        ("ring", Strategy(sequence="ring", cp=2), True),
        ("offload=optimizer", Strategy(offload=("activations", "optimizer")), True),
        ("offload=none", Strategy(), True),
        ("offload=none", Strategy(offload=("activations",)), False),
        ("offload!=optimizer", Strategy(offload=("activations", "optimizer")), False),
        (" tp = 2 ", Strategy(tp=2), True),
    ],
)
def test_a_demand_holds_or_not_and_forbidding_is_its_opposite(text: str, strategy: Strategy, holds: bool) -> None:
    """Each form of a demand against a strategy."""
    assert meets(text, strategy) == holds
    assert meets(text, strategy, forbid=True) != holds


def test_microbatches_are_of_the_unit() -> None:
    """The microbatch is not part of a strategy, but can be demanded."""
    assert meets("microbatch=2", Strategy(), microbatch=2)
    assert not meets("microbatch=2", Strategy(), microbatch=4)


def test_a_demand_without_units_is_about_those_that_have_the_choice() -> None:
    """The head cannot recompute; a demand for recomputation is not about it, one for a tensor degree is."""
    assert meets("recompute=full", Strategy(), unit=HEAD)
    assert not meets("tp=2", Strategy(), unit=HEAD)
    assert not meets("head:tp=2", Strategy(), unit=HEAD)
    assert meets("head:tp=2", Strategy(), unit=BLOCK)


def test_pipelines() -> None:
    """Demands on what the outer search chooses."""
    assert read_constraints(["pp=8", "interleaved", "virtual_stages>=2"]).allow_pipeline(DEEP)
    assert str(read_constraints(["pp<=4"]).pipeline_obstacle(DEEP)) == "--require pp<=4"
    assert not read_constraints(forbid=["schedule=interleaved,zbv"]).allow_pipeline(DEEP)
    assert not read_constraints(forbid=["pp"]).allow_pipeline(DEEP)


def test_patterns() -> None:
    """File-name patterns, and spans of numbers."""
    assert matches("model.layers.*", "model.layers.12")
    assert matches("model.layers.0-9", "model.layers.9")
    assert not matches("model.layers.0-9", "model.layers.10")
    assert matches("*.0-9", "model.layers.4")
    assert not matches("decoder.0-9", "encoder.4")
    assert not matches("layers.0-9", "head")


@pytest.mark.parametrize(
    "text, said",
    [
        ("tensor=8", "Known: cp, dp"),
        ("tp=many", "whole number"),
        ("recompute=sometimes", "Known: full, none, selective"),
        ("recompute<full", "compare it by = or !="),
        ("model.layers.*:pp=2", "of the whole plan"),
        ("tp=", "is no constraint"),
        ("none", "Known: "),
        ("", "is no constraint"),
    ],
)
def test_nonsense_is_refused(text: str, said: str) -> None:
    """One message that names what was given, status 2."""
    with pytest.raises(UsageError) as error:
        read_constraints([text])
    assert said in str(error.value)


def test_a_demand_about_nothing_is_refused() -> None:
    """A demand that no unit can meet or break is an error."""
    with pytest.raises(UsageError, match="no unit matches 'decoder"):
        read_constraints(["decoder.*:tp=2"]).check([BLOCK, HEAD])
    with pytest.raises(UsageError, match="no unit of this model has a choice of ep"):
        read_constraints(["ep=2"]).check([BLOCK, HEAD])
    read_constraints(["pp=2", "recompute"]).check([BLOCK, HEAD])
