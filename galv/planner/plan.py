"""A plan: everything needed to run a model in parallel, as frozen data with an exact JSON form.

This module decides nothing and imports nothing of galv but its parts: layouts, costs, checks, files, its face. It says
what a plan *is*: which units form which pipeline stage, which strategy each unit has, how its tensors lie, the training
set-up that it was made for, its estimated cost, and the model it belongs to. `planner` writes plans, `runtime` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, model_validator

from galv.planner.costs import Alternative as Alternative
from galv.planner.costs import Estimate as Estimate
from galv.planner.costs import MemoryBreakdown as MemoryBreakdown
from galv.planner.costs import SearchReport as SearchReport
from galv.planner.costs import StageEstimate as StageEstimate
from galv.planner.costs import TimeBreakdown as TimeBreakdown
from galv.planner.costs import UnitEstimate as UnitEstimate
from galv.planner.layout import ContextMode as ContextMode
from galv.planner.layout import ExpertLayout as ExpertLayout
from galv.planner.layout import ExpertsModule as ExpertsModule
from galv.planner.layout import Frozen as Frozen
from galv.planner.layout import Layout as Layout
from galv.planner.layout import LocalArgument as LocalArgument
from galv.planner.layout import ModuleLayout as ModuleLayout
from galv.planner.layout import Redistribution as Redistribution
from galv.planner.layout import SequenceCut as SequenceCut
from galv.planner.layout import SequenceLayout as SequenceLayout
from galv.planner.layout import SequenceMode as SequenceMode
from galv.planner.layout import TensorParallelLayout as TensorParallelLayout
from galv.planner.layout import absolute_name as absolute_name
from galv.planner.plan_checks import faults, repeated
from galv.planner.plan_file import check_version, write_whole

SCHEMA_VERSION: Final = 1
MAX_GLOBAL_BATCH: Final = 2**40
"""Samples of one optimizer step."""
MAX_SEQ_LEN: Final = 2**24
"""Tokens of one sample."""
MAX_DEVICES: Final = 2**20

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "sgd"]
ScheduleName = Literal["none", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]
Offload = Literal["activations", "optimizer", "parameters"]
DtypeName = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
"""torch's names of the dtypes that an input can have."""

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**62)]
Samples = Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH)]
Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


# ----------------------------------------------------------------------------------------------- the plan's parts


class Strategy(Frozen):
    """How one unit runs on the devices of its stage: `tp * cp * dp_shard * dp_replicate` is their number.

    Ranks of a stage count through the tensor axis first, then the context axis, then the shard and the replicate axis.
    """

    tp: int = Field(1, ge=1)
    sequence: SequenceMode = "none"
    """How activations are sharded along the sequence. `megatron`: over the tensor axis, between tensor-parallel
    regions. `ulysses` and `ring`: over a context axis of `cp` ranks, throughout the unit; attention exchanges heads
    for sequence (all-to-all), or keys and values around a ring."""
    dp_shard: int = Field(1, ge=1)
    dp_replicate: int = Field(1, ge=1)
    zero: int = Field(0, ge=0, le=3)
    """0 nothing sharded, 1 optimizer state, 2 gradients too, 3 parameters too; sharded over `dp_shard`."""
    recompute: Recompute = "none"
    cp: Devices = 1
    """Context-parallel degree."""
    ep: int = Field(1, ge=1)
    """Expert-parallel degree: experts are shared out over that many neighbouring data-parallel ranks."""
    offload: tuple[Offload, ...] = ()
    """What lies in the host's memory while it is not used; sorted."""

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
        if self.sequence in ("ulysses", "ring") and self.cp == 1:
            raise ValueError(f"sequence sharding {self.sequence!r} needs cp > 1")
        if self.dp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide the {self.dp} data-parallel ranks")
        if tuple(sorted(set(self.offload))) != self.offload:
            raise ValueError(f"offload must be sorted and name each thing once, not {self.offload}")
        return self

    def __str__(self) -> str:
        parts = [f"tp{self.tp}" + ("+seq" if self.sequence == "megatron" else "")] if self.tp > 1 else []
        if self.cp > 1:
            parts.append(f"cp{self.cp}" + (f" {self.sequence}" if self.sequence in ("ulysses", "ring") else ""))
        if self.dp > 1:
            groups = f"{self.dp_replicate}x{self.dp_shard}" if self.zero and self.dp_replicate > 1 else f"{self.dp}"
            parts.append(f"dp{groups}" + (f" zero{self.zero}" if self.zero else ""))
        if self.ep > 1:
            parts.append(f"ep{self.ep}")
        if self.recompute != "none":
            parts.append(f"{self.recompute} recompute")
        parts += [f"{what} offloaded" for what in self.offload]
        return " ".join(parts) or "undivided"


