"""How long a pipeline of stages takes for the microbatches of one step under GPipe and 1F1B, by closed forms.

Each stage runs its forwards and backwards in the fixed order of its schedule; one starts when the stage is free and
its input has arrived (`galv.schedules.stage_order`): GPipe runs all forwards, then all backwards, first microbatch
first; 1F1B runs p - s forwards on stage s of p, then one backward and one forward in turn. `none` is one stage that
takes the microbatches in turn. `makespan` times the other schedules.

Notation: p stages, m microbatches, stage s takes f_s forward, b_s backward and t_s = f_s + b_s in all for one
microbatch; c_s is the transfer between s and s + 1, either way; w_s is the number of microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from galv.planner.plan import ScheduleName
from galv.schedules import executed_schedule


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """What a simulated step looks like; seconds from its start."""

    makespan_seconds: float
    """Until the last stage to end has ended."""
    busy_seconds: tuple[float, ...]
    """Each stage's computation; the rest of the makespan is its bubble."""
    end_seconds: tuple[float, ...]
    """When each stage ends its last backward and can reduce its gradients."""


def num_in_flight(schedule: ScheduleName, stage: int, num_stages: int, num_microbatches: int) -> int:
    """The most microbatches whose activations `stage` holds at once under GPipe, 1F1B or on one stage."""
    schedule = executed_schedule(schedule, num_stages, num_microbatches)
    if schedule == "none":
        return 1
    if schedule == "gpipe":
        return num_microbatches
    return num_stages - stage


def simulate(
    schedule: ScheduleName,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    num_microbatches: int,
    transfer_seconds: Sequence[float] | None = None,
) -> PipelineTimeline:
    """The exact timeline of one step: one forward and one backward time a stage, one transfer a boundary (0 if None).

    Costs O(p) for GPipe and O(p * min(m, a few p)) for 1F1B: once every stage repeats its round after the same time,
    the repeats are skipped.
    """
    f, b, m = tuple(forward_seconds), tuple(backward_seconds), num_microbatches
    c = (0.0,) * (len(f) - 1) if transfer_seconds is None else tuple(transfer_seconds)
    assert len(f) == len(b) == len(c) + 1, (len(f), len(b), len(c))
    assert m >= 1, m
    assert schedule != "none" or len(f) == 1, "a pipeline of several stages needs a schedule"
    fill_first = executed_schedule(schedule, len(f), m) == "gpipe"
    ends = _all_forward_all_backward(f, b, m, c) if fill_first else _one_forward_one_backward(f, b, m, c)
    return PipelineTimeline(max(ends), tuple(m * (x + y) for x, y in zip(f, b, strict=True)), tuple(ends))


Times = tuple[float, ...]


def _all_forward_all_backward(f: Times, b: Times, m: int, c: Times) -> list[float]:
    """When each stage ends under GPipe; with m equal microbatches both halves are flow shops with a closed form.

    The i-th of equal jobs leaves machine s of a line at (sum of times up to s) + i * (largest time up to s). Backward
    starts at the last stage when its forwards end, which no other stage's forwards outlast.
    """
    arrive, slowest = sum(f) + sum(c), max(f)
    clock, ends = arrive + (m - 1) * slowest, []
    largest = 0.0
    for s in range(len(f) - 1, -1, -1):
        clock += b[s]
        largest = max(largest, b[s])
        ends.append(clock + (m - 1) * largest)
        clock += c[s - 1] if s else 0.0
    return ends[::-1]


def _one_forward_one_backward(f: Times, b: Times, m: int, c: Times) -> list[float]:
    """When each stage ends under 1F1B.

    Round k of stage s is its backward k and then its forward k + w_s. As w_s = w_{s+1} + 1, forward k + w_s comes from
    the previous round of stage s - 1, so a round depends only on when the stages ended the round before: the rounds
    are a max-plus linear recurrence. If all stages end a round the same time later than some rounds before, they go
    on repeating those rounds until stage 0 runs out of forwards, after m - p rounds; then the repeats are skipped.
    """
    num_stages = len(f)
    done, full = _warm_up(f, c), m - num_stages
    done = _full_rounds(done, f, b, c, full)
    for k in range(full, m):
        # Stage s still has a forward k + w_s below m when s >= p - (m - k) + 1.
        done = _round(done, f, b, c, first_forward=num_stages - (m - k) + 1)
    return done


def _full_rounds(done: list[float], f: Times, b: Times, c: Times, rounds: int) -> list[float]:
    """When each stage ends `rounds` rounds that begin from `done`."""
    lengths = {1, _slowest_loop(f, b, c)} if rounds > len(f) else set()
    history = [done]
    while rounds:
        done = _round(done, f, b, c)
        rounds -= 1
        for length in lengths:
            if length <= len(history) and (period := _same_step(history[-length], done)) is not None:
                skipped, rounds = divmod(rounds, length)
                done, lengths = [end + skipped * period for end in done], set()
                break
        history.append(done)
    return done


