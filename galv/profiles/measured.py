"""A machine as `galv profile` found it: the file that it writes, and which part of it a cluster takes.

The processes of one machine share its cores and links, so what one of them can do depends on how many are at work.
A profile has a setting for each number that was measured.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from galv.errors import ClusterError
from galv.profiles.device import DeviceProfile
from galv.profiles.link import LinkProfile
from galv.profiles.readings import UnitReading

PROFILE_VERSION: Final = 1
_SPEC = re.compile(r"(?P<path>.*\.json)(:(?P<devices>[0-9]{1,7})x(?P<nodes>[0-9]{1,7}))?")


class Provenance(BaseModel):
    """Where and when the figures were taken."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    driver: str
    """Of the GPU, or the operating system's for a CPU."""
    torch: str
    date: str
    """ISO 8601, UTC."""
    num_cores: int = Field(ge=1)
    quick: bool = False
    """Whether the small grid was measured."""
    unsteady: float = Field(0.0, ge=0)
    """How much a fixed piece of work varied while measuring: its spread, 0 to 1 and more."""
    dropped: int = Field(0, ge=0)
    """Points of the grid that time or memory did not allow."""
    seconds: float = Field(0.0, ge=0)


class Measurement(BaseModel):
    """What one device and its links can do while `processes` of each of `num_nodes` nodes are at work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processes: int = Field(ge=1)
    num_nodes: int = Field(1, ge=1)
    device: DeviceProfile
    intra_node: LinkProfile
    inter_node: LinkProfile


class Correction(BaseModel):
    """What a training run said of the profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    term: str
    """compute, communication, optimizer or memory."""
    predicted: float
    measured: float


class MeasuredProfile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = PROFILE_VERSION
    name: str
    provenance: Provenance
    settings: tuple[Measurement, ...] = Field(min_length=1)
    corrections: tuple[Correction, ...] = ()
    """Folded in by `galv calibrate`, oldest first."""

    @property
    def shape(self) -> tuple[int, int]:
        """(devices per node, nodes) of the largest setting."""
        largest = max(self.settings, key=lambda s: (s.num_nodes, s.processes))
        return largest.processes, largest.num_nodes

    def setting(self, processes: int, num_nodes: int) -> Measurement:
        """The setting nearest to `processes` at work on each of `num_nodes` nodes: never fewer where there are more."""

        def distance(setting: Measurement) -> tuple[bool, int, bool, int]:
            nodes, own = setting.num_nodes, setting.processes
            return nodes < num_nodes, abs(nodes - num_nodes), own < processes, abs(own - processes)

        return min(self.settings, key=distance)

    def notes(self, processes: int, num_nodes: int) -> tuple[str, ...]:
        """What a plan priced by this profile has to say."""
        made = self.provenance
        said = [f"priced by the profile {self.name}, measured on {made.device} with torch {made.torch} on {made.date}"]
        if self.corrections:
            said[0] += f", corrected by {len({c.run for c in self.corrections})} training runs"
        if made.unsteady > UNSTEADY:
            said.append(
                f"the machine was unsteady while it was measured (equal work varied by {100 * made.unsteady:.0f} %)"
            )
        found = self.setting(processes, num_nodes)
        if (found.processes, found.num_nodes) != (processes, num_nodes):
            said.append(
                f"{processes} devices on {num_nodes} nodes are priced as {found.processes} on {found.num_nodes}, which "
                "is what was measured"
            )
        return tuple(said)

    def with_units(self, processes: int, units: tuple[UnitReading, ...]) -> MeasuredProfile:
        """The profile with more units timed; what was timed before of the same stays unless it is timed anew."""
        settings = tuple(
            _with_units(setting, units) if setting.processes == processes else setting for setting in self.settings
        )
        return self.model_copy(update={"settings": settings})

    def to_json(self) -> str:
        """The file's text."""
        return self.model_dump_json(indent=1, exclude_unset=True) + "\n"


UNSTEADY = 0.1
"""Spread of a fixed piece of work above which a machine is called unsteady."""


def _with_units(setting: Measurement, units: tuple[UnitReading, ...]) -> Measurement:
    measured = setting.device.measured
    assert measured is not None, "a measured device has readings"
    known = {unit_place(reading): reading for reading in (*measured.units, *units)}
    readings = measured.model_copy(update={"units": tuple(known.values())})
    device = setting.device.model_copy(update={"measured": readings})
    return setting.model_copy(update={"device": device})


def unit_place(reading: UnitReading) -> tuple[str, str, str, int]:
    """What one timing of a unit is of."""
    return reading.unit, reading.dtype, reading.phase, reading.samples


def split_spec(spec: str) -> tuple[str, tuple[int, int] | None] | None:
    """(path, (devices per node, nodes) or None) of `PROFILE.json[:AxB]`; None for a text that is no such thing."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        return None
    return match["path"], (int(match["devices"]), int(match["nodes"])) if match["devices"] else None


def read_measured(path: str) -> MeasuredProfile:
    """The profile in the file at `path`. Raises ClusterError saying what is wrong with it."""
    try:
        return _parsed(path, Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(
            f"cannot read the profile {path}: {error.strerror}; galv profile -o {path} makes it"
        ) from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path} is no profile: it is not text") from error


@lru_cache(maxsize=8)
def _parsed(path: str, text: str) -> MeasuredProfile:
    try:
        return MeasuredProfile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ClusterError(f"{path} is no profile of galv's: {place + ': ' if place else ''}{first['msg']}") from error
