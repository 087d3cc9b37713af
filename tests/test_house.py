"""The house keeps its rules: sizes, names, links, versions, and nothing that only one machine knows."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import galv
from galv import errors

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "galv").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function))


def _num_lines(function: Function) -> int:
    """Lines of the definition, its docstring apart."""
    length = (function.end_lineno or 0) - function.lineno + 1
    docstring = ast.get_docstring(function, clean=False)
    return length - (docstring.count("\n") + 1 if docstring else 0)


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    """No file over 500 lines."""
    assert path.read_text().count("\n") <= 500


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_stay_small(path: Path) -> None:
    """No function over 60 lines."""
    assert [function.name for function in _functions(path) if _num_lines(function) > 60] == []


def test_most_functions_are_short() -> None:
    """The median function has at most 10 lines, and 9 in 10 are under 30."""
    sizes = sorted(_num_lines(function) for path in SOURCES for function in _functions(path))

    assert statistics.median(sizes) <= 10
    assert sizes[len(sizes) * 9 // 10] < 30


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_states_its_promise(path: Path) -> None:
    """Every test has a docstring."""
    assert [f.name for f in _functions(path) if f.name.startswith("test_") and not ast.get_docstring(f)] == []


def test_the_public_names_are_complete() -> None:
    """`galv.__all__` is sorted, holds every error and can be imported; what is not in it does not exist."""
    tree = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == "galv.errors"
    }

    assert sorted(galv.__all__) == galv.__all__
    assert tree <= set(galv.__all__) <= set(dir(galv))
    assert [name for name in galv.__all__ if getattr(galv, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        galv.plam  # noqa: B018  # the access is the test


def test_plan_is_the_function() -> None:
    """`galv.plan` stays the API's function although `galv.planner.plan` is a module."""
    import galv.api
    import galv.planner.plan

    assert galv.plan is galv.api.plan
    assert galv.Plan is galv.planner.plan.Plan


@pytest.mark.parametrize("name", ["planner", "cost_models", "profiles", "runtime"])
def test_the_root_shows_the_architecture(name: str) -> None:
    """The links at the root are relative and lead into the package."""
    link = ROOT / name

    assert link.is_symlink()
    assert str(link.readlink()) == f"galv/{name}"
    assert (link / "__init__.py").is_file()


def test_the_version_is_the_changelogs() -> None:
    """The newest numbered entry of CHANGELOG.md is this version."""
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)

    assert versions[0] == galv.__version__


def test_every_dependency_is_pinned_for_development() -> None:
    """constraints.txt names a version for everything that pyproject.toml asks for, and galv's torch."""
    tomllib = pytest.importorskip("tomllib")  # new in Python 3.11, which the pinned versions need anyway
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = {_package(line) for group in (project["dependencies"], *extras) for line in group}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))

    assert wanted - {_package(name) for name in pins} == set()
    assert pins["torch"] == "2.13.0"


def _package(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")


# Spelled in pieces, so that this file may be searched as well.
ELSEWHERE = re.compile(r"(?<![\w.])/" + r"work\b|\.\./" + r"shared\b")


def test_nothing_names_a_place_outside_the_project() -> None:
    """No file speaks of folders that a fresh clone does not have."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()] or [*SOURCES, *TESTS, *ROOT.glob("*.*")]
    texts = {path: path.read_text(errors="ignore") for path in paths if path.is_file()}

    assert len(texts) > 20
    assert [str(path) for path, text in texts.items() if ELSEWHERE.search(text)] == []
