"""What the search returns runs: the best plan of each part of the space trains as one device does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from galv.cost_models.unit import FactsPricer
from galv.planner.assemble import assemble
from galv.planner.capture import capture
from galv.planner.capture.source import resolve_model
from galv.planner.plan import Plan
from galv.planner.planner import best_plan
from galv.planner.space import Candidate, Request, candidates
from galv.profiles.cluster import load_cluster
from tests.distributed_pool import Pool
from tests.plans import MODELS, SEQ_LEN, random_batch
from tests.runtime.training import Result, assert_equal_training, train_alone, train_in_parallel

REQUEST = Request(global_batch=8, seq_len=SEQ_LEN, precision="fp32", optimizer="sgd", budget_bytes=2**32)


@functools.cache
def reference(model: str) -> Result:
    """The single-process run, once for all plans."""
    return train_alone(model, "sgd")


@functools.cache
def prices(model: str) -> FactsPricer:
    """The captured model on four CPU ranks."""
    graph = capture(resolve_model(MODELS[model], lambda n: random_batch(n, 0)), precision="fp32", device_kind="cpu")
    return FactsPricer(graph, load_cluster("cpu:4x1"))


def searched(model: str, keep: Callable[[Candidate], bool]) -> Plan:
    """The best plan of the candidates that `keep` is true of."""
    shared = prices(model)
    found = [one for one in candidates(shared.graph, shared.cluster, REQUEST) if keep(one)]
    answer = best_plan(shared, found, REQUEST.budget_bytes)
    return assemble(
        answer.priced, answer.solution, REQUEST, source=None, inputs_source=None, alternatives=(), search=answer.report
    )


def context(mode: str) -> Callable[[Candidate], bool]:
    """Blocks with a context axis in a pipeline."""
    return lambda one: one.uniform is not None and one.uniform.sequence == mode and one.outer.pp == 2


def scheduled(schedule: str, pp: int = 2) -> Callable[[Candidate], bool]:
    """A pipeline of that schedule without tensor or context ranks in its blocks."""
    return lambda one: (one.outer.schedule, one.outer.pp) == (schedule, pp) and one.uniform.num_ranks == 1  # type: ignore[union-attr]


KEPT: dict[str, Callable[[Candidate], bool]] = {
    "one stage": lambda one: one.outer.pp == 1,
    "ulysses": context("ulysses"),
    "ring": context("ring"),
    "interleaved": scheduled("interleaved"),
    "zb-h1": scheduled("zb-h1", 4),
    "zbv": scheduled("zbv"),
}


@pytest.mark.parametrize("part", KEPT)
def test_plans_of_every_part_of_the_space_run(pool: Pool, part: str) -> None:
    """With the losses, norms and weights of one device."""
    plan = searched("llama", KEPT[part])
    ranks = pool.run(train_in_parallel, 4, "llama", Plan.from_json(plan.to_json()), "sgd")

    assert_equal_training(reference("llama"), ranks)
    if part in ("ulysses", "ring"):
        blocks = {unit.strategy.sequence for unit in plan.units() if unit.is_block}
        assert blocks == {part}


def test_tied_ends_run_under_searched_plans(pool: Pool) -> None:
    """Embedding and head share one tensor under a plan for one stage."""
    plan = searched("gpt2", KEPT["one stage"])

    assert_equal_training(reference("gpt2"), pool.run(train_in_parallel, 4, "gpt2", plan, "sgd"))
