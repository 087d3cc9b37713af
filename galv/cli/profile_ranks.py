"""The processes behind `galv profile`: started here, or found under torchrun; what they measured, as words."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from galv.cli.files import write_text
from galv.cli.progress import progress
from galv.errors import RunError, UsageError
from galv.planner.capture.timing import UnitsRequest, time_units
from galv.planner.plan import Precision
from galv.planner.plan_table import seconds, table
from galv.profiles.measure.machine import Wish, profile_rank
from galv.profiles.measure.ranks import join
from galv.profiles.measure.session import Progress
from galv.profiles.measured import UNSTEADY, MeasuredProfile, read_measured
from galv.profiles.readings import UnitReading


@dataclass(frozen=True)
class Devices:
    """What is measured, by how many processes."""

    on_gpu: bool
    indices: tuple[int, ...]
    """GPUs, by torch's count; empty on a CPU."""
    nproc: int
    """On this node."""
    is_launched: bool
    """Whether torchrun started this process as one rank of several."""


def chosen_devices(devices: str | None, nproc: int | None, environment: Mapping[str, str]) -> Devices:
    """The devices that the command line names. Raises UsageError for those that are not there."""
    is_launched = "RANK" in environment and "WORLD_SIZE" in environment
    if is_launched and nproc is not None:
        raise UsageError("--nproc starts processes, and torchrun has started them already; leave one of the two out")
    present = torch.cuda.device_count()
    match = re.fullmatch(r"cpu|cuda(:\d{1,4}(,\d{1,4})*)?", devices or ("cuda" if present else "cpu"))
    if match is None:
        raise UsageError(f"--devices is cpu, cuda, or GPUs by number such as cuda:0,2, not {devices!r}")
    if match[0] == "cpu":
        return Devices(False, (), nproc or int(environment.get("LOCAL_WORLD_SIZE", "1")), is_launched)
    indices = tuple(map(int, match[1][1:].split(","))) if match[1] else tuple(range(present))
    if not indices or max(indices) >= present:
        raise UsageError(
            f"{devices} was asked for, and this machine has {present} GPUs; --devices cpu measures its CPU"
        )
    if nproc is not None and nproc > len(indices):
        raise UsageError(f"{nproc} processes need as many GPUs; {devices or 'cuda'} are {len(indices)}")
    return Devices(True, indices, nproc or len(indices), is_launched)


def wish(output: Path, *, quick: bool, minutes: float | None) -> Wish:
    """What is to be measured."""
    allowed = minutes or (1.2 if quick else 10.0)
    return Wish(output.stem, output.with_name(f".{output.name}.partial"), quick, 60.0 * allowed)


def measure_machine(wish: Wish, devices: Devices, output: Path) -> bool:
    """Writes the profile to `output`; whether this process is the one that goes on to speak of it."""
    if devices.is_launched:
        _launched(wish, devices, output)
        return int(os.environ["RANK"]) == 0
    if devices.nproc == 1:
        _measure(wish, devices, 0, None, output)
        return True
    with tempfile.TemporaryDirectory() as folder, _threads_shared(devices):
        arguments = (wish, devices, str(Path(folder, "store")), output)
        try:
            mp.start_processes(_spawned, arguments, nprocs=devices.nproc, start_method="spawn")
        except mp.ProcessExitedException as error:
            raise RunError(f"a measuring process ended: {error}; `galv profile` goes on where it stopped") from error
    return True


@contextmanager
def _threads_shared(devices: Devices) -> Iterator[None]:
    """Children start with a fair share of the cores."""
    known = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices.nproc)))
    try:
        yield
    finally:
        if known is None:
            os.environ.pop("OMP_NUM_THREADS", None)


def _spawned(rank: int, wish: Wish, devices: Devices, store: str, output: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(devices.nproc))
    _measure(wish, devices, rank, dist.FileStore(store, devices.nproc), output)


def _launched(wish: Wish, devices: Devices, output: Path) -> None:
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    _measure(wish, replace(devices, nproc=int(os.environ.get("LOCAL_WORLD_SIZE", world_size))), rank, store, output)


