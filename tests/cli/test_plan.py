"""What `galv plan` and `galv estimate` ask of the API, and how they hand the answer over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from galv.errors import NoFeasiblePlan, UnknownName
from galv.planner.plan import Plan
from galv.planner.reporter import Reporter
from tests.cli.conftest import FakeApi, Galv

TINY = Path(__file__).parents[2] / "configs" / "models" / "llama-tiny.json"
WORDS = ("m.json", "--cluster", "cpu:2x1", "--seq-len", "16", "--global-batch", "2")


def test_plan_passes_its_options_on(run_galv: Galv, fake_api: FakeApi) -> None:
    """Every option of `galv plan` reaches the API under its own name."""
    more = ("--precision", "fp16", "--optimizer", "sgd", "--memory", "1.5", "--inputs", "a.b:c")
    more += ("--units", "a.*", "--units", "b", "--opaque", "c", "--require", "tp=2", "--require", "pp<=2")
    more += ("--forbid", "offload", "--objective", "cost", "--time-limit", "2.5")

    assert run_galv("plan", *WORDS, *more).status == 0
    asked = dict(fake_api.asked or {})
    assert isinstance(asked.pop("reporter"), Reporter)
    assert asked == {
        "model": "m.json",
        "example_inputs": "a.b:c",
        "cluster": "cpu:2x1",
        "seq_len": 16,
        "global_batch": 2,
        "precision": "fp16",
        "optimizer": "sgd",
        "memory": 1.5,
        "require": ["tp=2", "pp<=2"],
        "forbid": ["offload"],
        "objective": "cost",
        "time_limit": 2.5,
        "units": ["a.*", "b"],
        "opaque": ["c"],
    }


@pytest.mark.parametrize(
    ("flag", "sequence"), [((), None), (("--sequence-parallel",), "megatron"), (("--no-sequence-parallel",), "none")]
)
def test_estimate_passes_its_options_on(
    run_galv: Galv, fake_api: FakeApi, flag: tuple[str, ...], sequence: str | None
) -> None:
    """Every option of `galv estimate` reaches the API; sequence sharding is left open unless it is asked for."""
    more = ("--micro-batch", "1", "--tp", "2", "--pp", "3", "--zero", "1", "--recompute", "full", "--schedule", "gpipe")

    assert run_galv("estimate", *WORDS, *more, *flag).status == 0
    asked = fake_api.asked or {}
    names = ("micro_batch", "tp", "pp", "zero", "recompute", "schedule", "sequence")
    assert tuple(asked[name] for name in names) == (1, 2, 3, 1, "full", "gpipe", sequence)


def test_a_plan_is_printed_as_its_table(run_galv: Galv, fake_api: FakeApi) -> None:
    """Without --json the plan's own table is all that standard output holds."""
    result = run_galv("plan", *WORDS)

    assert result.out == f"{fake_api.answer}\n"
    assert result.err == ""


def test_json_is_one_object_and_nothing_else(run_galv: Galv, fake_api: FakeApi, tmp_path: Path) -> None:
    """With --json standard output is the plan's JSON, with the fields that scripts read."""
    result = run_galv("plan", *WORDS, "--json", "-o", tmp_path / "plan.json")
    data = json.loads(result.out)

    assert Plan.from_json(result.out) == fake_api.answer
    assert {"step_seconds", "tokens_per_second", "mfu", "peak_bytes", "fits", "breakdown"} <= data["estimate"].keys()
    assert {"seconds", "candidates", "proven_optimal", "gap"} <= data["search"].keys()
    assert {"model", "cluster", "training", "pipeline", "stages", "layouts", "alternatives"} <= data.keys()


def test_the_written_plan_is_the_plan(run_galv: Galv, fake_api: FakeApi, tmp_path: Path) -> None:
    """-o writes a file that reads back as the same plan, alone in its folder."""
    result = run_galv("plan", *WORDS, "-o", tmp_path / "plan.json")

    assert "plan.json" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == fake_api.answer


@pytest.mark.parametrize("command", ["plan", "estimate"])
@pytest.mark.parametrize("target", ["missing/plan.json", ".", "/dev/full", "pipe", "linked-pipe", "circle", "x" * 300])
def test_an_output_that_cannot_be_is_refused_before_the_search(
    run_galv: Galv, fake_api: FakeApi, tmp_path: Path, command: str, target: str
) -> None:
    """A folder that does not exist, or what is there and is no file, costs no search and stays."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "linked-pipe").symlink_to("pipe")
    (tmp_path / "circle").symlink_to("circle")
    result = run_galv(command, *WORDS, "-o", tmp_path / target)

    assert result.status == 2
    assert result.err.startswith("galv: cannot write the plan to ")
    assert fake_api.asked is None
    assert Path("/dev/full").is_char_device()
    assert (tmp_path / "pipe").is_fifo()


def test_a_linked_output_stays_a_link(run_galv: Galv, fake_api: FakeApi, tmp_path: Path) -> None:
    """-o writes what a link leads to."""
    (tmp_path / "link.json").symlink_to("plan.json")

    assert run_galv("plan", *WORDS, "-o", tmp_path / "link.json").status == 0
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == fake_api.answer


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_a_refusal_is_one_message_and_status_two(
    run_galv: Galv, fake_api: FakeApi, tmp_path: Path, command: str
) -> None:
    """An error of galv's goes to standard error, nothing to standard output or to the file."""
    fake_api.answer = UnknownName("device", "h100-sxm", ["cpu", "h100-sxm-80"])
    result = run_galv(command, *WORDS, "--json", "-o", tmp_path / "plan.json")

    assert (result.status, result.out) == (2, "")
    assert result.err == ("galv: unknown device 'h100-sxm'. Did you mean 'h100-sxm-80'? Known: cpu, h100-sxm-80\n")
    assert list(tmp_path.iterdir()) == []


