"""`galv run`: what it starts, what it joins, and how the ranks' end becomes its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from galv.cli import run as run_command
from galv.cli.launch import Ranks, Task, check_devices, culprit, first_host, launched_by
from galv.errors import RunError, UsageError
from tests.cli.conftest import Galv, small_plan

REPORT = """
import os, sys
line = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GALV_PLAN"], *sys.argv[1:]]
open(os.path.join(os.path.dirname(__file__), "rank" + line[0]), "w").write("|".join(line))
"""


class Became(Exception):
    """The process would have been replaced."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.words, self.environment = words, environment


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Task, Ranks]]:
    """The tasks and ranks that `galv run` would have started torchrun with."""
    calls: list[tuple[Task, Ranks]] = []

    def record(task: Task, ranks: Ranks, *, on_gpus: bool) -> int:
        assert not on_gpus
        calls.append((task, ranks))
        return 0

    monkeypatch.setattr(run_command, "start_ranks", record)
    return calls


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A plan file for two nodes of two devices."""
    plan = small_plan(num_devices=4)
    cluster = plan.cluster.model_copy(update={"spec": "cpu:2x2", "devices_per_node": 2, "num_nodes": 2})
    plan.model_copy(update={"cluster": cluster}).save(tmp_path / "nodes.json")
    return tmp_path / "nodes.json"


@pytest.fixture
def no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: str, words: list[str], environment: dict[str, str]) -> None:
        raise Became(words, environment)

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr("galv.cli.launch.time.sleep", lambda seconds: None)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(REPORT)
    return path


# ----------------------------------------------------------------------------------------------- the command line


def test_without_script_the_trainer_runs(run_galv: Galv, started: list[Any], plan_file: Path) -> None:
    """The built-in worker gets the plan, the steps and the seed, on as many ranks as the plan has devices."""
    assert run_galv("run", plan_file, "--steps", "7", "--seed", "5").status == 0
    ((task, ranks),) = started
    assert ranks == Ranks(per_node=2)
    assert task.words == ["-m", "galv.cli.worker", str(plan_file), "--steps", "7", "--seed", "5"]


def test_nodes_meet_at_an_endpoint(run_galv: Galv, started: list[Any], two_nodes: Path) -> None:
    """With --rdzv-endpoint this machine is one node of the plan's; without it holds all ranks."""
    assert run_galv("run", two_nodes, "--rdzv-endpoint", "node0:29500").status == 0
    assert run_galv("run", two_nodes).status == 0
    assert [ranks for _, ranks in started] == [Ranks(2, 2, "node0:29500"), Ranks(4)]


@pytest.mark.parametrize("endpoint", ["node0", "node0:", ":29500", "node0:port", "node0:70000"])
def test_an_endpoint_that_is_none(run_galv: Galv, two_nodes: Path, endpoint: str) -> None:
    """It is refused by name."""
    result = run_galv("run", two_nodes, "--rdzv-endpoint", endpoint)
    assert (result.status, "HOST:PORT" in result.err) == (2, True)


def test_what_would_be_started_is_printed(run_galv: Galv, started: list[Any], two_nodes: Path, script: Path) -> None:
    """--print-command gives torchrun's command line for every node and starts nothing."""
    out = run_galv("run", "--print-command", "--rdzv-endpoint", "node0:29500", two_nodes, script, "--lr", "1 e").out

    words = shlex.split(out)
    assert words[:2] == [f"GALV_PLAN={two_nodes}", "torchrun"]
    assert words[words.index("--nnodes") + 1] == words[words.index("--nproc-per-node") + 1] == "2"
    assert words[-3:] == [str(script), "--lr", "1 e"]
    assert not started


def test_a_job_script_for_slurm(run_galv: Galv, started: list[Any], two_nodes: Path, script: Path) -> None:
    """Its tasks are the plan's ranks, and each calls this very command."""
    out = run_galv("run", "--slurm", two_nodes, script, "--lr", "1 e").out

    lines = out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"} <= set(lines)
    assert lines[-1] == f"srun --kill-on-bad-exit=1 galv run {two_nodes} {script} --lr '1 e'"
    assert not started


