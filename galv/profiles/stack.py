"""What a training software does to a model, apart from the device that it runs on.

Two programs that train the same model on the same devices in the same layout differ: in which kernels are fused, in
how long their host needs to issue them, in the dtype and the buckets of their gradients, in what they keep for
backward. A stack holds these differences as few figures with sources, so that device profiles hold for all software.

Plans are made for galv's own runtime, which needs no stack: its kernels and its saved tensors come from the captured
graph. A stack is what `galv.estimate(..., stack=NAME)` prices a layout with, to compare with runs of other software.
Shipped stacks are JSON files in `stacks/`; a file may name another in `like` and give only what differs. No torch here.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from importlib.abc import Traversable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from galv.errors import UnknownName
from galv.profiles.device import Rate, Seconds, read_figures

MAX_FITTED = 10
WIDE_JOB_NODES = 32
Level = Field(ge=0)


class StackProfile(BaseModel):
    """The figures of one training software. Bytes, seconds; shares are of 1 unless they say otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    # -- kernels
    norms: Literal["eager", "fp32", "fused"] = "fused"
    """Norms as the captured eager operators, as one kernel in fp32 between copies (what autocast makes of them and of
    the residual stream), or as one kernel."""
    rotary: Literal["eager", "fused"] = "fused"
    """What turns queries and keys: the captured eager operators or one kernel."""
    activation: Literal["eager", "fused"] = "fused"
    """A gated activation: the captured eager operators or one kernel."""
    elementwise_factor: float = Field(1.0, gt=0)
    """Time of these kernels over what their traffic takes at the device's rate."""
    product_share: Rate = 1.0
    """Rate of matrix products over the device profile's: older libraries, lower clocks."""
    loss_bytes_per_logit: float = Field(44.0, ge=0)
    """Memory traffic of the loss for one logit, forward and backward."""
    flash_share: Rate = 1.0
    """Speed of the fused attention kernel over the one that the device profile describes."""
    score_passes: float = Field(9.0, ge=0)
    """Unfused attention: reads and writes of the half-precision score matrix, forward and backward together."""
    # -- host
    host_seconds_per_block: Seconds = 2e-3
    """Host time to issue one block, forward and backward; a third of it is forward's."""
    host_seconds_per_collective: Seconds = 0.0
    """Host time to issue one collective of the tensor axis, beyond that of an operator."""
    stall_seconds: Seconds = 0.0
    """Waiting of one block, forward and backward, where a pipeline over several nodes meets tensor parallelism of
    degree 8; in proportion at other degrees. It does not add to computation that takes longer."""
    microbatch_seconds: Seconds = 0.0
    """Each microbatch, whatever its size: p2p set-up, Python of the schedule."""
    wide_job_stall_seconds: Seconds = 0.0
    """Each exchange between pipeline stages, in a job on more than `WIDE_JOB_NODES` nodes, which lie in several blocks
    of the network."""
    step_seconds: Seconds = 0.0
    """Each step, whatever the model: data loading, logging, synchronization."""
    # -- communication
    network_share: float = Field(1.0, gt=0)
    """What the stack reaches of the network's rate in the cluster profile."""
    network_hop_seconds: Seconds = 0.0
    """Added to each hop between nodes."""
    node_decay: float = Field(0.0, ge=0, le=1)
    """The network's rate falls as (2 / nodes) to this power beyond two nodes, see `LinkProfile.node_decay`."""
    gather_overlap: float = Field(0.0, ge=0, le=1)
    """Share of a block's computation that can hide all-gathers of the tensor axis."""
    gradient_overlap: float = Field(0.0, ge=0, le=1)
    """Share of the last backward that gradient reduction can hide behind (of each forward and backward at ZeRO 3)."""
    bucket_bytes: float = Field(2.5e8, gt=0)
    """Gradients are reduced in calls of this size."""
    reduce_bytes: float = Field(4.0, gt=0)
    """Bytes of a gradient on its way through the network."""
    all_reduce_bytes: float | None = Field(None, gt=0)
    """The same where nothing is sharded, when it differs."""
    # -- the optimizer
    update_bytes: float = Field(34.0, gt=0)
    """Memory traffic of the update of one parameter."""
    # -- memory
    parameter_bytes: float = Level
    """Of one parameter as computed with."""
    gradient_bytes: float = Level
    """Of one gradient as accumulated."""
    optimizer_bytes: float = Level
    """Of the state of one parameter: master copy, moments."""
    saved_share: float = Field(1.0, ge=0)
    """How much of what eager PyTorch keeps for backward beyond the inputs of products, attention, activation and norms
    is kept."""
    keeps_gathered: bool = False
    """Whether gathered inputs of tensor-parallel products are kept for backward rather than gathered again."""
    prefetches: bool = True
    """Whether ZeRO 3 gathers the next unit's parameters while one computes."""
    score_bytes: float = Level
    """Unfused attention: bytes kept for one score."""
    score_working_bytes: float = Field(0.0, ge=0)
    """Unfused attention: bytes alive for one score while one block's backward runs, beyond what is kept."""
    logit_bytes: float = Level
    """Bytes alive at the peak for one logit."""
    overhead_bytes: float = Field(0.0, ge=0)
    """Held whatever the model: workspaces, communication buffers inside the allocator."""
    # -- habits
    logits: Literal["sharded", "gathered"] = "sharded"
    """Whether the loss works on the logits that each rank of the tensor axis made, or on all, gathered."""
    holds_logits: bool = False
    """Whether what the loss made of the logits lives on while the last block recomputes."""
    cut: Literal["even", "cost"] = "even"
    """How blocks go to pipeline stages: the same number to each, or by the FLOPs of blocks and output layer."""
    fitted: tuple[str, ...] = Field((), max_length=MAX_FITTED)
    """The figures that were fitted to published runs, at most 10."""
    priors: dict[str, float] = Field(default_factory=dict)
    """What was expected of the fitted figures before any run, by counting kernels or from the manual: the start and
    the anchor of the fit, and the value where the software's own runs are left out."""
    sources: dict[str, str]
    """For each figure that is not a default: where it was read, or which runs fixed it."""

    @model_validator(mode="after")
    def _sourced(self) -> StackProfile:
        figures = set(type(self).model_fields) - {"name", "fitted", "priors", "sources"}
        if missing := sorted((self.model_fields_set & figures) - set(self.sources)):
            raise ValueError(f"no source given for {', '.join(missing)}")
        if unknown := sorted((set(self.fitted) | set(self.priors) | set(self.sources)) - figures):
            raise ValueError(f"no such figures: {', '.join(unknown)}")
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.elementwise_factor, self.host_seconds_per_block, self.saved_share))


def stack_names() -> tuple[str, ...]:
    """The names of the shipped stacks, sorted."""
    files = (file.name for file in _library().iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


@lru_cache
def load_stack(name: str) -> StackProfile:
    """The shipped stack called `name`. Raises UnknownName, listing the valid names."""
    return read_figures(StackProfile, _figures(name), f"stack {name}")


def _library() -> Traversable:
    return resources.files("galv.profiles").joinpath("stacks")


def _figures(name: str) -> dict[str, Any]:
    """The file of stack `name` over that of the one it is like."""
    if name not in stack_names():
        raise UnknownName("stack", name, stack_names())
    text = _library().joinpath(f"{name}.json").read_text(encoding="utf-8")
    own: dict[str, Any] = json.loads(text)
    like = own.pop("like", None)
    if like is None:
        return own
    base = _figures(like)
    fitted = dict.fromkeys([*base.get("fitted", ()), *own.get("fitted", ())])
    joined = {part: {**base.get(part, {}), **own.get(part, {})} for part in ("priors", "sources")}
    return {**base, **own, **joined, "fitted": tuple(fitted)}


__all__ = ["MAX_FITTED", "StackProfile", "load_stack", "stack_names"]