def test_an_infeasible_request_says_where_the_memory_went(run_galv: Galv, fake_api: FakeApi) -> None:
    """The causes of NoFeasiblePlan are part of the message."""
    fake_api.answer = NoFeasiblePlan("nothing fits", smallest_budget_bytes=2**30, causes=("stage 0: weights",))

    assert run_galv("plan", *WORDS).err == "galv: nothing fits\n  stage 0: weights\n"


def test_an_interrupt_ends_with_status_130(run_galv: Galv, fake_api: FakeApi) -> None:
    """Ctrl-C during the search leaves quietly."""
    fake_api.answer = KeyboardInterrupt()
    result = run_galv("plan", *WORDS)

    assert (result.status, result.out, result.err) == (130, "", "")


def test_a_fault_of_galvs_is_not_hidden(run_galv: Galv, fake_api: FakeApi) -> None:
    """An error that galv does not raise on purpose keeps its traceback."""
    fake_api.answer = ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run_galv("plan", *WORDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "m.json", "--global-batch", "2"), "--cluster"),
        (("plan", "m.json", "--cluster", "cpu:2x1"), "--global-batch"),
        (("plan", *WORDS, "--seq-len", "0"), "--seq-len"),
        (("plan", *WORDS, "--global-batch", "many"), "--global-batch"),
        (("plan", *WORDS, "--precision", "int8"), "bf16"),
        (("plan", *WORDS, "--fast"), "--fast"),
        (("estimate", *WORDS, "--zero", "4"), "--zero"),
        (("estimate", *WORDS, "--recompute", "some"), "selective"),
        (("plam",), "plan"),
        (("show",), "PLAN.JSON"),
    ],
)
def test_a_wrong_command_line_is_refused(run_galv: Galv, fake_api: FakeApi, words: tuple[str, ...], says: str) -> None:
    """A missing, unknown or impossible option is named in one message that points to the help; status 2."""
    result = run_galv(*words)

    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("galv: ") and result.err.rstrip().endswith("--help'.")
    assert says in result.err
    assert fake_api.asked is None


def test_the_k_best_are_a_table_a_list_and_files(run_galv: Galv, tmp_path: Path) -> None:
    """--top prints one row a plan; --json prints a list; -o writes plan.json, plan-2.json."""
    words = ("plan", TINY, "--cluster", "cpu:2x1", "--seq-len", "16", "--global-batch", "4", "--top", "2")

    table = run_galv(*words, "-o", tmp_path / "plan.json")
    plans = [Plan.from_json((tmp_path / name).read_text()) for name in ("plan.json", "plan-2.json")]
    assert table.status == 0
    assert len(table.out.splitlines()) == 2 + 2
    assert plans[0].estimate.step_seconds <= plans[1].estimate.step_seconds
    assert plans[0].stages != plans[1].stages or plans[0].training != plans[1].training

    listed = json.loads(run_galv(*words, "--json").out)
    assert [one["stages"] for one in listed] == [json.loads(plan.to_json())["stages"] for plan in plans]


def test_the_front_is_a_table_csv_and_plot(run_galv: Galv, tmp_path: Path) -> None:
    """--pareto shows points of falling seconds; --plot draws them; with --top it is refused."""
    words = ("plan", TINY, "--cluster", "cpu:2x1", "--seq-len", "64", "--global-batch", "8", "--pareto")
    picture, table = tmp_path / "front.png", tmp_path / "front.csv"

    result = run_galv(*words, "--json", "--plot", picture, "-o", table)
    points = json.loads(result.out)["points"]
    assert [p["step_seconds"] for p in points] == sorted((p["step_seconds"] for p in points), reverse=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(table.read_text().splitlines()) == 1 + len(points)
    assert "leave out --top" in run_galv(*words, "--top", "2").err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--require", "tp=3"), "--require tp=3: tp can be 1, 2 here"),
        (("--require", "tq=3"), "unknown key in 'tq=3'"),
        (("--memory", "lots"), "--memory takes a number of GiB such as 72, or a share such as 90%, not 'lots'"),
        (("--memory", "0%"), "above 0%"),
        (("--time-limit", "0"), "time_limit must be a positive number of seconds"),
        (("--plot", "a.png"), "needs --pareto"),
    ],
)
def test_demands_that_cannot_be_met_are_refused(run_galv: Galv, more: tuple[str, ...], says: str) -> None:
    """One message with what would work, status 2."""
    result = run_galv("plan", TINY, "--cluster", "cpu:2x1", "--seq-len", "16", "--global-batch", "4", *more)

    assert result.status == 2
    assert says in result.err
