"""What `galv profile` read off a machine: medians with their spread, by shape or size. Data only, no torch.

Cost models take a reading in the place of their own curve where there is one, and interpolate between readings.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Traffic = Literal["elementwise", "adamw", "sgd", "clip", "to_host", "to_device"]
"""Work that is priced by bytes: element-wise operators, an optimizer's update, clipping, copies from and to a GPU."""
Phase = Literal["forward", "backward"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Reading(BaseModel):
    """One measured duration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: _Positive
    """Median."""
    spread: float = Field(ge=0, allow_inf_nan=False)
    """Half the distance between the quartiles, as a share of the median; wider where the machine was unsteady."""


class MatmulReading(Reading):
    dtype: str
    shape: tuple[_Positive, _Positive, _Positive, _Positive]
    """(batch, m, n, k)."""


class AttentionReading(Reading):
    dtype: str
    phase: Phase
    shape: tuple[_Positive, _Positive, _Positive, _Positive, _Positive, bool]
    """(batch, heads, query length, key length, head dim, causal)."""


class TrafficReading(Reading):
    kind: Traffic
    num_bytes: _Positive
    """Read and written together."""


class UnitReading(Reading):
    """One direction of one unit of a model, run alone on one device with nothing sharded."""

    unit: str
    """`unit_key` of its class: equal for units with the same work."""
    dtype: str
    phase: Phase
    samples: int = Field(ge=1)


class CollectiveReading(Reading):
    kind: Collective
    num_bytes: _Positive
    """The full tensor, as `cost_models.communication` counts."""
    size: int = Field(ge=2)
    """Members of each group; all ranks were in one group or another and communicated at the same time."""
    num_nodes: int = Field(1, ge=1)
    """Nodes of each group."""


class DeviceReadings(BaseModel):
    """All readings of one device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    matmul: tuple[MatmulReading, ...] = ()
    attention: tuple[AttentionReading, ...] = ()
    traffic: tuple[TrafficReading, ...] = ()
    units: tuple[UnitReading, ...] = ()
    compute_scale: float = Field(1.0, gt=0, le=100)
    """Seconds of a training step's computation over what the readings add up to; 1 until calibrated."""
    update_scale: float = Field(1.0, gt=0, le=100)
    """The same for clipping and the optimizer's update."""

    def __hash__(self) -> int:
        return hash((len(self.matmul), self.traffic[:1], self.units[:1], self.compute_scale, self.update_scale))

    @property
    def spread(self) -> float:
        """The usual spread of a reading."""
        return usual_spread(*self.matmul, *self.attention, *self.traffic, *self.units)


class LinkReadings(BaseModel):
    """All readings of one kind of link."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    collectives: tuple[CollectiveReading, ...]
    scale: float = Field(1.0, gt=0, le=100)
    """Seconds of a training step's collectives over what the readings add up to; 1 until calibrated."""

    def __hash__(self) -> int:
        return hash((len(self.collectives), self.collectives[:1], self.scale))

    @property
    def spread(self) -> float:
        """The usual spread of a reading."""
        return usual_spread(*self.collectives)


def usual_spread(*readings: Reading) -> float:
    """The median spread; 0 of none."""
    spreads = sorted(reading.spread for reading in readings)
    return spreads[len(spreads) // 2] if spreads else 0.0