def _same_step(before: list[float], after: list[float]) -> float | None:
    """By how much every stage ends later in `after` than in `before`; None when they differ."""
    step = after[0] - before[0]
    for x, y in zip(before, after, strict=True):
        if abs(y - x - step) > 1e-12 * y:
            return None
    return step


def _slowest_loop(f: Times, b: Times, c: Times) -> int:
    """Over how many rounds 1F1B repeats itself in the long run.

    Every chain that comes back to its stage L rounds later runs up L neighbouring stages and down again (see
    `_loops`); the one that takes longest a round sets the pace, and in time the pattern.
    """
    pace, rounds = max(x + y for x, y in zip(f, b, strict=True)), 1
    for s in range(len(f)):
        loop = f[s] + b[s]
        for r in range(s + 1, len(f)):
            loop += f[r] + b[r] + 2 * c[r - 1]
            length = r - s + 1
            if loop > pace * length * (1 + 1e-12):
                pace, rounds = loop / length, length
    return rounds


def _warm_up(f: Times, c: Times) -> list[float]:
    """When each stage ends its w_s forwards before its first backward: a flow shop, see `_all_forward_all_backward`."""
    done, arrive, slowest = [], 0.0, 0.0
    for s, seconds in enumerate(f):
        arrive, slowest = arrive + seconds, max(slowest, seconds)
        done.append(arrive + (len(f) - s - 1) * slowest)
        arrive += c[s] if s + 1 < len(f) else 0.0
    return done


def _round(done: list[float], f: Times, b: Times, c: Times, first_forward: int = 0) -> list[float]:
    """When each stage ends its next backward and, from stage `first_forward` on, its next forward."""
    after = [0.0] * len(f)
    gradient = 0.0
    for s in range(len(f) - 1, -1, -1):
        start = done[s]
        clock = (gradient if gradient > start else start) + b[s]
        gradient = clock + c[s - 1] if s else clock
        if s >= first_forward:
            arrival = done[s - 1] + c[s - 1] if s else 0.0
            clock = (arrival if arrival > clock else clock) + f[s]
        after[s] = clock
    return after


# ----------------------------------------------------------------------------------------------- lower bound


def makespan_lower_bound_seconds(
    schedule: ScheduleName,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    num_microbatches: int,
    transfer_seconds: Sequence[float] | None = None,
) -> float:
    """A makespan that no simulation with these times or larger ones falls below; exact for GPipe and equal stages.

    Every term is the length of one chain of operations that must follow each other, so it is a lower bound whatever
    the other times are, and it does not fall when a time grows.
    """
    f, b, m = tuple(forward_seconds), tuple(backward_seconds), num_microbatches
    c = (0.0,) * (len(f) - 1) if transfer_seconds is None else tuple(transfer_seconds)
    if executed_schedule(schedule, len(f), m) != "1f1b":
        return max(_all_forward_all_backward(f, b, m, c))
    trip = sum(f) + sum(b) + 2 * sum(c)
    through = [0.0, *accumulate(x + y for x, y in zip(f, b, strict=True))]
    across = [0.0, *accumulate(2 * x for x in c)]
    bound = trip
    for s in range(len(f)):
        w = num_in_flight("1f1b", s, len(f), m)
        below, above = through[s] + across[s], trip - through[s + 1] - across[s]
        # Microbatch 0 comes up to s, s does all its work, the last gradient goes down to 0.
        bound = max(bound, below + m * (f[s] + b[s]))
        # Microbatch 0 goes up to the top and back to s; the backward of 0 on s precedes its forwards from w on.
        bound = max(bound, trip + (m - w) * f[s] + (m - 1) * b[s])
        # The same read backwards in time: m - w backwards of s precede its last forward, which goes up and back.
        bound = max(bound, trip + (m - 1) * f[s] + (m - w) * b[s])
        if m > w:
            bound = max(bound, below + 2 * above + _loops(s, m - w - 1, f, b, through, across))
    return bound


def _loops(s: int, rounds: int, f: Times, b: Times, through: list[float], across: list[float]) -> float:
    """The longest chain found on stage s between microbatch 0's way up to the top and the last microbatch's.

    Between backward 0 and forward m - 1 of s lie the forward w_s and m - 1 - w_s rounds of a backward and a forward.
    Instead of L rounds on s, a chain can climb with forward k + w_s to stage s + L - 1, turn there into that stage's
    next backward (k + L) and return to s: all times of L stages and the transfers between them, for L rounds.
    """
    own = f[s] + b[s]
    longest = rounds * own
    for r in range(s + 1, len(f)):
        length = r - s + 1
        loop = through[r + 1] - through[s] + across[r] - across[s]
        longest = max(longest, (rounds // length) * loop + (rounds % length) * own)
    return 2 * own + longest
