"""Token files: every window once an epoch, the same order for every layout and after resuming."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.runtime.token_data import open_tokens, token_batches
from galv.runtime.train_config import Data
from tests.plans import SEQ_LEN, VOCABULARY, hand_made_plan, tiny_llama


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hand_made_plan(tiny_llama(), global_batch=4)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Ten windows, whose first tokens count up."""
    path = tmp_path / "tokens.bin"
    (np.arange(10 * SEQ_LEN + 1) // SEQ_LEN).astype("uint16").tofile(path)
    return path


def firsts(path: Path, plan: Plan, first_step: int, steps: int, **options: object) -> list[int]:
    windows = open_tokens(Data(tokens=str(path), **options), SEQ_LEN, seed=3)  # type: ignore[arg-type]
    batches = token_batches(windows, plan, shifted=True, first_step=first_step)
    return [int(row[0]) for batch in islice(batches, steps) for row in batch["input_ids"]]


def test_every_window_comes_once_an_epoch(tokens: Path, plan: Plan) -> None:
    """In an order of its own each epoch; without shuffling, in the order of the file."""
    seen = firsts(tokens, plan, 0, 5)

    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert firsts(tokens, plan, 0, 5, shuffle=False) == 2 * list(range(10))


def test_a_resumed_run_sees_what_it_would_have_seen(tokens: Path, plan: Plan) -> None:
    """From any step on."""
    assert firsts(tokens, plan, 3, 2) == firsts(tokens, plan, 0, 5)[12:]


def test_labels_are_the_next_tokens_unless_the_model_shifts(tmp_path: Path, plan: Plan) -> None:
    """Either way position i is to predict token i + 1."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(3 * SEQ_LEN + 1) % VOCABULARY)
    windows = open_tokens(Data(tokens=str(path)), SEQ_LEN, seed=0)

    plain = next(token_batches(windows, plan, shifted=False))
    shifted = next(token_batches(windows, plan, shifted=True))

    assert torch.equal(plain["labels"], (plain["input_ids"] + 1) % VOCABULARY)
    assert torch.equal(shifted["labels"], shifted["input_ids"])


def test_what_cannot_be_read_is_refused(tmp_path: Path, plan: Plan, tokens: Path) -> None:
    """A missing file, a short one, tokens that the model has not, numbers that are no tokens."""
    with pytest.raises(UsageError, match="there is no token file"):
        open_tokens(Data(tokens=str(tmp_path / "none.bin")), SEQ_LEN, seed=0)
    with pytest.raises(UsageError, match=r"has 161 tokens; a sample of the plan takes 200"):
        open_tokens(Data(tokens=str(tokens)), 200, seed=0)
    wide, real = tmp_path / "wide.bin", tmp_path / "real.npy"
    np.full(5 * SEQ_LEN, 999, dtype="uint16").tofile(wide)
    np.save(real, np.zeros(100))
    known = plan.model_copy(update={"model": plan.model.model_copy(update={"source": "llama.json"})})
    with pytest.raises(UsageError, match="holds token 999"):
        next(token_batches(open_tokens(Data(tokens=str(wide)), SEQ_LEN, seed=0), known, shifted=True))
    with pytest.raises(UsageError, match="whole numbers in one dim, not float64"):
        open_tokens(Data(tokens=str(real)), SEQ_LEN, seed=0)
    with pytest.raises(UsageError, match="pip install datasets"):
        open_tokens(Data(dataset=str(tmp_path)), SEQ_LEN, seed=0)
