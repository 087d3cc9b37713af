"""A plan: everything needed to run a model in parallel, as frozen data with an exact JSON form.

This module decides nothing and imports nothing of galv but its layouts and its own printed face. It says what a plan
*is*: which units form which pipeline stage, which strategy each unit has, how its tensors lie on the tensor axis, the
training set-up that the plan was made for, what it was estimated to cost, and the fingerprint of the model it belongs
to. `planner` writes plans, `runtime` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError, model_validator

from galv.planner.layout import Frozen as Frozen
from galv.planner.layout import Layout as Layout
from galv.planner.layout import LocalArgument as LocalArgument
from galv.planner.layout import ModuleLayout as ModuleLayout
from galv.planner.layout import Redistribution as Redistribution
from galv.planner.layout import SequenceMode as SequenceMode
from galv.planner.layout import TensorParallelLayout as TensorParallelLayout
from galv.planner.layout import absolute_name as absolute_name

SCHEMA_VERSION: Final = 1

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["none", "gpipe", "1f1b"]


# ----------------------------------------------------------------------------------------------- the plan's parts


class Strategy(Frozen):
    """How one unit runs on the devices of its stage: `tp * dp_shard * dp_replicate` is their number."""

    tp: int = Field(1, ge=1)
    sequence: SequenceMode = "none"
    """`megatron`: activations between tensor-parallel regions are sharded along the sequence over the tensor axis."""
    dp_shard: int = Field(1, ge=1)
    dp_replicate: int = Field(1, ge=1)
    zero: int = Field(0, ge=0, le=3)
    """0 nothing sharded, 1 optimizer state, 2 gradients too, 3 parameters too; sharded over `dp_shard`."""
    recompute: Recompute = "none"

    @property
    def dp(self) -> int:
        return self.dp_shard * self.dp_replicate

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp

    @model_validator(mode="after")
    def _consistent(self) -> Strategy:
        if self.zero == 0 and self.dp_shard != 1:
            raise ValueError(f"zero 0 shards nothing, yet dp_shard is {self.dp_shard}")
        if self.sequence == "megatron" and self.tp == 1:
            raise ValueError("sequence sharding 'megatron' needs tp > 1")
        return self

    def __str__(self) -> str:
        parts = [f"tp{self.tp}" + ("+seq" if self.sequence == "megatron" else "")] if self.tp > 1 else []
        if self.dp > 1:
            parts.append(f"dp{self.dp}" + (f" zero{self.zero}" if self.zero else ""))
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        return " ".join(parts) or "undivided"


class Unit(Frozen):
    """The smallest piece of the model that gets one strategy."""

    name: str
    unit_class: str
    modules: tuple[str, ...]
    """Fully qualified names of the modules that hold its parameters: one repeated block, or the few around them."""
    strategy: Strategy
    parameters: tuple[str, ...] = ()
    """Parameters that it holds beside them: those that lie directly in a module around units."""

    @property
    def is_block(self) -> bool:
        """Whether it is a repeated block, not what stands around the blocks."""
        return self.name not in ("embedding", "head") and " " not in self.name

    @property
    def is_opaque(self) -> bool:  # never traced
        return self.name.startswith("opaque ")

    @property
    def activation(self) -> Layout:
        """How its activation, which comes in as it goes out, lies on the tensor axis."""
        cut = self.strategy.sequence == "megatron" and self.is_block
        return Layout(kind="S", dim=1) if cut else Layout(kind="R")


class Stage(Frozen):
    """Consecutive units on one sub-mesh."""

    units: tuple[Unit, ...]


class InputSpec(Frozen):
    """One tensor that the model takes, for one microbatch of one sample group."""

    name: str
    shape: tuple[int, ...]
    """Global shape for `Model.sample_batch` samples."""
    dtype: str
    batch_dim: int | None
    """The dim that counts samples, None when the input is the same for every sample."""
    high: int | None = None
    """Integer inputs: exclusive upper bound of the values, for synthetic data."""


class Model(Frozen):
    """Which model the plan belongs to."""

    name: str
    source: str | None
    """MODEL as given on the command line; None when planned from an object in Python."""
    inputs_source: str | None = None
    """The --inputs factory, when one was given."""
    num_parameters: int
    num_samples: int
    """Samples in `inputs`, along their batch dims."""
    inputs: tuple[InputSpec, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names that are one tensor."""
    fingerprint: str
    """Hash of the unit classes and of every parameter's name, shape and tie."""

    def input_shape(self, spec: InputSpec, num_samples: int) -> tuple[int, ...]:
        """The shape of one of `inputs` for that many samples."""
        if spec.batch_dim is None:
            return spec.shape
        length = spec.shape[spec.batch_dim] * num_samples // self.num_samples
        return (*spec.shape[: spec.batch_dim], length, *spec.shape[spec.batch_dim + 1 :])


class Training(Frozen):
    """The training set-up that the plan was made for."""

    seq_len: int | None
    """Tokens per sample; None when a sample has no tokens."""
    global_batch: int
    num_microbatches: int
    precision: Precision
    optimizer: OptimizerName


class Pipeline(Frozen):
    """`virtual_stages` model chunks on each of `degree` pipeline ranks, run in the order of `schedule`."""

    degree: int = 1
    schedule: ScheduleName = "none"
    virtual_stages: int = 1


class Cluster(Frozen):
    """The devices that the plan was priced for."""

    spec: str
    """CLUSTER as given on the command line."""
    device: str
    kind: Literal["cuda", "cpu"]
    """What torch calls such a device."""
    devices_per_node: int
    num_nodes: int
    memory_budget_bytes: int
    """What one device may hold at most."""

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes


# ----------------------------------------------------------------------------------------------- the estimate


