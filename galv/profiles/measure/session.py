"""The order of a measurement: settings, rounds over the whole grid, one sample of each question a round.

Interleaving spreads a drift of the machine evenly over all questions, and a fixed piece of work between them tells how
steady the machine is. Every rank runs the same loop; rank 0 keeps the clock, the samples and the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from galv.profiles.measure.grid import Question
from galv.profiles.measure.samples import Samples
from galv.profiles.measure.sampling import Clock, repeats_for, timed
from galv.profiles.measure.work import Place, units_of_work, work_of

Progress = Callable[[str, int, int], None]
"""Told of what is measured, how many samples are taken and how many there are to be."""

SAVE_SECONDS = 3.0
REFERENCE_EVERY = 12
"""Questions between two samples of the fixed piece of work."""


@dataclass(frozen=True)
class Setting:
    """`processes` of each node at work, with their groups; this rank is one of them."""

    processes: int
    place: Place
    everyone: dist.ProcessGroup | None
    """The ranks at work; None for one alone."""
    questions: tuple[Question, ...]


@dataclass
class Pace:
    """How much time there is, and how it is used."""

    rounds: int
    least_seconds: float
    """Of one sample."""
    seconds: float
    """For all settings together."""
    clock: Clock = time.perf_counter
    started: float = field(default=0.0)

    def start(self) -> None:
        """The time runs from now on."""
        self.started = self.clock()

    def is_over(self, share: float) -> bool:
        """Whether `share` of the time is used up."""
        return self.clock() - self.started > share * self.seconds


def measure(
    setting: Setting, samples: Samples, pace: Pace, progress: Progress, *, share: float, is_first: bool
) -> None:
    """Takes samples of every question of `setting` until there are enough or `share` of the time is over.

    `samples` is the same on every rank at the start and filled on rank 0 (`is_first`). Collective over the setting.
    """
    reference, order = setting.questions[0], list(_in_order(setting.questions))
    saved = pace.clock()
    for taken in range(pace.rounds):
        for index, question in enumerate(order):
            key = (setting.processes, question.key)
            if question is not reference and len(samples.of(key)) > taken:
                continue
            seconds = _sample(question, setting, pace)
            samples.add(key, seconds)
            if _agreed(pace.is_over(share), setting):
                return
            if is_first:
                progress(_title(setting), taken * len(order) + index + 1, pace.rounds * len(order))
                if pace.clock() - saved > SAVE_SECONDS:
                    samples.save()
                    saved = pace.clock()


def _in_order(questions: Sequence[Question]) -> Sequence[Question]:
    """All questions, the first of them again and again in between."""
    order: list[Question] = []
    for index, question in enumerate(questions[1:]):
        if index % REFERENCE_EVERY == 0:
            order.append(questions[0])
        order.append(question)
    return order


def _title(setting: Setting) -> str:
    processes = setting.processes
    return f"measuring with {processes} process{'' if processes == 1 else 'es'} at work"


def _sample(question: Question, setting: Setting, pace: Pace) -> float:
    """Seconds of one sample: the mean of the ranks, each of which repeats the work as often as the others."""
    work, place = work_of(question, setting.place), setting.place
    work()  # warms up, and finds out how long it takes
    once = _mean(timed(work, place.synchronize, pace.clock, 1), setting)
    repeats = repeats_for(once, pace.least_seconds)
    seconds = (
        once if once > pace.least_seconds * 8 else _mean(timed(work, place.synchronize, pace.clock, repeats), setting)
    )
    return seconds / units_of_work(question)


def _mean(seconds: float, setting: Setting) -> float:
    if setting.everyone is None:
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64, device=setting.place.device)
    dist.all_reduce(value, group=setting.everyone)
    return float(value) / dist.get_world_size(setting.everyone)


def _agreed(is_over: bool, setting: Setting) -> bool:
    """What the first rank says."""
    if setting.everyone is None:
        return is_over
    value = torch.tensor([float(is_over)], device=setting.place.device)
    dist.broadcast(value, src=dist.get_global_rank(setting.everyone, 0), group=setting.everyone)
    return bool(value)
