"""Plan files that were edited: each is refused with its place, or is a plan that prints."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from galv.planner.plan import MAX_DEVICES, MAX_GLOBAL_BATCH, DtypeName, Plan
from galv.profiles import cluster
from tests.planner.decoder import decoder
from tests.planner.test_planner import by_hand, request
from tests.plans import hand_made_plan, tiny_gpt2

Path = tuple[str | int, ...]

WRONG = (None, -1, 0, 1.5, 10**30, 1e308, float("nan"), float("inf"), "", "other", "4", True, [], {}, [{}], 10**400)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """A plan with a pipeline and tensor parallelism, as its file says it."""
    found = by_hand(decoder(num_layers=6, hidden=2048), "h100-sxm-80:8x1", request(), pp=4, tp=2, micro_batch=2)
    value: dict[str, Any] = json.loads(found.to_json())
    return value


def places(value: Any, path: Path = (), seen: set[Path] | None = None) -> Iterator[Path]:
    """Every kind of place in JSON data: of the items of a list, those places that the ones before it lack."""
    seen = set() if seen is None else seen
    kind = tuple("*" if isinstance(part, int) else part for part in path)
    if path and kind not in seen:
        seen.add(kind)
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key), seen)


def changed(data: dict[str, Any], path: Path, new: Any) -> str:
    """The file with `new` at `path`."""
    whole = copy.deepcopy(data)
    place: Any = whole
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = new
    return json.dumps(whole)


def test_any_wrong_value_anywhere_is_refused_or_prints(data: dict[str, Any]) -> None:
    """Whatever one place of a plan file is changed to, reading it raises ValueError, or the plan prints and is kept."""
    num_refused = 0
    found = list(places(data))
    for path in found:
        for new in WRONG:
            try:
                plan = Plan.from_json(changed(data, path, new))
            except ValueError:
                num_refused += 1
                continue
            assert str(plan)
            assert Plan.from_json(plan.to_json()) == plan

    assert len(found) > 100
    assert num_refused > 0.9 * len(found) * len(WRONG)


@pytest.mark.parametrize(
    ("place", "new", "message"),
    [
        ("training.num_microbatches", 0, "training.num_microbatches: .*greater than or equal to 1"),
        ("training.global_batch", -8, "training.global_batch: .*greater than or equal to 1"),
        ("training.global_batch", MAX_GLOBAL_BATCH * 2, f"training.global_batch: .*equal to {MAX_GLOBAL_BATCH}"),
        ("training.global_batch", "16", "training.global_batch: .*valid integer"),
        ("training.seq_len", 0, "training.seq_len: "),
        ("model.num_samples", 0, "model.num_samples: "),
        ("model.num_samples", 3, "tokens: dim 0 of .* holds no 3 samples"),
        ("model.inputs", [], "model.inputs: "),
        ("model.inputs.0.dtype", "int65", "model.inputs.0.dtype: .*'int64'"),
        ("model.inputs.0.batch_dim", 2, "model.inputs.0: batch_dim 2 of a tensor with 2 dims"),
        ("model.inputs.0.batch_dim", -1, "model.inputs.0.batch_dim: "),
        ("model.inputs.0.high", 0, "model.inputs.0.high: "),
        ("model.inputs.0.shape", [-2, 16], "model.inputs.0.shape.0: "),
        ("model.tied", [["nowhere.weight"]], "model.tied.0: no unit holds 'nowhere.weight'"),
        ("cluster.memory_budget_bytes", 0, "cluster.memory_budget_bytes: "),
        ("cluster.num_nodes", MAX_DEVICES + 1, f"cluster.num_nodes: .*{MAX_DEVICES}"),
        ("pipeline.schedule", "none", "pipeline: schedule 'none' for degree 4"),
        ("pipeline.degree", 0, "pipeline.degree: "),
        ("pipeline.virtual_stages", 2, "pipeline.virtual_stages: "),
        ("stages.0.units.0.name", "head", "two units are named 'head'"),
        ("stages.0.units.0.strategy.recompute", "full", "unit embedding cannot recompute"),
        ("layouts.0.unit_class", "other", "no layout for tp 2"),
        ("layouts.0.degree", 0, "layouts.0.degree: "),
        ("estimate.step_seconds", 0, "estimate.step_seconds: "),
        ("estimate.step_seconds", "NaN", "estimate.step_seconds: "),
        ("estimate.mfu", float("inf"), "estimate.mfu: "),
        ("estimate.peak_bytes", [1], "estimate.peak_bytes: 1 for 4 stages"),
        ("estimate.stages", [], "estimate.stages: 0 for 4 stages"),
        ("estimate.stages.1.units", [], "estimate.stages.1.units: 0 for "),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(data: dict[str, Any], place: str, new: Any, message: str) -> None:
    """The message names the place in the file and what may stand there."""
    path = tuple(int(part) if part.isdigit() else part for part in place.split("."))

    with pytest.raises(ValueError, match=message):
        Plan.from_json(changed(data, path, new))


def test_a_pipeline_of_one_has_no_schedule() -> None:
    """A schedule without a pipeline is refused as a pipeline without a schedule is."""
    with pytest.raises(ValueError, match="schedule 'gpipe' for degree 1"):
        hand_made_plan(tiny_gpt2(), schedule="gpipe")


def test_deep_nesting_is_no_plan() -> None:
    """Brackets without end are refused like any other text."""
    with pytest.raises(ValueError, match=r"nested too deeply|not complete JSON"):
        Plan.from_json("[" * 200_000)


@pytest.mark.parametrize("name", get_args(DtypeName))
def test_dtypes_are_torchs(name: str) -> None:
    """Every dtype that a plan may name is one."""
    assert str(getattr(torch, name)) == f"torch.{name}"
    assert isinstance(getattr(torch, name), torch.dtype)


def test_plans_and_clusters_have_the_same_bound() -> None:
    """A cluster that can be described can be planned for."""
    assert MAX_DEVICES == cluster.MAX_DEVICES
