"""`import galv` and the command line's own answers are quick, because they import no torch."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "transformers", "numpy", "networkx", "pulp", "yaml", "galv.planner.plan")
PROBE = "import sys; print([name for name in {heavy} if name in sys.modules])"


def _loaded(code: str) -> str:
    """What of HEAVY a fresh interpreter has loaded after `code`."""
    probe = PROBE.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", f"{code}\n{probe}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_importing_galv_loads_nothing_heavy() -> None:
    """`import galv`, and reading its list of names, load neither torch nor any other large package."""
    assert _loaded("import galv; dir(galv)") == "[]"


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["run", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    """The help of the command line needs no torch, and none of galv's layers below it."""
    assert _loaded(f"from galv.cli.main import main\ntry: main({words})\nexcept SystemExit: pass") == "[]"


@pytest.mark.parametrize(
    "module", ["api", "planner.plan", "planner.graph", "planner.search", "cost_models", "profiles"]
)
def test_planning_layers_load_no_torch(module: str) -> None:
    """What is pure data, search or arithmetic works where torch is not installed."""
    code = f"""
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["transformers"] = None
package = importlib.import_module("galv.{module}")
for part in pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + "."):
    if not part.name.startswith("galv.profiles.measure"):  # what times a machine
        importlib.import_module(part.name)
del sys.modules["torch"], sys.modules["transformers"]
"""
    assert "torch" not in _loaded(code)


@pytest.mark.parametrize("command", [["-c", "import galv"], ["-m", "galv", "--help"]], ids=["import", "help"])
def test_the_first_answer_comes_at_once(command: list[str]) -> None:
    """Under 0.3 s from a cold interpreter; the best of several, for a machine that does other things too."""
    assert _best_seconds([sys.executable, *command], enough=0.3, tries=10) < 0.3


def _best_seconds(command: list[str], *, enough: float, tries: int) -> float:
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        best = min(best, time.perf_counter() - start)
        if best < enough:
            break
    return best