def test_options_after_the_script_are_the_scripts(
    run_galv: Galv, started: list[Any], plan_file: Path, script: Path
) -> None:
    """galv reads options up to SCRIPT only, wherever --nproc stands before it."""
    for own in ((plan_file, "--nproc", "2"), ("--nproc", "2", plan_file), ("--nproc=2", plan_file, "--")):
        assert run_galv("run", *own, script, "--steps", "3", "--help", "-x", "last").status == 0
        task, _ = started.pop()
        assert task.words == [str(script), "--steps", "3", "--help", "-x", "last"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nproc", "4"), "the plan runs on 2 ranks, but --nproc gives 4"),
        (("nowhere.py",), "there is no script nowhere.py"),
        (("--steps", "3", __file__), "--steps is for training without SCRIPT"),
        (("--steps", "0"), "--steps"),
        (("--seed", "-1"), "--seed"),
        (("--seed", "99999999999999999999"), "9223372036854775807"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    run_galv: Galv, started: list[Any], plan_file: Path, words: tuple[str, ...], says: str
) -> None:
    """Another number of ranks than the plan's, a script that is not there, steps that nobody reads: status 2."""
    result = run_galv("run", plan_file, *words)

    assert (result.status, started) == (2, [])
    assert result.err.startswith("galv: ") and says in result.err


# ----------------------------------------------------------------------------------------------- being a rank

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_inside_torchrun_it_is_a_rank(
    run_galv: Galv, no_exec: None, monkeypatch: pytest.MonkeyPatch, plan_file: Path, script: Path
) -> None:
    """With RANK and WORLD_SIZE set, the process becomes the rank's own program and finds the plan's path."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(plan_file.parent)

    with pytest.raises(Became) as became:
        run_galv("run", plan_file.name, script, "--lr", "1")
    assert became.value.words == [sys.executable, str(script), "--lr", "1"]
    assert became.value.environment["GALV_PLAN"] == str(plan_file)


@pytest.mark.parametrize(("rank", "message"), [("0", True), ("3", False)])
def test_another_world_than_the_plans_is_refused_once(
    run_galv: Galv, no_exec: None, monkeypatch: pytest.MonkeyPatch, plan_file: Path, rank: str, message: bool
) -> None:
    """Every rank leaves with status 2, and rank 0 alone says why."""
    for name, value in (TORCHRUN | {"RANK": rank, "WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    result = run_galv("run", plan_file)

    assert (result.status, bool(result.err)) == (2, message)
    assert not message or "the plan runs on 2 ranks, but torchrun gives 4" in result.err


SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_inside_slurm_it_is_a_rank(
    run_galv: Galv, no_exec: None, monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    """A task of srun gets what torch.distributed needs from Slurm's own variables."""
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(Became) as became:
        run_galv("run", plan_file)
    environment = became.value.environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["1", "2", "0", "gpu07", "22345"]


def test_the_users_own_address_wins_over_slurms() -> None:
    """What is set already is not derived again."""
    launcher = launched_by({**SRUN, "MASTER_ADDR": "here"})

    assert launcher is not None
    assert "MASTER_ADDR" not in launcher.environment


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "abc"}, "RANK is 'abc'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": ""}, "RANK is ''"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE is '2.0'"),
        ({"RANK": "2"}, "RANK must be less than WORLD_SIZE"),
        ({"RANK": "0", "MASTER_ADDR": ""}, "MASTER_ADDR is not: "),
        ({"RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not: "),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "0", "MASTER_PORT": "65536"}, "MASTER_PORT is 65536"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first'"),
    ],
)
def test_a_rank_with_a_wrong_environment_is_refused(
    run_galv: Galv, no_exec: None, monkeypatch: pytest.MonkeyPatch, plan_file: Path, changes: dict[str, str], says: str
) -> None:
    """A variable that is missing or is no number is named in one message, status 2."""
    for name, value in (TORCHRUN | changes).items():
        monkeypatch.setenv(name, value)
    result = run_galv("run", plan_file)

    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("galv: ") and says in result.err


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"])
def test_slurms_variables_are_checked_too(name: str) -> None:
    """Of a step of srun, the variable that is no number is named."""
    with pytest.raises(RunError, match=f"{'LOCAL_RANK' if name == 'SLURM_LOCALID' else name} is 'x'"):
        launched_by(SRUN | {name: "x"})


def test_only_the_first_rank_speaks(
    run_galv: Galv, no_exec: None, monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    """A fault that all ranks see is said by rank 0; the others leave with its status."""
    for name, value in (TORCHRUN | {"MASTER_ADDR": ""}).items():
        monkeypatch.setenv(name, value)
    result = run_galv("run", plan_file)

    assert (result.status, result.err) == (2, "")


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_a_batch_script_or_login_shell_is_no_rank(missing: str) -> None:
    """Slurm's variables alone do not make a process one of many; only a step of srun does."""
    assert launched_by({name: value for name, value in SRUN.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[07-09,12],x", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]-ib,z", "r1-ib"),
        ("n[12]", "n12"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    """The spellings of Slurm's hostlists that name the first host differently."""
    assert first_host(nodes) == first


# ----------------------------------------------------------------------------------------------- real ranks


def _galv(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "galv", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_ranks_are_started_and_find_the_plan(plan_file: Path, script: Path) -> None:
    """torchrun starts one rank a device, each with the plan's path and the script's own arguments."""
    done = _galv("run", plan_file, script, "--lr", "1")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank in ("0", "1"):
        text = (script.parent / f"rank{rank}").read_text()
        assert text == "|".join([rank, "2", str(plan_file), "--lr", "1"])


def test_a_failed_rank_gives_its_status_and_one_line(plan_file: Path, script: Path) -> None:
    """The status of the rank that failed first, and no report of torchrun's."""
    script.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)\n")
    done = _galv("run", plan_file, script)

    assert done.returncode == 7
    assert done.stderr == "galv: rank 1 failed with exit status 7; its message stands above\n"


def test_the_rank_that_failed_is_named_not_those_that_lost_it() -> None:
    """One that has spoken counts most, then one that was stopped; SIGTERM is the launcher's own."""
    assert culprit({0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM}, 0, speaks=True) == 1
    assert culprit({0: 2, 1: -signal.SIGKILL}, 1, speaks=True) == 0
    assert culprit({0: 2, 1: -signal.SIGKILL}, 0, speaks=False) == 1
    assert culprit({0: 1, 1: 1}, 1, speaks=True) == 1


def test_an_interrupt_ends_the_ranks(plan_file: Path, script: Path) -> None:
    """Ctrl-C, which goes to the whole group of processes, stops the ranks quietly and leaves with status 130."""
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "galv", "run", str(plan_file), str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        ranks = [int(process.stdout.readline()) for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        _, complaints = process.communicate(timeout=60)

    assert (process.returncode, complaints) == (130, "")
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_a_plan_for_gpus_is_not_started_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without GPUs a plan for GPUs is refused, with the cluster that would run here."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    with pytest.raises(UsageError, match=r"this machine has none.*--cluster cpu:"):
        check_devices(8, on_gpus=True)
    check_devices(8, on_gpus=False)