class TimeBreakdown(Frozen):
    """Where a step's seconds go on one stage; they sum to the step."""

    compute_seconds: float = 0.0
    """Forward, backward and recomputation."""
    communication_seconds: float = 0.0
    """Exposed only: what computation does not hide."""
    bubble_seconds: float = 0.0
    """Waiting for other stages."""
    optimizer_seconds: float = 0.0
    """Gradient clipping and the optimizer's update."""

    @property
    def total_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.bubble_seconds + self.optimizer_seconds


class MemoryBreakdown(Frozen):
    """Where one device's bytes go at the peak; they sum to the peak."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    working_bytes: int = 0
    """Alive for the moment only: gathered parameters, recomputed activations, logits, gradients in flight."""
    reserved_bytes: int = 0
    """Not the model's: context, communication buffers, allocator slack."""

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.working_bytes
            + self.reserved_bytes
        )


class UnitEstimate(Frozen):
    """One unit's part of a step, all microbatches together, on one device."""

    compute_seconds: float
    communication_seconds: float
    state_bytes: int
    """Parameters, gradients and optimizer state."""
    activations_bytes: int
    """All microbatches in flight at the peak."""


class StageEstimate(Frozen):
    time: TimeBreakdown
    memory: MemoryBreakdown
    units: tuple[UnitEstimate, ...]
    """In the order of the stage's units."""
    num_in_flight: int = 1
    """Microbatches whose activations are alive at the peak."""


class Estimate(Frozen):
    """What a step is predicted to cost."""

    step_seconds: float
    tokens_per_second: float
    """Samples per second where a sample has no tokens."""
    mfu: float
    """Model FLOPs over what the devices could do at their peak rate."""
    model_flops: float
    """Forward and backward of one global batch: matrix products once forward and twice backward, attention with all its
    scores, nothing recomputed."""
    peak_bytes: tuple[int, ...]
    """One a stage: its fullest device."""
    fits: bool
    breakdown: TimeBreakdown
    """The mean over all devices."""
    stages: tuple[StageEstimate, ...]


class Alternative(Frozen):
    """A simple layout that people choose by habit, priced beside the plan."""

    name: str
    layout: str
    """In words; empty when no such layout exists here."""
    step_seconds: float | None
    """None when it does not fit or does not exist."""
    reason: str
    """Why not, when `step_seconds` is None."""


class SearchReport(Frozen):
    """What the search did."""

    seconds: float
    candidates: int
    """Layouts priced."""
    proven_optimal: bool
    gap: float
    """At most this share of the step time could still be saved within the searched space; 0 when proven."""


class Plan(Frozen):
    """A complete answer: run this. Equal plans have equal JSON."""

    schema_version: Literal[1] = SCHEMA_VERSION
    galv_version: str
    model: Model
    cluster: Cluster
    training: Training
    pipeline: Pipeline
    stages: tuple[Stage, ...]
    layouts: tuple[TensorParallelLayout, ...] = ()
    """One for each (unit class, degree, sequence mode) that the units use with tp > 1."""
    estimate: Estimate
    alternatives: tuple[Alternative, ...] = ()
    search: SearchReport | None = None
    """None for a layout given by hand."""
    notes: tuple[str, ...] = ()
    """What a person should know before training: where the model itself makes parallel training differ."""

    # -- questions

    def units(self) -> Iterator[Unit]:
        """Every unit, in the order of the model."""
        return (unit for stage in self.stages for unit in stage.units)

    @property
    def num_devices(self) -> int:
        """The world size that the plan runs on."""
        return self.cluster.num_devices

    @property
    def data_parallel_degree(self) -> int:
        """Groups that each take their own samples."""
        return self.stages[0].units[0].strategy.dp

    @property
    def micro_batch(self) -> int:
        """Samples that one data-parallel group processes at once."""
        return self.training.global_batch // (self.training.num_microbatches * self.data_parallel_degree)

    def layout_of(self, unit: Unit) -> TensorParallelLayout | None:
        """The placements of `unit` on the tensor axis, None at tp 1."""
        key = (unit.unit_class, unit.strategy.tp, unit.strategy.sequence)
        return next((x for x in self.layouts if (x.unit_class, x.degree, x.sequence) == key), None)

    def __str__(self) -> str:
        from galv.planner.plan_table import render  # the face needs the value, and the value its face only here

        return render(self)

    # -- JSON

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` gives back an equal plan."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in `text`. Raises ValueError saying what is wrong with it."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"not complete JSON (line {error.lineno}: {error.msg}); was the file cut short?"
            ) from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"schema version {version!r}; this galv reads version {SCHEMA_VERSION}")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{place}: {first['msg']}") from error

    def save(self, path: str | Path) -> None:
        """Writes the plan to `path`, whole or not at all."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if len(self.stages) != self.pipeline.degree * self.pipeline.virtual_stages:
            raise ValueError(f"{len(self.stages)} stages for {self.pipeline.degree} pipeline ranks")
        if not all(stage.units for stage in self.stages):
            raise ValueError("a stage without units")
        per_stage = self.num_devices // self.pipeline.degree
        for unit in self.units():
            if unit.strategy.num_devices * self.pipeline.degree != self.num_devices:
                raise ValueError(
                    f"unit {unit.name}: {unit.strategy} covers {unit.strategy.num_devices} devices of {per_stage}"
                )
            if unit.strategy.tp > 1 and self.layout_of(unit) is None:
                raise ValueError(f"unit {unit.name}: no layout for tp {unit.strategy.tp}")
        if self.micro_batch * self.training.num_microbatches * self.data_parallel_degree != self.training.global_batch:
            raise ValueError(
                f"global batch {self.training.global_batch} is not microbatch x {self.training.num_microbatches} "
                f"microbatches x {self.data_parallel_degree} data-parallel groups"
            )
        return self
