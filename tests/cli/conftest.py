"""The command line called in this process, a stand-in for the API behind it, and a small plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import galv
from galv.cli.main import main
from galv.planner import plan as p


@dataclass(frozen=True)
class Result:
    """How one call of the command line ended."""

    status: Any
    out: str
    err: str


Galv = Callable[..., Result]


@pytest.fixture
def run_galv(capsys: pytest.CaptureFixture[str]) -> Galv:
    """Calls `galv` with the given words."""

    def call(*words: object) -> Result:
        with pytest.raises(SystemExit) as exit_:
            main([str(word) for word in words])
        return Result(exit_.value.code, *capsys.readouterr())

    return call


def small_plan(num_devices: int = 2) -> p.Plan:
    """A consistent plan: one unit, plain data parallel."""
    unit = p.Unit(name="head", unit_class="head", modules=("head",), strategy=p.Strategy(dp_replicate=num_devices))
    tokens = p.InputSpec(name="input_ids", shape=(1, 16), dtype="int64", batch_dim=0, high=8)
    time, memory = p.TimeBreakdown(compute_seconds=0.5), p.MemoryBreakdown(parameters_bytes=2**20)
    cost = p.UnitEstimate(compute_seconds=0.5, communication_seconds=0.0, state_bytes=2**20, activations_bytes=2**20)
    return p.Plan(
        galv_version=galv.__version__,
        model=p.Model(
            name="small", source="small.json", num_parameters=8, num_samples=1, inputs=(tokens,), fingerprint="0123abcd"
        ),
        cluster=p.Cluster(
            kind="cpu",
            spec=f"cpu:{num_devices}x1",
            device="cpu",
            devices_per_node=num_devices,
            num_nodes=1,
            memory_budget_bytes=2**30,
        ),
        training=p.Training(
            seq_len=16, global_batch=num_devices, num_microbatches=1, precision="fp32", optimizer="sgd"
        ),
        pipeline=p.Pipeline(),
        stages=(p.Stage(units=(unit,)),),
        estimate=p.Estimate(
            step_seconds=0.5,
            tokens_per_second=64.0,
            mfu=0.25,
            model_flops=1e9,
            peak_bytes=(2**20,),
            fits=True,
            breakdown=time,
            stages=(p.StageEstimate(time=time, memory=memory, units=(cost,)),),
        ),
        search=p.SearchReport(seconds=0.1, candidates=3, proven_optimal=True, gap=0.0),
    )


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan for two devices, saved."""
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return path


@dataclass
class FakeApi:
    """Answers every request with `answer` (raising it when it is an exception) and keeps what it was asked."""

    answer: p.Plan | BaseException
    asked: dict[str, Any] | None = None

    def __call__(self, model: str, example_inputs: str | None = None, **options: Any) -> p.Plan:
        self.asked = {"model": model, "example_inputs": example_inputs, **options}
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def fake_api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Stands for `galv.api`: no model is traced, no plan searched."""
    fake = FakeApi(small_plan())
    module = SimpleNamespace(plan=fake, estimate=fake)
    monkeypatch.setitem(sys.modules, "galv.api", module)
    monkeypatch.setattr(galv, "api", module, raising=False)
    return fake
