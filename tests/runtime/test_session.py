"""A run by its configuration: resumed it goes on as if unbroken, and evaluates and ends as one device would."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import galv
from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.runtime.loss import loss_of
from galv.runtime.materialize import initialize
from galv.runtime.session import Session
from galv.runtime.token_data import open_tokens, token_batches
from galv.runtime.train_config import Data, TrainConfig
from galv.runtime.trainer import StepRecord
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, VOCABULARY, random_batch

STEPS = 6
GLOBAL_BATCH = 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    return galv.estimate(
        MODELS["llama"](),
        random_batch(2, 0),
        cluster="cpu:2x1",
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
        zero=3,
    )


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Tokens to train on and others to look at; checkpoints every other step."""
    generator = np.random.default_rng(0)
    for name in ("train", "held"):
        generator.integers(0, VOCABULARY, 40 * SEQ_LEN).astype("uint16").tofile(tmp_path / f"{name}.bin")
    return {
        "steps": STEPS,
        "seed": 3,
        "data": {"tokens": str(tmp_path / "train.bin")},
        "evaluation": {"tokens": str(tmp_path / "held.bin"), "every": 3, "batches": 2},
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "checkpoints": {"folder": str(tmp_path / "checkpoints"), "every": 2},
        "save_weights": str(tmp_path / "trained"),
    }


def run(text: str, config: dict[str, Any], most: int) -> list[StepRecord]:
    """The records of a session that is left after `most` steps."""
    with torch.device("meta"):
        meta = MODELS["llama"]()
    wanted = TrainConfig.model_validate(config)
    module = galv.parallelize(meta, Plan.from_json(text), seed=wanted.seed)
    return list(islice(Session(module, wanted).records(), most))


def one_device(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of every step, and evaluation losses, by plain PyTorch."""
    with torch.device("meta"):
        model = MODELS["llama"]()
    wanted = TrainConfig.model_validate(config)
    initialize(model, wanted.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=wanted.optimizer.betas, weight_decay=0.01)
    losses, held = [], []
    for step, batch in enumerate(islice(_batches(wanted.data, wanted.seed), STEPS), 1):
        optimizer.param_groups[0]["lr"] = wanted.optimizer.lr * wanted.schedule.factor(step, STEPS)
        loss = loss_of(model(**batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 3 == 0:
            assert wanted.evaluation is not None
            with torch.no_grad():
                seen = [loss_of(model(**b)) for b in islice(_batches(wanted.evaluation, wanted.seed), 2)]
            held.append(float(sum(seen) / 2))
    return losses, held


def _batches(data: Data, seed: int) -> Any:
    windows = open_tokens(data, SEQ_LEN, seed)
    plan = galv.estimate(
        MODELS["llama"](), random_batch(2, 0), cluster="cpu:1x1", seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH
    )
    return token_batches(windows, plan, shifted=True)


def test_a_run_equals_one_device_and_goes_on_where_it_was_left(
    pool: Pool, plan: Plan, config: dict[str, Any], tmp_path: Path
) -> None:
    """Left after 5 steps, it goes on from the checkpoint of step 4; losses are those of a run in one process."""
    losses, held = one_device(config)
    first = pool.run(run, 2, plan.to_json(), config, 5)
    rest = pool.run(run, 2, plan.to_json(), config, STEPS + 1)

    for before, after in zip(first, rest, strict=True):
        assert [record.step for record in after] == [5, 6]
        assert [record.loss for record in before] == pytest.approx(losses[:5], rel=1e-4)
        assert [record.loss for record in after] == pytest.approx(losses[4:], rel=1e-4)
        seen = [record.evaluation_loss for record in (*before, *after) if record.evaluation_loss is not None]
        assert seen == pytest.approx(held, rel=1e-4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000004", "step-00000006"]
    assert set(load_file(tmp_path / "trained" / "model.safetensors")) == set(MODELS["llama"]().state_dict())


def refused(text: str, config: dict[str, Any]) -> str:
    try:
        run(text, config, 1)
    except UsageError as error:
        return str(error)
    return ""


def test_a_complete_run_is_not_run_again(pool: Pool, plan: Plan, config: dict[str, Any]) -> None:
    """Every rank says so, and what would go on."""
    config |= {"steps": 2, "save_weights": None}
    pool.run(run, 2, plan.to_json(), config, 3)

    assert all("it is complete; raise steps to go on" in said for said in pool.run(refused, 2, plan.to_json(), config))
