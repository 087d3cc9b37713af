"""A plan: everything needed to run a model in parallel, as frozen data with an exact JSON form.

This module decides nothing and imports nothing of galv but its own printed face. It says what a plan *is*: which units form which pipeline
stage, which strategy each unit has, how its tensors lie on the tensor axis, the training set-up that the plan was made
for, what it was estimated to cost, and the fingerprint of the model it belongs to. `planner` writes plans, `runtime`
reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

SCHEMA_VERSION: Final = 1

SequenceMode = Literal["none", "megatron"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["none", "gpipe", "1f1b"]


class Frozen(BaseModel):
    """A value: immutable, comparable, closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


# ----------------------------------------------------------------------------------------------- placements


_LAYOUT = re.compile(r"R\+?|P|S(\d+)(x[1-9]\d*)?")


class Layout(Frozen):
    """How one tensor lies on the tensor axis, in a plan's short spelling.

    `R`    the same on every rank, and so is its gradient
    `R+`   the same on every rank, while each rank holds only a *summand* of its gradient (inside a tensor-parallel
           region, where every rank uses the value for its own share of the work)
    `S1`   cut along tensor dim 1, the parts in rank order
    `S1x3` cut along dim 1 chunk by chunk: the dim is made of 3 equal chunks (a fused q|k|v projection) and each rank
           holds its part of every chunk
    `P`    each rank holds a summand; the gradient is the same on every rank
    """

    kind: Literal["R", "R+", "S", "P"]
    dim: int | None = None
    chunks: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout spelled by `text`. Raises ValueError for any other text."""
        match = _LAYOUT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no layout; spell it R, R+, P, S<dim> or S<dim>x<chunks>")
        if not text.startswith("S"):
            return cls(kind=text)
        return cls(kind="S", dim=int(match[1]), chunks=int((match[2] or "x1")[1:]))

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" + (f"x{self.chunks}" if self.chunks > 1 else "")


def _read_layout(value: Any) -> Any:
    return Layout.parse(value) if isinstance(value, str) else value


TextLayout = Annotated[Layout, BeforeValidator(_read_layout), PlainSerializer(str, return_type=str)]


class Redistribution(Frozen):
    """A change of layout at the border of a module: `source` as the value arrives, `target` as it leaves.

    The pair fixes the collectives of both directions: S→R+ gathers forward and reduce-scatters backward, R→R+ does
    nothing forward and all-reduces backward, P→R all-reduces forward, P→S reduce-scatters forward and gathers
    backward, S→R gathers forward and cuts backward, R→S cuts forward and gathers backward.
    """

    source: TextLayout
    target: TextLayout


class ModuleLayout(Frozen):
    """What the runtime applies to one module of a unit on the tensor axis."""

    module: str
    """Name within the unit, see `absolute_name`."""
    parameters: dict[str, Redistribution] = {}
    """Own parameters (no dots): `source` as stored (R or S), `target` as used: S→S a shard, R→R+ a replicated weight
    of which each rank sees its share of the gradient, R→P a bias that is added to a partial sum."""
    inputs: dict[str, Redistribution] = {}
    """By position ("0") or keyword name."""
    outputs: dict[str, Redistribution] = {}
    """By position in a tuple; "0" also for a single tensor. `source` is how the local computation leaves it."""


def absolute_name(modules: tuple[str, ...], relative: str) -> str:
    """The fully qualified name of `relative`, a module or parameter named within a unit that owns `modules`.

    A unit with one module names things relative to it ("self_attn.q_proj", "" for the module itself); a unit with
    several puts the module's position first ("1.weight", "0" for the first module itself).
    """
    if len(modules) == 1:
        return ".".join(part for part in (modules[0], relative) if part)
    index, _, rest = relative.partition(".")
    return ".".join(part for part in (modules[int(index)], rest) if part)


class LocalArgument(Frozen):
    """A size written as a constant in the user's forward that must shrink on a shard (`x.split(768)` → `x.split(384)`).

    `function` is the tensor function's name (`split`, `view`, `reshape`), `occurrence` counts its calls within one
    forward of `module` (calls inside submodules not counted) from 0, and `arguments` maps positions among the call's
    integer arguments (positional, then keyword, sequences flattened, the tensors left out) to their local values.
    """

    module: str
    function: str
    occurrence: int
    arguments: dict[int, int]


class TensorParallelLayout(Frozen):
    """The placements of one unit class at one tensor-parallel degree and sequence mode.

    Every module computes on local tensors; tensors change layout only at module borders. A unit takes and gives its
    activations as R, or as S1 when it is a repeated block and `sequence` is `megatron`; where neighbours differ, the
    runtime redistributes between them. Inputs other than the activation (masks, position embeddings) arrive as R.
    """

    unit_class: str
    degree: int
    sequence: SequenceMode
    modules: tuple[ModuleLayout, ...]
    local_arguments: tuple[LocalArgument, ...] = ()


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
    cp: int = Field(1, ge=1)
    """Context-parallel degree, estimated for other software only."""

    @property
    def dp(self) -> int:
        return self.dp_shard * self.dp_replicate

    @property
    def num_devices(self) -> int:
        return self.tp * self.cp * self.dp

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
        return " ".join(parts) or "one device"


class Unit(Frozen):
    """The smallest piece of the model that gets one strategy."""

    name: str
    unit_class: str
    modules: tuple[str, ...]
    """Fully qualified names of the modules that hold its parameters: one repeated block, or the few around them."""
    strategy: Strategy

    @property
    def is_block(self) -> bool:
        """Whether it is a repeated block, not what stands around the blocks."""
        return self.name not in ("embedding", "head")

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
    stack: str = "galv"
    """The software that the estimate is for."""


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
    parameters_bytes: int
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
    forward_seconds: float = 0.0
    """Busy with one microbatch; so `backward_seconds`, and `step_seconds` once a step after them."""
    backward_seconds: float = 0.0
    step_seconds: float = 0.0


class Estimate(Frozen):
    """What a step is predicted to cost."""

    step_seconds: float
    tokens_per_second: float
    """Samples per second where a sample has no tokens."""
    mfu: float
    """Model FLOPs (no recomputation) over what the devices could do at their peak rate."""
    model_flops: float
    """Forward and backward of one global batch."""
    peak_bytes: tuple[int, ...]
    """One a stage: its fullest device."""
    fits: bool
    breakdown: TimeBreakdown
    """Of the stage that works longest."""
    stages: tuple[StageEstimate, ...]
    transfer_seconds: float = 0.0


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
            raise ValueError(f"not complete JSON (line {error.lineno}: {error.msg}); was the file cut short?") from error
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
            if unit.strategy.tp > 1 and self.training.stack == "galv" and self.layout_of(unit) is None:
                raise ValueError(f"unit {unit.name}: no layout for tp {unit.strategy.tp}")
        if self.micro_batch * self.training.num_microbatches * self.data_parallel_degree != self.training.global_batch:
            raise ValueError(
                f"global batch {self.training.global_batch} is not microbatch x {self.training.num_microbatches} "
                f"microbatches x {self.data_parallel_degree} data-parallel groups"
            )
        return self
