"""A table's pipeline: which rank holds which chunk, what a rank holds at once, what a step takes, and chains of work
that its schedule cannot shorten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from galv.cost_models.estimate import StageSeconds, pipeline_seconds
from galv.cost_models.in_flight import activations_in_flight
from galv.cost_models.pipeline import num_in_flight
from galv.planner.plan import ScheduleName
from galv.planner.search.table import CostTable, Weights
from galv.schedules import executed_schedule, rank_of_chunk


@dataclass(frozen=True)
class Shape:
    """The pipeline of a table. A rank holds `virtual_stages` chunks of the model, numbered along the model."""

    schedule: ScheduleName
    num_ranks: int
    num_microbatches: int
    virtual_stages: int
    transfer_seconds: float

    @classmethod
    def of(cls, table: CostTable) -> Shape:
        """The shape of `table`."""
        executed = executed_schedule(table.schedule, table.num_stages, table.num_microbatches)
        return cls(executed, table.num_stages, table.num_microbatches, table.virtual_stages, table.transfer_seconds)

    @property
    def num_chunks(self) -> int:
        return self.num_ranks * self.virtual_stages

    def rank(self, chunk: int) -> int:
        """The rank that holds `chunk`."""
        return rank_of_chunk(self.schedule, self.num_ranks, chunk)

    def chunks(self, rank: int) -> list[int]:
        """The chunks that `rank` holds."""
        return [chunk for chunk in range(self.num_chunks) if self.rank(chunk) == rank]

    def in_flight(self, rank: int) -> float:
        """Microbatches whose activations a rank holds at once."""
        return _in_flight(self, rank)

    def step_seconds(self, chunks: Sequence[StageSeconds]) -> float:
        """The objective: the schedule's makespan plus the longest once-a-step work of any rank."""
        rounds, transfer = self.num_microbatches, self.transfer_seconds
        return pipeline_seconds(self.schedule, chunks, rounds, transfer, self.virtual_stages)

    # -- chains of work under GPipe and 1F1B

    @property
    def trip(self) -> Weights:
        """How often the first microbatch's way up and the last one's way down count a chunk's seconds, at least."""
        return 1.0, 1.0, 0.0

    @property
    def lap(self) -> Weights:
        """A visit of a chain of work that visits stages m + p - 1 times in all, with its share of the step's end."""
        return self.trip[0], self.trip[1], 1 / (self.num_microbatches + self.num_ranks - 1)

    @property
    def trip_transfers_seconds(self) -> float:
        """Transfers on that way."""
        return 2 * (self.num_ranks - 1) * self.transfer_seconds

    def extras(self, rank: int) -> tuple[Weights, ...]:
        """What a rank of one chunk adds to the trip, one entry for each chain.

        With w microbatches in flight on the rank under 1F1B: the first microbatch goes up and back to the rank,
        which then has its m - w other forwards and m - 1 other backwards to do before the last gradient goes down;
        read backwards in time, m - 1 forwards and m - w backwards precede its last forward, which goes up and all
        the way down. Under GPipe all microbatches pass a rank up and then down.
        """
        m = float(self.num_microbatches)
        if self.schedule == "gpipe":
            return ((m - 1, m - 1, 1.0),)
        ahead = float(self.num_ranks - rank)
        return (m - ahead, m - 1, 1.0), (m - 1, m - ahead, 1.0)

    def longest_loop(self, laps: np.ndarray) -> tuple[np.ndarray, float]:
        """The chain of work that takes longest on stages of such laps: its visits to each stage, and its transfers.

        Under 1F1B a stage s that has microbatches to send follows on the first one's way back, and on the last one's
        way up and down it is passed again. Between these lie m - w - 1 of its rounds, each a backward and a forward.
        Instead of L rounds of its own, a chain can climb to stage s + L - 1, turn there into that stage's next
        backward and come back: one visit to each of L stages and the transfers between them
        (`pipeline.makespan_lower_bound_seconds`).
        """
        p, m, c = self.num_ranks, self.num_microbatches, self.transfer_seconds
        best = np.zeros(p), 0.0
        if self.schedule != "1f1b":
            return best
        for s in range(max(0, p - m + 1), p):
            rounds = m - (p - s) - 1
            if rounds < 0:
                continue
            fixed = 2 * s * c + 4 * (p - 1 - s) * c
            visits = np.ones(p)
            visits[s:] = 2.0
            lengths = np.arange(1, p - s + 1)
            loops, own = np.divmod(rounds, lengths)
            gain = loops * np.cumsum(laps[s:]) + own * laps[s] + 2 * c * loops * (lengths - 1)
            length = int(np.argmax(gain))
            visits[s : s + length + 1] += loops[length]
            visits[s] += own[length]
            fixed += 2 * c * float(loops[length]) * length
            if visits @ laps + fixed > best[0] @ laps + best[1]:
                best = visits, fixed
        return best

    def longest_chain(self, stages: Sequence[StageSeconds]) -> tuple[np.ndarray, float]:
        """The longest chain of work over stages of such times, one chunk a rank: (stages, 2) visits, and its
        transfers.
        """
        times = np.array([(stage.forward_seconds, stage.backward_seconds) for stage in stages])
        base, fixed = np.tile(np.array(self.trip[:2]), (self.num_ranks, 1)), self.trip_transfers_seconds
        found = []
        for rank in range(self.num_ranks):
            for forward, backward, _ in self.extras(rank):
                visits = base.copy()
                visits[rank] += forward, backward
                found.append((visits, fixed))
        laps, transfers = self.longest_loop(times.sum(axis=1))
        found.append((np.stack([laps, laps], axis=1), transfers))
        return max(found, key=lambda chain: float((chain[0] * times).sum()) + chain[1])

    @property
    def busy(self) -> Weights:
        """A rank's own work of a step."""
        m = float(self.num_microbatches)
        return m, m, 1.0


@lru_cache(maxsize=65536)
def _in_flight(shape: Shape, rank: int) -> float:
    p, m = shape.num_ranks, shape.num_microbatches
    if shape.schedule in ("none", "gpipe", "1f1b"):
        return float(num_in_flight(shape.schedule, rank, p, m))
    return activations_in_flight(shape.schedule, rank, p, m, shape.virtual_stages)
