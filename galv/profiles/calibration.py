"""Folds a training run into a profile: which term of the estimate was off, and by how much it is corrected.

A run tells how long a stage was busy, not which part of that was computation and which was communication that showed.
Of all corrections that explain the busy time the smallest one is taken: the term that makes up more of it is corrected
more. Clipping and the update, and the memory, are told apart by the run itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galv.profiles.cluster import ClusterProfile
from galv.profiles.device import DeviceProfile
from galv.profiles.link import LinkProfile
from galv.profiles.measured import PROFILE_VERSION, Correction, MeasuredProfile, Measurement, Provenance
from galv.profiles.readings import DeviceReadings, LinkReadings
from galv.profiles.run_record import RunRecord

SOURCE = "corrected by galv calibrate"
BOUNDS = (0.05, 20.0)


@dataclass(frozen=True)
class Factors:
    """What each term is to be multiplied by, and the bytes that every device holds beyond the estimate."""

    compute: float
    communication: float
    update: float
    more_bytes: int


def factors(record: RunRecord) -> Factors:
    """What the run says of the estimate; sums over stages, the fullest stage for memory."""
    compute = sum(stage.compute_seconds for stage in record.predicted)
    sent = sum(stage.busy_seconds - stage.compute_seconds for stage in record.predicted)
    busy = sum(stage.busy_seconds for stage in record.stages)
    missing, scale = busy - compute - sent, compute**2 + sent**2
    updates = [sum(stage.optimizer_seconds for stage in side) for side in (record.stages, record.predicted)]
    more = max(
        (real.peak_bytes - said.peak_bytes for real, said in zip(record.stages, record.predicted, strict=True)),
        key=abs,
    )
    return Factors(
        compute=_bounded(1 + missing * compute / scale) if scale else 1.0,
        communication=_bounded(1 + missing * sent / scale) if scale else 1.0,
        update=_bounded(updates[0] / updates[1]) if min(updates) > 0 else 1.0,
        more_bytes=more,
    )


def _bounded(factor: float) -> float:
    return min(max(factor, BOUNDS[0]), BOUNDS[1])


def corrections(record: RunRecord, run: str) -> tuple[Correction, ...]:
    """Every term of the estimate beside what the run says of it: seconds of a step, bytes of the fullest device."""
    found = factors(record)
    compute = sum(stage.compute_seconds for stage in record.predicted)
    sent = sum(stage.busy_seconds - stage.compute_seconds for stage in record.predicted)
    update = sum(stage.optimizer_seconds for stage in record.predicted)
    peak = max(stage.peak_bytes for stage in record.predicted)
    terms = (
        ("compute", compute, compute * found.compute),
        ("communication", sent, sent * found.communication),
        ("optimizer", update, update * found.update),
        ("memory", float(peak), float(max(stage.peak_bytes for stage in record.stages))),
    )
    return tuple(Correction(run=run, term=term, predicted=said, measured=real) for term, said, real in terms)


def calibrated(profile: MeasuredProfile, record: RunRecord, run: str) -> MeasuredProfile:
    """`profile` with the setting that the run's plan was priced by corrected by the run."""
    found = factors(record)
    target = profile.setting(record.devices_per_node, record.num_nodes)
    settings = tuple(_corrected(setting, found) if setting is target else setting for setting in profile.settings)
    told = (*profile.corrections, *corrections(record, run))
    return profile.model_copy(update={"settings": settings, "corrections": told})


def _corrected(setting: Measurement, found: Factors) -> Measurement:
    device = setting.device
    known = device.measured or DeviceReadings()
    units = tuple(unit.model_copy(update={"seconds": unit.seconds * found.compute}) for unit in known.units)
    readings = known.model_copy(
        update={
            "units": units,
            "compute_scale": _bounded(known.compute_scale * found.compute),
            "update_scale": _bounded(known.update_scale * found.update),
        }
    )
    context = min(max(device.context_bytes + found.more_bytes, 0), device.memory_bytes - 1)
    sources = device.sources | {"measured": SOURCE, "context_bytes": SOURCE}
    update = {"measured": readings, "context_bytes": context, "sources": sources}
    return setting.model_copy(
        update={
            "device": device.model_copy(update=update),
            "intra_node": _corrected_link(setting.intra_node, found.communication),
            "inter_node": _corrected_link(setting.inter_node, found.communication),
        }
    )


def _corrected_link(link: LinkProfile, factor: float) -> LinkProfile:
    known = link.measured or LinkReadings(collectives=())
    readings = known.model_copy(update={"scale": _bounded(known.scale * factor)})
    return link.model_copy(update={"measured": readings, "sources": link.sources | {"measured": SOURCE}})


def profile_of(cluster: ClusterProfile, *, torch: str, date: str) -> MeasuredProfile:
    """A profile of a shipped device, which has not been measured, to be corrected by a run on it."""
    device: DeviceProfile = cluster.device
    setting = Measurement(
        processes=cluster.devices_per_node,
        num_nodes=cluster.num_nodes,
        device=device,
        intra_node=cluster.intra_node,
        inter_node=cluster.inter_node,
    )
    made = Provenance(device=device.name, driver="as shipped with galv", torch=torch, date=date, num_cores=1)
    return MeasuredProfile(schema_version=PROFILE_VERSION, name=device.name, provenance=made, settings=(setting,))


def told(found: Sequence[Correction]) -> str | None:
    """The term of the step's time that was off by most seconds; None where none was."""
    seen = [item for item in found if item.term != "memory" and item.measured != item.predicted]
    return max(seen, key=lambda item: abs(item.measured - item.predicted)).term if seen else None
