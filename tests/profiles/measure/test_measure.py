"""Measuring: what is asked, how often, in which order, and what is made of it. Clocks are made up where they matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from galv.profiles.measure import fit
from galv.profiles.measure.grid import Limits, Question, Sizes, questions, sizes_of
from galv.profiles.measure.machine import Wish, profile_rank
from galv.profiles.measure.ranks import counts_of, group_shapes
from galv.profiles.measure.samples import Samples
from galv.profiles.measure.sampling import repeats_for, spread, timed
from galv.profiles.measure.session import Pace, Setting, measure
from galv.profiles.measure.work import Place
from galv.profiles.measured import MeasuredProfile
from tests.distributed_pool import Pool
from tests.made_up_profile import FLOPS_PER_SECOND, LAUNCH_SECONDS, made_up_profile

TINY = Sizes(
    dtypes=("fp32",),
    sides=(16, 32),
    batched=((2, 8, 8, 8),),
    attention=((1, 2, 16, 8),),
    traffic=(4096, 16384),
    updates=(4096,),
    messages=(1024, 4096),
)


def _silent(text: str, done: int, total: int) -> None:
    """Nobody is told."""


# ----------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
@pytest.mark.parametrize("quick", [False, True])
def test_the_grid_asks_everything_once(device_kind: str, quick: bool) -> None:
    """Every question has a name of its own, the first is the fixed piece of work, and every kind occurs."""
    sizes = sizes_of(device_kind, quick=quick)  # type: ignore[arg-type]
    found, left_out = questions(sizes, Limits(1e18, 1e18), device_kind=device_kind, groups=((2, 1), (4, 1)))  # type: ignore[arg-type]

    assert left_out == 0
    assert len({question.key for question in found}) == len(found)
    assert found[0].kind == "reference"
    assert {q.kind for q in found} == {"reference", "launch", "matmul", "attention", "traffic", "collective", "overlap"}
    assert {q.size for q in found if q.collective == "p2p" and q.kind == "collective"} == {2}
    assert any(q.traffic == "to_host" for q in found) == (device_kind == "cuda")


def test_what_costs_too_much_is_left_out() -> None:
    """Limits of arithmetic and of memory leave points out and count them."""
    sizes = sizes_of("cpu", quick=False)
    every, _ = questions(sizes, Limits(1e18, 1e18), device_kind="cpu", groups=())
    some, left_out = questions(sizes, Limits(1e9, 2**24), device_kind="cpu", groups=())

    assert 0 < left_out == len(every) - len(some)
    assert all(question.flops <= 1e9 and question.held_bytes <= 2**24 for question in some)


def test_settings_and_groups() -> None:
    """A CPU is measured with few and with all processes at work; groups are every divisor, and those across nodes."""
    assert counts_of(6, 1, on_gpu=False) == (1, 2, 4, 6)
    assert counts_of(8, 1, on_gpu=True) == (8,)
    assert group_shapes(4, 1) == ((2, 1), (4, 1))
    assert group_shapes(4, 2) == ((2, 1), (4, 1), (2, 2), (8, 2))


# ----------------------------------------------------------------------------------------------- samples


def test_samples_are_as_long_as_the_clock_needs() -> None:
    """Short work is repeated; the time of one is told, with the device idle before and after."""
    ticks, calls = iter([10.0, 14.0]), []
    assert repeats_for(1e-3, 0.01) == 10
    assert repeats_for(5.0, 0.01) == 1
    assert timed(lambda: calls.append("work"), lambda: calls.append("idle"), lambda: next(ticks), 2) == 2.0
    assert calls == ["idle", "work", "work", "idle"]


def test_spread_is_wide_where_samples_are() -> None:
    """Half the distance of the quartiles over the median."""
    assert spread([1.0]) == 0.0
    assert spread([1.0, 1.0, 1.0]) == 0.0
    assert spread([0.8, 1.0, 1.2]) == pytest.approx(0.1)


class _Clock:
    """One second more every time it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def _setting(count: int) -> Setting:
    asked = [Question("reference", shape=(1, 8, 8, 8))]
    asked += [Question("matmul", shape=(1, 8, 8, i + 1)) for i in range(count)]
    return Setting(1, Place(torch.device("cpu"), {}), None, tuple(asked))


def test_rounds_are_interleaved() -> None:
    """Every question is sampled once a round, the fixed piece of work more often."""
    samples, setting = Samples("here"), _setting(13)
    measure(setting, samples, Pace(3, 0.1, 1e9, _Clock()), _silent, share=1.0, is_first=True)

    assert len(samples.of((1, setting.questions[0].key))) == 6
    assert all(len(samples.of((1, q.key))) == 3 for q in setting.questions[1:])


