"""A plan as data: exact JSON, refusals of files that are no plans, and its printed face."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from galv.planner.plan import Layout, Plan, Strategy, absolute_name
from galv.planner.plan_table import seconds, unit_names
from tests.planner.decoder import decoder
from tests.planner.test_planner import by_hand, planned, request

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(decoder(num_layers=6, hidden=2048), "h100-sxm-80:4x2", request(16, 12))


def test_json_round_trip_is_exact(plan: Plan) -> None:
    """Writing and reading gives an equal plan, and writing that gives the same text."""
    again = Plan.from_json(plan.to_json())

    assert again == plan
    assert again.to_json() == plan.to_json()


def test_a_file_cut_anywhere_is_refused(plan: Plan) -> None:
    """No prefix of a plan file is taken for a plan."""
    text = plan.to_json()
    for length in range(0, len(text) - 2, max(1, len(text) // 60)):
        with pytest.raises(ValueError, match=r"cut short|schema version"):
            Plan.from_json(text[:length])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema_version": 1', '"schema_version": 2', "version 2; this galv reads version 1"),
        ('"precision": "bf16"', '"precision": "bf8"', "training.precision"),
        ('"pipeline"', '"pipelines"', "pipeline"),
        ('"num_nodes": 2', '"num_nodes": 3', "devices"),
        ('"global_batch": 16', '"global_batch": 17', "global batch 17"),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(plan: Plan, old: str, new: str, message: str) -> None:
    """A plan file that was changed into nonsense is refused with the place or the reason."""
    text = plan.to_json()
    assert old in text

    with pytest.raises(ValueError, match=message):
        Plan.from_json(text.replace(old, new))


def test_saving_is_whole_or_nothing(plan: Plan, tmp_path: Path) -> None:
    """A save that fails leaves the old file and no partial one."""
    target = tmp_path / "plan.json"
    plan.save(target)
    assert Plan.from_json(target.read_text()) == plan

    with pytest.raises(OSError):
        plan.save(tmp_path / "missing" / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_saving_follows_a_link(plan: Plan, tmp_path: Path) -> None:
    """What a link leads to is written, there yet or not; the link stays one."""
    link = tmp_path / "link.json"
    link.symlink_to("plan.json")
    for _ in range(2):
        plan.save(link)

        assert link.is_symlink()
        assert Plan.from_json((tmp_path / "plan.json").read_text()) == plan
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "plan.json"]


def test_saving_replaces_nothing_but_files(plan: Plan, tmp_path: Path) -> None:
    """A pipe, a device (also behind a link) and a link to itself are refused and stay what they are."""
    pipe, device, circle = (tmp_path / name for name in ("pipe", "device", "circle"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/null")
    circle.symlink_to("circle")
    for target in (pipe, device, circle):
        with pytest.raises(OSError):
            plan.save(target)

    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()
    assert len(list(tmp_path.iterdir())) == 3


def test_plans_are_frozen(plan: Plan) -> None:
    """No field of a plan can be changed."""
    with pytest.raises(ValidationError):
        plan.training.global_batch = 1  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize("text", ["R", "R+", "P", "S0", "S1", "S12", "S1x3"])
def test_layouts_have_one_spelling(text: str) -> None:
    """A layout reads back from what it prints."""
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["", "S", "Sx3", "S1x0", "R-", "s1", "P1"])
def test_other_spellings_are_refused(text: str) -> None:
    """Anything else is no layout."""
    with pytest.raises(ValueError, match="is no layout"):
        Layout.parse(text)


def test_strategies_contradict_themselves_in_words() -> None:
    """A strategy that shards without a ZeRO level, or sequences without tensor parallelism, is refused."""
    with pytest.raises(ValidationError, match="zero 0 shards nothing"):
        Strategy(dp_shard=2)
    with pytest.raises(ValidationError, match="needs tp > 1"):
        Strategy(sequence="megatron")


def test_names_within_a_unit() -> None:
    """A unit with one module names relative to it, one with several starts with the module's position."""
    assert absolute_name(("model.layers.3",), "mlp.up") == "model.layers.3.mlp.up"
    assert absolute_name(("model.layers.3",), "") == "model.layers.3"
    assert absolute_name(("wte", "wpe"), "1.weight") == "wpe.weight"
    assert absolute_name(("wte", "wpe"), "0") == "wte"


def test_runs_of_units_have_one_name() -> None:
    """Consecutive blocks print as a range, others by their ends."""
    assert unit_names(["h.0", "h.1", "h.2"]) == "h.0-2"
    assert unit_names(["head"]) == "head"
    assert unit_names(["a.0", "b.1"]) == "a.0 ... b.1 (2)"


def test_seconds_are_readable() -> None:
    """Durations show three digits and a unit."""
    assert [seconds(x) for x in (12.345, 0.5, 0.00123, 2e-5, 1e-9)] == ["12.3 s", "500 ms", "1.23 ms", "20 us", "0"]


@pytest.mark.parametrize("name", ["pipeline", "mixed"])
def test_printed_plans(name: str, update_golden: bool) -> None:
    """A plan's table, kept in golden/; `pytest --update-golden` rewrites it."""
    graph = decoder(num_layers=6, hidden=2048)
    if name == "pipeline":
        found = by_hand(graph, "h100-sxm-80:8x1", request(), pp=4, tp=2, micro_batch=2)
    else:
        found = planned(graph, "h100-sxm-80:4x1", request(16, 10)).model_copy(update={"search": None})
    path = GOLDEN / f"{name}.txt"
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{found}\n", encoding="utf-8")

    assert f"{found}\n" == path.read_text(encoding="utf-8")
