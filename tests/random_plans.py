"""Plans drawn at random from the whole space of strategies, and the training that shows whether they equal one device.

A family is a small model without dropout. A plan is drawn from a seed: pipeline degree, schedule, uneven cuts,
microbatches, and for each unit a strategy of its own out of `planner.space.rows`, which knows what exists. What the
plan's checks refuse is drawn again, and counted by reason.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, get_args

import torch
import transformers
from pydantic import ValidationError
from torch import Tensor, nn

import galv
from galv.cost_models.strategies import Row, strategy_of
from galv.cost_models.unit import FactsPricer, Outer
from galv.planner.assemble import plan_of
from galv.planner.capture import capture, huggingface
from galv.planner.capture.source import ModelSource, resolve_model
from galv.planner.graph import UnitRef
from galv.planner.plan import Offload, Pipeline, Plan, ScheduleName, Strategy
from galv.planner.space import EVERYTHING, Candidate, Request, outer_of, pipeline_degrees, recompute_levels, rows
from galv.profiles.cluster import load_cluster
from galv.runtime.loss import loss_of
from tests import families
from tests.models import others
from tests.plans import almost_nothing

STEPS = 3
RATE = 0.3
MAX_NORM = 0.5
"""Below the models' gradient norms, so that clipping is at work."""
ROUNDING = 2e-6
"""Absolute tolerance."""
NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"),
    0.0,
)
MOST_DRAWS = 200


# ----------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Family:
    """A small model, how its inputs look, and how much of it a plan may divide."""

    build: Callable[[], nn.Module]
    """With weights, the same at every call."""
    inputs: Callable[[int], dict[str, Tensor]] | None = None
    """Of so many samples; None for a model of transformers, which says itself what it takes."""
    seq_len: int | None = None
    one_sample: bool = False
    """What cannot be divided by samples: one graph."""
    tolerance: float = 1e-4


def _pretrained(name: str, **changes: Any) -> Family:
    config, seq_len = families.CONFIGS[name]
    sizes = {key: value for key, value in config.items() if key != "model_type"} | changes

    def build() -> nn.Module:
        torch.manual_seed(0)
        chosen = transformers.AutoConfig.for_model(config["model_type"], **(sizes | NO_DROPOUT))
        return huggingface.builder(chosen, device="cpu")()

    return Family(build, seq_len=seq_len)


def _plain(model: Callable[[], nn.Module], name: str, **options: Any) -> Family:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return model().train()

    return Family(build, families.PLAIN[name].inputs, **options)


FAMILIES: dict[str, Family] = {
    "llama": _pretrained("llama"),
    "gpt2": _pretrained("gpt2"),
    "bert": _pretrained("bert"),
    "t5": _pretrained("t5"),
    "vit": _pretrained("vit"),
    "mixtral": _pretrained("mixtral"),
    "unet": _plain(others.UNet, "unet"),
    "graph-net": _plain(others.GraphNet, "graph-net", one_sample=True),
    "space-time": _plain(others.SpaceTimeTransformer, "space-time"),
}


@lru_cache
def source_of(family: str) -> ModelSource:
    """Where galv gets the model of a family from."""
    own = FAMILIES[family]
    return resolve_model(own.build, own.inputs, seq_len=own.seq_len)


@lru_cache
def pricer_of(family: str, world: int) -> FactsPricer:
    """The captured model, which knows what strategies exist on `world` devices."""
    return FactsPricer(_graph(family), load_cluster(f"cpu:{world}x1"))


@lru_cache
def _graph(family: str) -> Any:
    return capture(source_of(family), precision="fp32", device_kind="cpu")