def test_measuring_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Time that runs out leaves samples in the file; the next measurement of the machine takes what is missing."""
    path, setting = tmp_path / "partial", _setting(5)
    first = Samples("here", path)
    pace = Pace(1, 0.1, 12.0, _Clock())
    pace.start()
    measure(setting, first, pace, _silent, share=1.0, is_first=True)
    first.save()
    taken = len(first.seconds)
    assert 0 < taken < 6

    second, told = Samples("here", path), []
    second.load()
    assert second.seconds == first.seconds
    measure(setting, second, Pace(1, 0.1, 1e9, _Clock()), lambda *x: told.append(x), share=1.0, is_first=True)
    assert len(second.seconds) == 6
    assert len(told) < 6

    other = Samples("elsewhere", path)
    other.load()
    assert other.seconds == {}


def test_half_a_file_counts_as_none(tmp_path: Path) -> None:
    """A file that was cut short is measured again."""
    path = tmp_path / "partial"
    path.write_text('{"machine": "here", "samples": [[1,')
    samples = Samples("here", path)
    samples.load()

    assert samples.seconds == {}


# ----------------------------------------------------------------------------------------------- what is made of them


def test_a_profile_has_the_machines_rates() -> None:
    """The fit finds the figures that the samples were made with."""
    one, two = made_up_profile().settings

    assert one.device.best_flops("fp32") == pytest.approx(FLOPS_PER_SECOND, rel=0.01)
    assert one.device.launch_seconds == pytest.approx(LAUNCH_SECONDS)
    assert two.device.overlap.compute_link == pytest.approx(1.5)  # 0.12 together, 0.1 the longer, 0.04 the shorter
    assert one.device.measured is not None
    assert one.device.measured.spread == pytest.approx(0.05)


def test_an_unsteady_machine_spreads_wider() -> None:
    """Where equal work varies, no reading is told to be surer than that."""
    asked = [Question("reference", shape=(1, 64, 64, 64)), Question("matmul", shape=(1, 8, 8, 8))]
    taken = [(asked[0], [1.0, 2.0, 3.0]), (asked[1], [1.0, 1.0, 1.0])]
    found = fit.measurement(
        taken, name="cpu", base="cpu", processes=1, num_nodes=1, memory_bytes=2**32, context_bytes=2**28
    )

    assert fit.unsteadiness(taken) == pytest.approx(0.25)
    assert found.device.measured is not None
    assert [reading.spread for reading in found.device.measured.matmul] == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(
    ("name", "gib", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm-80"),
        ("NVIDIA A100-PCIE-80GB", 80, "a100-pcie-80"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-sxm-40"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA H200", 141, "h200-sxm-141"),
        ("Something else", 16, "a100-sxm-80"),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, gib: int, entry: str) -> None:
    """What torch calls a device leads to the shipped profile that lends what cannot be timed."""
    assert fit.like(name, "cuda", gib * 2**30) == entry


# ----------------------------------------------------------------------------------------------- for real


def _wish(partial: Path | None = None) -> Wish:
    return Wish("tiny", partial, quick=True, seconds=20.0, sizes=TINY)


def _rank() -> MeasuredProfile | None:
    return profile_rank(_wish(), torch.device("cpu"), dist.get_world_size(), 1, _silent)


def test_one_process_measures_itself() -> None:
    """A tiny grid, for real: every question has its reading."""
    found = profile_rank(_wish(), torch.device("cpu"), 1, 1, _silent)

    assert found is not None
    assert found.provenance.torch == torch.__version__
    assert found.provenance.dropped == 0
    readings = found.settings[0].device.measured
    assert readings is not None
    assert len(readings.matmul) == 1 + 8 + 1
    assert {reading.kind for reading in readings.traffic} == {"elementwise", "adamw", "sgd", "clip"}
    assert {reading.phase for reading in readings.attention} == {"forward", "backward"}
    assert MeasuredProfile.model_validate_json(found.to_json()) == found


def test_processes_measure_together(pool: Pool) -> None:
    """Two ranks measure alone, then together with every collective; the first has the profile."""
    found, nothing = pool.run(_rank, 2)

    assert nothing is None
    one, two = found.settings
    assert (one.processes, two.processes) == (1, 2)
    assert one.intra_node.measured is None
    kinds = {reading.kind for reading in two.intra_node.measured.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"}
