"""One rank of a measurement from beginning to end: every setting in turn, then the profile."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist

from galv.profiles.measure import fit
from galv.profiles.measure.grid import Limits, Question, Sizes, questions, sizes_of
from galv.profiles.measure.ranks import Machine, counts_of, free_bytes, group_shapes, machine, place_of
from galv.profiles.measure.samples import Samples
from galv.profiles.measure.session import Pace, Progress, Setting, measure
from galv.profiles.measured import PROFILE_VERSION, MeasuredProfile, Provenance


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    name: str
    partial: Path | None
    """Where samples are kept until the profile is whole."""
    quick: bool
    seconds: float
    """All that the measurement may take."""
    sizes: Sizes | None = None
    """In place of the designed grid."""

    @property
    def pace(self) -> Pace:
        """Rounds and the length of samples."""
        rounds, least = (3, 0.002) if self.quick else (7, 0.01)
        return Pace(rounds, least, self.seconds)


def profile_rank(
    wish: Wish, device: torch.device, per_node: int, num_nodes: int, progress: Progress
) -> MeasuredProfile | None:
    """The profile on rank 0, None elsewhere. Collective over the default process group where there is one."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found, pace, on_gpu = machine(device, per_node), wish.pace, device.type == "cuda"
    samples = Samples(f"{found.key} quick {wish.quick}", wish.partial)
    _share(samples, is_first)
    pace.start()
    settings, dropped = [], 0
    counts = counts_of(per_node, num_nodes, on_gpu=on_gpu)
    limits = _limits(wish, device, per_node)
    for done, processes in enumerate(counts):
        asked, left_out = questions(
            wish.sizes or sizes_of(found.kind, quick=wish.quick),
            limits,
            device_kind=found.kind,
            groups=group_shapes(processes, num_nodes),
        )
        place, everyone = place_of(device, processes, per_node, num_nodes)
        if _takes_part(processes, per_node):
            _share_cores(found, processes)
            setting = Setting(processes, place, everyone, tuple(asked))
            measure(setting, samples, pace, progress, share=(done + 1) / len(counts), is_first=is_first)
        if is_first:
            samples.save()
        settings.append((processes, asked))
        dropped += left_out + sum(not samples.of((processes, q.key)) for q in asked)
        if dist.is_initialized():
            dist.barrier()
    if not is_first:
        return None
    return _profile(wish, found, samples, settings, num_nodes, dropped, pace)


def _takes_part(processes: int, per_node: int) -> bool:
    return not dist.is_initialized() or dist.get_rank() % per_node < processes


def _share(samples: Samples, is_first: bool) -> None:
    """Every rank gets what rank 0 finds in the file, lest they disagree on what is left to do."""
    if is_first:
        samples.load()
    if dist.is_initialized():
        held = [samples.seconds]
        dist.broadcast_object_list(held)
        samples.seconds = held[0]


def _limits(wish: Wish, device: torch.device, per_node: int) -> Limits:
    """What one question may cost; the same on every rank, as it must be."""
    flops = 2e9 if wish.quick else 2e10
    if device.type == "cuda":
        return _agreed(Limits(flops * 1e4, free_bytes(device) * 0.6))
    held = free_bytes(device) * 0.4 / per_node
    return _agreed(Limits(flops, min(held, (96 if wish.quick else 4096) * 2**20)))


def _agreed(limits: Limits) -> Limits:
    if not dist.is_initialized():
        return limits
    held = [limits]
    dist.broadcast_object_list(held)
    return held[0]


def _share_cores(found: Machine, processes: int) -> None:
    """As training does it: a fair share of the cores."""
    if found.kind == "cpu":
        torch.set_num_threads(max(1, found.num_cores // processes))


def _profile(
    wish: Wish,
    found: Machine,
    samples: Samples,
    settings: list[tuple[int, list[Question]]],
    num_nodes: int,
    dropped: int,
    pace: Pace,
) -> MeasuredProfile:
    taken = [(p, [(q, samples.of((p, q.key))) for q in asked]) for p, asked in settings]
    base = fit.like(found.name, found.kind, found.memory_bytes)
    measured = tuple(
        fit.measurement(
            rows,
            name=found.name if found.kind == "cuda" else "cpu",
            base=base,
            processes=processes,
            num_nodes=num_nodes,
            memory_bytes=found.memory_bytes,
            context_bytes=found.context_bytes,
        )
        for processes, rows in taken
    )
    made = Provenance(
        device=found.name,
        driver=found.driver,
        torch=torch.__version__,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        num_cores=found.num_cores,
        quick=wish.quick,
        unsteady=max(fit.unsteadiness(rows) for _, rows in taken),
        dropped=dropped,
        seconds=pace.clock() - pace.started,
    )
    return MeasuredProfile(schema_version=PROFILE_VERSION, name=wish.name, provenance=made, settings=measured)