class Unit(Frozen):
    """The smallest piece of the model that gets one strategy."""

    name: Name
    unit_class: Name
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

    @property
    def can_recompute(self) -> bool:
        """Whether its forward can be run again: it is one module, and not what begins or ends the model."""
        return len(self.modules) == 1 and not self.parameters and self.name not in ("embedding", "head")

    @model_validator(mode="after")
    def _consistent(self) -> Unit:
        if self.strategy.recompute != "none" and not self.can_recompute:
            raise ValueError(f"unit {self.name} cannot recompute; only repeated blocks of one module can")
        return self


class Stage(Frozen):
    """Consecutive units on one sub-mesh."""

    units: tuple[Unit, ...]


class InputSpec(Frozen):
    """One tensor that the model takes, for one microbatch of one sample group."""

    name: Name
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_GLOBAL_BATCH)], ...], Field(max_length=64)]
    """Global shape for `Model.sample_batch` samples."""
    dtype: DtypeName
    batch_dim: int | None = Field(ge=0)
    """The dim that counts samples, None when the input is the same for every sample."""
    high: int | None = Field(None, ge=1, le=2**63 - 1)
    """Integer inputs: exclusive upper bound of the values, for synthetic data."""

    @model_validator(mode="after")
    def _consistent(self) -> InputSpec:
        if self.batch_dim is not None and self.batch_dim >= len(self.shape):
            raise ValueError(f"batch_dim {self.batch_dim} of a tensor with {len(self.shape)} dims")
        return self


class Model(Frozen):
    """Which model the plan belongs to."""

    name: str
    source: str | None
    """MODEL as given on the command line; None when planned from an object in Python."""
    inputs_source: str | None = None
    """The --inputs factory, when one was given."""
    num_parameters: int = Field(ge=0, le=2**62)
    num_samples: Samples
    """Samples in `inputs`, along their batch dims."""
    inputs: tuple[InputSpec, ...] = Field(min_length=1)
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names that are one tensor."""
    fingerprint: str
    """Hash of the unit classes and of every parameter's name, shape and tie."""

    @model_validator(mode="after")
    def _consistent(self) -> Model:
        twice = repeated(spec.name for spec in self.inputs)
        if twice is not None:
            raise ValueError(f"two inputs are named {twice!r}")
        for spec in self.inputs:
            if spec.batch_dim is not None and (spec.shape[spec.batch_dim] or 1) % self.num_samples:
                raise ValueError(
                    f"input {spec.name}: dim {spec.batch_dim} of {spec.shape} holds no {self.num_samples} samples"
                )
        if all(spec.batch_dim is None for spec in self.inputs):
            raise ValueError("no input has a batch_dim")
        return self

    def input_shape(self, spec: InputSpec, num_samples: int) -> tuple[int, ...]:
        """The shape of one of `inputs` for that many samples."""
        if spec.batch_dim is None:
            return spec.shape
        length = spec.shape[spec.batch_dim] * num_samples // self.num_samples
        return (*spec.shape[: spec.batch_dim], length, *spec.shape[spec.batch_dim + 1 :])


