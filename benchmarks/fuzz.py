"""Whether random plans train like one device: run with `python benchmarks/fuzz.py --plans 200 --seed 0`.

Plans are drawn from the whole space of strategies (`tests/random_plans.py`), family by family, for 2, 4 and at times 8
processes, and trained for a few clipped steps; every loss and every weight must be those of one process. After them,
each family is planned by `galv.plan`, and what it answers is run too. Ends with status 1 when any plan failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from galv.planner.plan import Plan  # noqa: E402  # after the path
from tests.distributed_pool import Pool, WorkerError  # noqa: E402
from tests.random_plans import FAMILIES, difference, draw_plan, features_of, planned, train_in_parallel  # noqa: E402

WORLDS = (2, 4, 4, 4, 8)
PLANNED_ON = (2, 4)


@dataclass
class Tally:
    """What became of the plans of one family, or of those that use one feature."""

    drawn: int = 0
    equal: int = 0
    failed: int = 0


@dataclass
class Outcome:
    """Everything that was found."""

    families: dict[str, Tally] = field(default_factory=dict)
    features: dict[str, Tally] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, family: str, plan: Plan, failure: str | None) -> None:
        """Counts one plan that was run."""
        places = [self.families.setdefault(family, Tally())]
        places += [self.features.setdefault(name, Tally()) for name in features_of(plan)]
        for tally in places:
            tally.drawn += 1
            tally.equal += failure is None
            tally.failed += failure is not None

    def __str__(self) -> str:
        lines = [f"{'':32}{'plans':>7}{'equal':>7}{'failed':>8}"]
        for title, tallies in (("family", self.families), ("feature", self.features)):
            lines.append(title)
            lines += [f"  {name:30}{t.drawn:7}{t.equal:7}{t.failed:8}" for name, t in sorted(tallies.items())]
        lines.append("refused by the plan's checks, and drawn again")
        return "\n".join([*lines, *(f"  {times:5} x {reason}" for reason, times in self.refused.most_common())])


def cases(families: list[str], num_plans: int, seed: int, world: int | None) -> Iterator[tuple[str, int, int]]:
    """(family, world, seed) of every plan, families in turn."""
    for i in range(num_plans):
        turn = i // len(families)
        yield families[i % len(families)], world or WORLDS[(turn + seed) % len(WORLDS)], seed + turn


def failure_of(pool: Pool, family: str, plan: Plan) -> str | None:
    """Why training under `plan` is not that of one device; None where it is."""
    try:
        ranks = pool.run(train_in_parallel, plan.num_devices, family, plan.to_json(), timeout_seconds=180)
    except WorkerError as error:
        rank, text = next((item for item in error.errors.items() if "no answer" not in item[1]), (0, str(error)))
        return f"rank {rank}: {text.strip()}"
    return difference(family, plan, ranks)


def described(plan: Plan) -> str:
    """The plan in a line."""
    pipeline, training = plan.pipeline, plan.training
    stages = " | ".join(", ".join(str(unit.strategy) for unit in stage.units) for stage in plan.stages)
    chunks = f"pp{pipeline.degree} {pipeline.schedule} x{pipeline.virtual_stages}"
    return f"{chunks}, batch {training.global_batch} in {training.num_microbatches}: {stages}"


def run(pool: Pool, outcome: Outcome, label: str, family: str, plan: Plan) -> None:
    """Runs one plan and tells what became of it."""
    start = time.perf_counter()
    failure = failure_of(pool, family, plan)
    outcome.add(family, plan, failure)
    seconds = time.perf_counter() - start
    print(f"{label:36}{'equal' if failure is None else 'FAILED':8}{seconds:6.1f} s", flush=True)
    if failure is not None:
        print(f"  {described(plan)}\n  {failure}", flush=True)


def main() -> int:
    """Prints a line for each plan and the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200, help="random plans, over all families")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=list(FAMILIES), help="only this one")
    parser.add_argument("--world", type=int, choices=(2, 4, 8), help="only so many processes")
    parser.add_argument("--planned", action=argparse.BooleanOptionalAction, default=True, help="run galv.plan's, too")
    options = parser.parse_args()
    families = [options.family] if options.family else list(FAMILIES)
    pool, outcome = Pool(), Outcome()
    try:
        for family, world, seed in cases(families, options.plans, options.seed, options.world):
            drawn = draw_plan(family, world, seed)
            outcome.refused += drawn.refused
            run(pool, outcome, f"{family}, {world} ranks, seed {seed}", family, drawn.plan)
        for family in families if options.planned else ():
            for world in [options.world] if options.world else PLANNED_ON:
                run(pool, outcome, f"{family}, {world} ranks, galv.plan", family, planned(family, world))
    finally:
        pool.close()
    print(outcome)
    return 1 if any(tally.failed for tally in outcome.families.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
