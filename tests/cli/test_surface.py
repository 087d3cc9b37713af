"""The command line's surface: commands and options are added on purpose and never renamed."""

from __future__ import annotations

from typing import get_args

from typer.main import get_command

from galv.cli import options
from galv.cli.main import app
from galv.planner import plan
from tests.cli.conftest import Galv

COMMON = {
    "MODEL",
    "--cluster",
    "--seq-len",
    "--global-batch",
    "--precision",
    "--optimizer",
    "--memory",
    "--inputs",
    "--units",
    "--opaque",
    "--output",
    "-o",
    "--json",
}

SURFACE = {
    "plan": COMMON | {"--require", "--forbid", "--objective", "--time-limit", "--top", "--pareto", "--plot"},
    "estimate": COMMON
    | {
        "--micro-batch",
        "--tp",
        "--pp",
        "--zero",
        "--sequence-parallel",
        "--no-sequence-parallel",
        "--recompute",
        "--schedule",
        "--sequence",
        "--cp",
        "--ep",
        "--dp-shard",
        "--dp-replicate",
        "--offload",
        "--virtual-stages",
    },
    "graph": {
        "MODEL",
        "--seq-len",
        "--micro-batch",
        "--precision",
        "--inputs",
        "--units",
        "--opaque",
        "--dot",
        "--json",
    },
    "show": {"PLAN.JSON", "--json", "--timeline", "--explain"},
    "check": {"PLAN.JSON", "--rank", "--all-stages", "--json"},
    "diff": {"A.JSON", "B.JSON", "--json"},
    "sweep": {
        "MODEL",
        "--cluster",
        "--global-batch",
        "--seq-len",
        "--precision",
        "--optimizer",
        "--inputs",
        "--price",
        "--csv",
        "--plot",
        "--json",
    },
    "profile": {
        "--output",
        "-o",
        "--quick",
        "--devices",
        "--minutes",
        "--nproc",
        "--model",
        "--seq-len",
        "--precision",
        "--micro-batch",
        "--inputs",
        "--units",
    },
    "calibrate": {"RUN.JSON", "--output", "-o", "--profile"},
    "devices": {"DEVICE", "--json"},
    "run": {
        "PLAN.JSON",
        "SCRIPT ARGS",
        "--config",
        "--steps",
        "--nproc",
        "--seed",
        "--rdzv-endpoint",
        "--record",
        "--print-command",
        "--slurm",
    },
}


def test_the_surface_is_the_one_promised() -> None:
    """Each command has exactly these arguments and options."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {
            spelling
            for parameter in command.params
            for spelling in (
                [parameter.metavar]
                if parameter.param_type_name == "argument"
                else parameter.opts + parameter.secondary_opts
            )
        }
        for name, command in commands.items()
    }

    assert found == SURFACE


def test_every_option_is_in_the_help(run_galv: Galv) -> None:
    """`galv COMMAND --help` lists the whole surface and succeeds."""
    for command, words in SURFACE.items():
        result = run_galv(command, "--help")

        assert (result.status, result.err) == (0, "")
        assert [word for word in words if word not in result.out] == []


def test_the_help_says_what_an_unset_flag_means(run_galv: Galv) -> None:
    """--sequence-parallel has neither on nor off for its default."""
    text = " ".join(run_galv("estimate", "--help").out.split())

    assert "default: where --tp is above 1 and the model allows it" in text


def test_galv_alone_shows_its_help(run_galv: Galv) -> None:
    """Without arguments the commands are listed."""
    result = run_galv()

    assert result.status == 0
    assert all(command in result.out for command in SURFACE)


def test_version(run_galv: Galv) -> None:
    """`galv --version` says which one this is."""
    assert run_galv("--version").out == "galv 0.1.0\n"


def test_the_words_of_options_are_the_plans() -> None:
    """The choices that the command line repeats are those that a plan can hold."""
    assert get_args(options.Precision) == get_args(plan.Precision)
    assert get_args(options.Optimizer) == get_args(plan.OptimizerName)
    assert get_args(options.Recompute) == get_args(plan.Recompute)
    assert ("none", *get_args(options.Schedule)) == get_args(plan.ScheduleName)