def _measure(wish: Wish, devices: Devices, rank: int, store: dist.Store | None, output: Path) -> None:
    """One rank; rank 0 writes the file."""
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if store is not None else 1
    local = devices.indices[int(os.environ.get("LOCAL_RANK", "0")) % len(devices.indices)] if devices.on_gpu else 0
    device = join(store, rank, world_size, gpu=local if devices.on_gpu else None)
    with _display(rank) as told:
        found = profile_rank(wish, device, devices.nproc, max(1, world_size // devices.nproc), told)
    if found is not None:
        write_text(found.to_json(), output, "the profile")
        if wish.partial is not None:
            wish.partial.unlink(missing_ok=True)
        if found.provenance.unsteady > UNSTEADY:
            print(_warning(found), file=sys.stderr)
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _display(rank: int) -> Iterator[Progress]:
    if rank != 0:
        yield lambda text, done, total: None
        return
    with progress() as reporter:
        last = [""]

        def told(text: str, done: int, total: int) -> None:
            if text != last[0]:
                reporter.phase(text)
                last[0] = text
            reporter.progress(done, total)

        yield told


def _warning(found: MeasuredProfile) -> str:
    return (
        f"galv: this machine is unsteady: equal work varied by {100 * found.provenance.unsteady:.0f} %. Estimates from "
        "this profile say so; for better ones measure while nothing else runs"
    )


# ----------------------------------------------------------------------------------------------- the units of a model


def add_units(
    output: Path,
    devices: Devices,
    model: str,
    inputs: str | None,
    *,
    seq_len: int | None,
    precision: Precision | None,
    micro_batches: Sequence[int] | None,
    units: Sequence[str] | None,
    minutes: float | None,
) -> None:
    """Times the units of `model` in every setting of the profile at `output` and adds them to it.

    What is timed already stays, and costs nothing.
    """
    profile = read_measured(str(output))
    device = profile.settings[0].device
    request = UnitsRequest(
        model=model,
        inputs=inputs,
        seq_len=seq_len,
        precision=precision or ("bf16" if device.kind == "cuda" and "bf16" in device.dtypes else "fp32"),
        samples=tuple(sorted(set(micro_batches or (1, 2, 4)))),
        units=None if units is None else tuple(units),
        seconds=60.0 * (minutes or 5.0) / len(profile.settings),
        device=f"cuda:{devices.indices[0]}" if devices.on_gpu else "cpu",
    )
    if (device.kind == "cuda") != devices.on_gpu:
        raise UsageError(
            f"{output} is a profile of {profile.provenance.device}; write another file for {request.device}"
        )
    for setting in profile.settings:
        measured = setting.device.measured
        known = () if measured is None else measured.units
        with _display(0) as told:
            readings = _timed_together(replace(request, known=known), 1 if devices.on_gpu else setting.processes, told)
        profile = profile.with_units(setting.processes, readings)
        write_text(profile.to_json(), output, "the profile")


def _timed_together(request: UnitsRequest, processes: int, told: Progress) -> tuple[UnitReading, ...]:
    """What one of `processes` reads that all time the same at the same time, without any communication."""
    if processes == 1:
        return time_units(request, None, told)
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    share = max(1, (os.cpu_count() or 1) // processes)
    others = [
        context.Process(target=_time_units, args=(request, barrier, share, None), daemon=True)
        for _ in range(processes - 1)
    ]
    first = context.Process(target=_time_units, args=(request, barrier, share, results), daemon=True)
    for process in (first, *others):
        process.start()
    told(f"timing units with {processes} processes at work", 0, 1)
    try:
        while results.empty():
            first.join(0.2)
            if not first.is_alive() and results.empty():
                raise RunError(f"timing the units failed (exit status {first.exitcode}); its message stands above")
        found: tuple[UnitReading, ...] = results.get()
    finally:
        for process in (first, *others):
            process.kill()
            process.join()
    return found


def _time_units(request: UnitsRequest, barrier: object, share: int, results: object) -> None:
    torch.set_num_threads(share)
    found = time_units(request, barrier.wait, lambda *_: None)  # type: ignore[attr-defined]
    if results is not None:
        results.put(found)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------- in words


def described(path: Path) -> str:
    """The profile at `path` in a few lines."""
    profile = read_measured(str(path))
    made = profile.provenance
    rows: list[tuple[str, ...]] = [("at work", "readings", "matmul", "memory", "operator", "overlap", "spread")]
    for setting in profile.settings:
        device, links = setting.device, (setting.intra_node, setting.inter_node)
        assert device.measured is not None
        readings = device.measured
        count = len(readings.matmul) + len(readings.attention) + len(readings.traffic) + len(readings.units)
        count += sum(len(link.measured.collectives) for link in links if link.measured is not None)
        best = max(device.best_flops(reading.dtype) for reading in readings.matmul) if readings.matmul else 0.0
        rows.append(
            (
                f"{setting.processes} x {setting.num_nodes}",
                str(count),
                f"{best / 1e12:.3g} TFLOP/s",
                f"{device.achieved_bytes_per_second / 1e9:.3g} GB/s",
                seconds(device.launch_seconds),
                f"x{device.overlap.compute_link:.2f}",
                f"{100 * readings.spread:.0f} %",
            )
        )
    dropped = f", {made.dropped} points left out for time or memory" if made.dropped else ""
    devices, nodes = profile.shape
    return (
        f"{made.device}, torch {made.torch}, {made.date}: measured in {made.seconds:.0f} s{dropped}\n\n"
        f"{table(rows, right=range(1, 7))}\n\nProfile written to {path}; plan with --cluster {path}:{devices}x{nodes}"
    )