def batch_of(family: str, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Random inputs; samples of token models have very different numbers of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    own, source = FAMILIES[family], source_of(family)
    batch = {}
    for name, like in (own.inputs or source.example)(num_samples).items():
        if like.is_floating_point():
            batch[name] = torch.randn(like.shape, generator=generator)
            continue
        high = source.limits[name] if own.inputs is None else int(like.max()) + 1
        batch[name] = torch.randint(0, high, like.shape, generator=generator)
        if name == "labels" and like.ndim == 2:
            _ignore_some(batch[name], generator)
    return batch


def _ignore_some(labels: Tensor, generator: torch.Generator) -> None:
    """Makes a first part of each sample count for nothing, all of the first sample where there are others."""
    length = labels.shape[1]
    for sample, own in enumerate(labels):
        is_left_out = sample == 0 and len(labels) > 1
        own[: length if is_left_out else int(torch.randint(0, length, (), generator=generator))] = -100


# ----------------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class Drawn:
    """A plan, and what was drawn before it and refused, by reason."""

    plan: Plan
    refused: Counter[str]


@dataclass(frozen=True)
class _Chosen:
    """What `plan_of` needs to know of a unit."""

    strategy: Strategy


def draw_plan(family: str, world: int, seed: int) -> Drawn:
    """A plan for a family on `world` ranks."""
    draw, refused = random.Random(f"{family} {world} {seed}"), Counter[str]()
    for _ in range(MOST_DRAWS):
        found = _drawn(family, world, draw)
        if isinstance(found, Plan):
            return Drawn(found, refused)
        refused[found] += 1
    raise AssertionError(f"no plan for {family} on {world} ranks: {refused}")


def _reason(error: ValidationError) -> str:
    """What was refused, without the names and figures of the plan at hand."""
    text = error.errors()[0]["msg"].removeprefix("Value error, ")
    return re.sub(r"unit [^:]*: |\(.*?\)|\d+", "", text)[:90]


def _drawn(family: str, world: int, draw: random.Random) -> Plan | str:
    """A plan, or why what was drawn is none."""
    shared = pricer_of(family, world)
    degrees = pipeline_degrees(shared.graph, shared.cluster)
    # Stages of one device have little to draw.
    (pp,) = draw.choices(degrees, [1 if pp == world else 3 for pp in degrees])
    schedule, chunks = _schedule(draw, pp, len(shared.graph.units))
    num_devices = world // pp
    one = FAMILIES[family].one_sample
    num_microbatches = 1 if one else draw.randint(1, 5)
    samples = 1 if one else draw.choice([1, 2, num_devices, num_devices, 2 * num_devices])
    request = Request(samples * num_microbatches, FAMILIES[family].seq_len, "fp32", "sgd", 2**33)
    outer = outer_of(request, pp, num_microbatches, schedule, chunks)
    candidate = Candidate(outer, num_devices, None, EVERYTHING)
    possible = {name: rows(shared, candidate, name) for name in shared.graph.classes}
    if not all(possible.values()):
        return "a unit has no strategy for such microbatches on so many devices"
    refs = list(_with_strategies(shared, possible, draw))
    places = sorted(draw.sample(range(1, len(refs)), pp * chunks - 1))
    cuts = [0, *places, len(refs)]
    stages = [refs[a:b] for a, b in pairwise(cuts)]
    try:
        return _plan(shared, outer, request, stages)
    except ValidationError as error:
        return _reason(error)


def _plan(shared: FactsPricer, outer: Outer, request: Request, stages: list[list[tuple[UnitRef, _Chosen]]]) -> Plan:
    pipeline = Pipeline(degree=outer.pp, schedule=outer.schedule, virtual_stages=outer.virtual_stages)
    sizes = [sum(len(stages[i]) for i in pipeline.stages_of_rank(rank)) for rank in range(outer.pp)]
    priced: Any = stages
    return plan_of(shared, outer, priced, request, almost_nothing(sizes), source=None, inputs_source=None)


def _schedule(draw: random.Random, pp: int, num_units: int) -> tuple[ScheduleName, int]:
    if pp == 1:
        return "none", 1
    found: list[tuple[ScheduleName, int]] = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zbv", 2)]
    found += [("interleaved", 2), ("interleaved", 3)]
    return draw.choice([(schedule, chunks) for schedule, chunks in found if pp * chunks <= num_units])


def _with_strategies(
    shared: FactsPricer, possible: Mapping[str, list[Row]], draw: random.Random
) -> Iterator[tuple[UnitRef, _Chosen]]:
    """Every unit with a strategy: now and then that of the unit before it, else any, degrees first."""
    keeps, before = draw.choice([0.0, 0.4, 0.8]), None
    for ref in shared.graph.units:
        own = possible[ref.unit_class]
        if before is None or before not in own or draw.random() >= keeps:
            before = _row(own, draw)
        yield ref, _Chosen(strategy_of(before, draw.choice(recompute_levels(shared.graph, ref.unit_class))))


def _row(own: list[Row], draw: random.Random) -> Row:
    """Any of them, degrees first; most leave everything on the device."""
    if draw.random() < 0.7:
        own = [row for row in own if not row.offload]
    degrees = draw.choice(list(dict.fromkeys(row.degrees for row in own)))
    return draw.choice([row for row in own if row.degrees == degrees])


def planned(family: str, world: int) -> Plan:
    """What `galv.plan` answers for a family on `world` CPU devices."""
    own, source = FAMILIES[family], source_of(family)
    return galv.plan(
        own.build,
        own.inputs or source.example,
        cluster=f"cpu:{world}x1",
        global_batch=1 if own.one_sample else 4 * world,
        seq_len=own.seq_len,
        precision="fp32",
        optimizer="sgd",
    )


# ----------------------------------------------------------------------------------------------- what a plan has


def features_of(plan: Plan) -> list[str]:
    """What of the space a plan uses, in a few words each."""
    strategies = [unit.strategy for unit in plan.units()]
    pipeline, training = plan.pipeline, plan.training
    chunks = f" x{pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else ""
    has = {
        "one stage": pipeline.degree == 1,
        f"{pipeline.schedule}{chunks}": pipeline.degree > 1,
        "microbatches no multiple of pp": training.num_microbatches % pipeline.degree > 0,
        "units of different tp": len({own.tp for own in strategies}) > 1,
        "units of different dp": len(plan.data_degrees) > 1,
        "tp": any(own.tp > 1 for own in strategies),
        "tp + sequence": any(own.sequence == "megatron" for own in strategies),
        "ulysses": any(own.sequence == "ulysses" for own in strategies),
        "ring": any(own.sequence == "ring" for own in strategies),
        "tp x cp": any(own.tp > 1 and own.cp > 1 for own in strategies),
        "hybrid sharding": any(own.dp_shard > 1 and own.dp_replicate > 1 for own in strategies),
        "ep": any(own.ep > 1 for own in strategies),
        "tied across stages": pipeline.degree > 1 and bool(plan.model.tied),
    }
    has |= {f"zero {level}": any(own.zero == level and own.dp * own.cp > 1 for own in strategies) for level in range(4)}
    has |= {f"{what} offloaded": any(what in own.offload for own in strategies) for what in get_args(Offload)}
    levels = ("selective", "full")
    has |= {f"{level} recompute": any(own.recompute == level for own in strategies) for level in levels}
    return [name for name, is_there in has.items() if is_there]


# ----------------------------------------------------------------------------------------------- training


Result = tuple[list[float], dict[str, Tensor]]
"""Losses and final weights."""


def train_in_parallel(family: str, text: str) -> Result:
    """What one rank gets under the plan in `text`; the weights on rank 0 only."""
    plan = Plan.from_json(text)
    module = galv.parallelize(FAMILIES[family].build(), plan)
    optimizer = module.optimizer("sgd", lr=RATE)
    losses = []
    for step in range(STEPS):
        batch = module.shard_batch(batch_of(family, plan.training.global_batch, step))
        losses.append(float(module.train_step(batch)))
        module.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.full_state_dict()


@lru_cache
def train_alone(family: str, global_batch: int) -> Result:
    """What plain PyTorch gets on the whole batch, in one process."""
    model = FAMILIES[family].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model(**batch_of(family, global_batch, step)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def difference(family: str, plan: Plan, ranks: list[Result]) -> str | None:
    """How training under `plan` differs from one device; None where it is equal."""
    losses, weights = train_alone(family, plan.training.global_batch)
    found, rtol = ranks[0][1], FAMILIES[family].tolerance
    try:
        for own, _ in ranks:
            torch.testing.assert_close(own, losses, rtol=rtol, atol=ROUNDING)
    except AssertionError:
        return f"losses {[own for own, _ in ranks]}, alone {losses}"
    if found.keys() != weights.keys():
        return f"weights {sorted(found.keys() ^ weights.keys())} on one side only"
    far = [name for name, value in found.items() if not torch.allclose(value, weights[name], rtol, ROUNDING)]
    if far:
        worst = max(float((found[name] - weights[name]).abs().max()) for name in far)
        return f"{len(far)} of {len(found)} weights, by up to {worst:.3g}: {', '.join(far[:8])}"
    return None