class Training(Frozen):
    """The training set-up that the plan was made for."""

    seq_len: int | None = Field(ge=1, le=MAX_SEQ_LEN)
    """Tokens per sample; None when a sample has no tokens."""
    global_batch: Samples
    num_microbatches: Samples
    precision: Precision
    optimizer: OptimizerName
    stack: Name = "galv"
    """The software that the estimate is for."""


class Pipeline(Frozen):
    """`virtual_stages` model chunks on each of `degree` pipeline ranks, run in the order of `schedule`."""

    degree: Devices = 1
    schedule: ScheduleName = "none"
    virtual_stages: Devices = 1

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Positions among the plan's stages of the chunks that a pipeline rank holds, ascending.

        Chunks go round the ranks; under `zbv` they turn at the last rank and come back.
        """
        if self.schedule == "zbv":
            return rank, 2 * self.degree - 1 - rank
        return tuple(range(rank, self.degree * self.virtual_stages, self.degree))


class Cluster(Frozen):
    """The devices that the plan was priced for."""

    spec: str
    """CLUSTER as given on the command line."""
    device: str
    kind: Literal["cuda", "cpu"]
    """What torch calls such a device."""
    devices_per_node: Devices
    num_nodes: Devices
    memory_budget_bytes: Count
    """What one device may hold at most."""

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes


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
    experts: tuple[ExpertLayout, ...] = ()
    """One for each unit class that units use with ep > 1."""
    sequence_layouts: tuple[SequenceLayout, ...] = ()
    """One for each (unit class, degree, sequence mode) that the units use with cp > 1."""
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

    def units_of_rank(self, rank: int) -> tuple[Unit, ...]:
        """The units of one pipeline rank, those of all its chunks where stages are interleaved."""
        return tuple(unit for i in self.pipeline.stages_of_rank(rank) for unit in self.stages[i].units)

    @property
    def num_devices(self) -> int:
        """The world size that the plan runs on."""
        return self.cluster.num_devices

    @property
    def data_parallel_degree(self) -> int:
        """Groups that each take their own samples, in the first unit: it decides which samples a rank is fed with."""
        return self.stages[0].units[0].strategy.dp

    @property
    def data_degrees(self) -> tuple[int, ...]:
        """The data-parallel degrees of the units, ascending; more than one where units differ."""
        return tuple(sorted({unit.strategy.dp for unit in self.units()}))

    @property
    def micro_batch(self) -> int:
        """Samples that one data-parallel group of the first unit processes at once."""
        return self.samples_at(self.data_parallel_degree)

    def samples_at(self, degree: int) -> int:
        """Samples of a microbatch that each of `degree` data-parallel groups processes."""
        return self.training.global_batch // (self.training.num_microbatches * degree)

    def layout_of(self, unit: Unit) -> TensorParallelLayout | None:
        """The placements of `unit` on the tensor axis, None at tp 1."""
        mode = "megatron" if unit.strategy.sequence == "megatron" else "none"
        key = (unit.unit_class, unit.strategy.tp, mode)
        return next((x for x in self.layouts if (x.unit_class, x.degree, x.sequence) == key), None)

    def sequence_layout_of(self, unit: Unit) -> SequenceLayout | None:
        """How `unit` is cut along the sequence, None at cp 1."""
        key = (unit.unit_class, unit.strategy.cp, unit.strategy.sequence)
        return next((x for x in self.sequence_layouts if (x.unit_class, x.degree, x.mode) == key), None)

    def experts_of(self, unit: Unit) -> ExpertLayout | None:
        """Where the experts of `unit` are, None at ep 1."""
        return next((x for x in self.experts if x.unit_class == unit.unit_class and unit.strategy.ep > 1), None)

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
        check_version(text, SCHEMA_VERSION)
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{place}: {message}" if place else message) from error

    def save(self, path: str | Path) -> None:
        """Writes the plan to `path`, whole or not at all, see `write_whole`."""
        write_whole(self.to_json(), path)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        for fault in faults(self):
            raise ValueError(fault)
        return self
