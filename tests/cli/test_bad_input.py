"""Requests that cannot be answered, through the whole of galv: one clear message, status 2, nothing half-written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Galv

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "configs/models/llama-tiny.json")
SIZES = ("--seq-len", "64", "--global-batch", "8")
ON_CPU = ("--cluster", "cpu:4x1", *SIZES)

Refused = Callable[..., str]


@pytest.fixture
def refused(run_galv: Galv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Calls `galv` with words that it must refuse; gives the message."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        result = run_galv(*words)

        assert (result.status, result.out) == (2, "")
        assert result.err.startswith("galv: ")
        assert "Traceback" not in result.err
        return result.err

    return call


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("h100-sxm-8:8x1", ("unknown device 'h100-sxm-8'", "Did you mean 'h100-sxm-80'?", "a100-sxm-40")),
        ("h100-sxm-80", ("'h100-sxm-80' is no cluster", "h100-sxm-80:8x4")),
        ("cpu:0x1", ("at least 1 device",)),
        ("cpu:99999999999999999x1", ("at most 1048576 devices",)),
        ("nowhere.yaml", ("nowhere.yaml", "No such file")),
    ],
)
def test_an_unknown_cluster(refused: Refused, cluster: str, says: tuple[str, ...]) -> None:
    """A device that is not shipped is answered with those that are; another form with the right one."""
    message = refused("plan", LLAMA, "--cluster", cluster, *SIZES)

    assert all(part in message for part in says)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nowhere.json", "nowhere.json"),
        ("no_such_package:make", "no_such_package"),
        ("json:no_such_function", "no_such_function"),
    ],
)
def test_an_unknown_model(refused: Refused, model: str, says: str) -> None:
    """A file, package or function that is not there is named."""
    assert says in refused("plan", model, *ON_CPU)


@pytest.mark.parametrize("text", ["", "{", '{"vocab_size": 8}', '{"model_type": "no-such-model"}', "[]"])
def test_a_file_that_is_no_model(refused: Refused, tmp_path: Path, text: str) -> None:
    """A file that is no Hugging Face config is named."""
    (tmp_path / "broken.json").write_text(text)

    assert "broken.json" in refused("plan", "broken.json", *ON_CPU)


def test_a_language_model_without_seq_len(refused: Refused) -> None:
    """The option that is missing is named."""
    assert "seq" in refused("plan", LLAMA, "--cluster", "cpu:4x1", "--global-batch", "8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tp", "3"), ("tp 3", "4 devices", "1, 2, 4")),
        (("--pp", "3"), ("pp 3", "4 devices")),
        (("--micro-batch", "3"), ("global batch 8", "micro batch 3")),
        (("--tp", "4", "--zero", "3"), ("zero 3",)),
        (("--pp", "4", "--micro-batch", "16"), ("global batch 8",)),
        (("--sequence-parallel",), ("tp > 1",)),
        (("--seq-len", "63", "--tp", "2", "--sequence-parallel"), ("sequence of 63", "--no-sequence-parallel")),
        (("--seq-len", "99999999999999999999"), ("seq_len", "16777216")),
        (("--global-batch", "999999999999999999999"), ("global_batch", "1099511627776")),
    ],
)
def test_sizes_that_do_not_divide(refused: Refused, words: tuple[str, ...], says: tuple[str, ...]) -> None:
    """Degrees, batch and devices that do not divide are named together, with what would do."""
    message = refused("estimate", LLAMA, *ON_CPU, *words)

    assert all(part in message for part in says)


def test_a_list_of_degrees_is_short(refused: Refused) -> None:
    """Of many possible degrees a message names the smallest and the largest."""
    message = refused("estimate", LLAMA, "--cluster", "cpu:1048576x1", *SIZES, "--tp", "3")

    assert "1, 2, 4, 8" in message and message.rstrip().endswith("..., 524288, 1048576")
    assert message.count(",") < 15


def test_a_budget_that_nothing_fits(refused: Refused, tmp_path: Path) -> None:
    """The smallest budget that would do is named, and where the memory goes; no file appears."""
    message = refused("plan", LLAMA, *ON_CPU, "--memory", "0.001", "-o", "plan.json")

    assert "GiB" in message
    assert "stage" in message
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_budget_named_does_suffice(refused: Refused, run_galv: Galv) -> None:
    """Planning with the budget that the refusal names finds a plan; a hundredth less than needed is refused again."""
    message = refused("plan", LLAMA, *ON_CPU, "--memory", "0.001")
    named = re.search(r"smallest budget that would do is ([\d.]+) GiB", message)
    assert named is not None

    assert run_galv("plan", LLAMA, *ON_CPU, "--memory", named[1]).status == 0
    less = float(named[1]) - 0.015
    assert f"is {named[1]} GiB" in refused("plan", LLAMA, *ON_CPU, "--memory", less)


@pytest.mark.parametrize("memory", ["0", "-1", "1e9"])
def test_a_budget_that_no_device_has(refused: Refused, memory: str) -> None:
    """A budget of nothing, or beyond the device, is refused with the device's own."""
    assert "GiB" in refused("plan", LLAMA, *ON_CPU, "--memory", memory)
