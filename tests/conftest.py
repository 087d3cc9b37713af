"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.distributed_pool import Pool

# No test may depend on the network, and none on how fast this machine is today.
os.environ["HF_HUB_OFFLINE"] = "1"
settings.register_profile("galv", deadline=None)
settings.load_profile("galv")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the expected output of golden tests."""
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files with what is printed now")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides whatever launcher the tests themselves were started by."""
    for name in tuple(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GALV_PLAN") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's worker processes, started when first asked for."""
    pool = Pool()
    yield pool
    pool.close()
