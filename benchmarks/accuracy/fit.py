"""Fits the constants of device and stack profiles to published runs, and says how far they carry.

    python benchmarks/accuracy/fit.py --data DIR [--write] [--cache FILE] [--markdown FILE]

Device constants are shared by all sources, stack constants by all rows of that software. Errors are printed three ways:
on the rows fitted, with each model left out of its source (one Gauss-Newton step from the fit, without its rows), and
with each source left out: devices from the other sources, fitted figures of the stack as its profile expects them, off
by what the other stacks are off in the median. The fit starts from what the profiles expect, not from what they hold,
so that it can be repeated. `--write` puts the values into the profiles.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from accuracy.constants import (
    KINDS,
    MEMORY_KINDS,
    Constant,
    Profiles,
    device_constants,
    stack_constants,
    write,
)
from accuracy.markdown import fill
from accuracy.questions import Question, collect
from accuracy.rows import case
from accuracy.squares import Fit
from galv.planner.by_stack import priced_stages, step_seconds
from galv.planner.plan import Estimate
from galv.profiles.stack import StackProfile


def predict(question: Question, profiles: Profiles) -> Estimate:
    """The estimate of one row with the constants of `profiles`."""
    return priced_stages(
        question.library,
        profiles.cluster(question.case.cluster),
        profiles.stack(question.case.stack),
        question.layout,
        question.request,
    ).estimate


VERDICT_MARGIN = 0.005
"""How far on the right side of the capacity a verdict is asked to be; an error beyond it is a wrong verdict."""
FAILURE_MARGIN = 0.02
"""The same for a run out of memory: to call it fitting costs more than the other mistake."""


def time_error(question: Question, profiles: Profiles) -> float:
    """Logarithm of predicted over measured step time."""
    case = question.case
    assert case.measured_seconds is not None
    cluster, stack = profiles.cluster(case.cluster), profiles.stack(case.stack)
    return float(np.log(step_seconds(question.library, cluster, stack, question.layout) / case.measured_seconds))


def memory_error(question: Question, profiles: Profiles) -> float:
    """Logarithm of predicted over measured peak; for a bare verdict, how far on the wrong side of the capacity."""
    estimate = predict(question, profiles)
    if question.case.measured_bytes is not None:
        return float(np.log(question.peak_bytes(estimate) / question.case.measured_bytes))
    over = float(np.log(question.device_bytes(estimate) / question.case.cluster.device.memory_bytes))
    if question.case.row["status"] == "oom":
        return min(over - FAILURE_MARGIN, 0.0)
    return max(over + VERDICT_MARGIN, 0.0)


# ----------------------------------------------------------------------------------------------- the command


def time_rows(questions: Iterable[Question]) -> list[Question]:
    """Rows that fix time constants: grade A and B, and of the launch-bound C rows of one source every fourth.

    Interleaved pipelines of very many chunks are simulated event by event, which takes too long for a fit.
    """
    timed = [q for q in questions if q.case.measured_seconds is not None and q.case.row["status"] == "ok"]
    found = [q for q in timed if q.layout.extras.virtual_stages == 1 or _num_chunks(q) <= MOST_CHUNKS]
    dense = [q for q in found if q.case.row["grade"] in "AB" and q.case.source not in UNUSABLE_TIME]
    return dense + [q for q in found if q.case.source == "vtrain_megatron_a100"][::4]


def _num_chunks(question: Question) -> int:
    """Passes of one chunk of the model with one microbatch, forward alone, in a step."""
    setting = question.layout.setting
    return setting.pp * question.layout.extras.virtual_stages * setting.num_microbatches


MOST_CHUNKS = 2000

UNUSABLE_TIME = ("megatron_core_golden",)
"""Sources whose equal rows differ by a quarter and more in time."""


def summary(errors: np.ndarray) -> str:
    """Median and 90th percentile of the relative error, and the bias."""
    relative = np.exp(errors) - 1
    return f"{np.median(abs(relative)):.3f} / {np.quantile(abs(relative), 0.9):.3f} bias {np.median(relative):+.3f}"


def by_source(fit: Fit, errors: np.ndarray) -> dict[str, np.ndarray]:
    """The errors of each source, bare verdicts left out."""
    names = np.array(["" if _is_verdict(fit, q) else q.case.source for q in fit.questions])
    return {name: errors[names == name] for name in dict.fromkeys(names) if name}


def _is_verdict(fit: Fit, question: Question) -> bool:
    """Whether the row has nothing to compare with but whether it fitted."""
    return fit.error is memory_error and question.case.measured_bytes is None


def _is_right(question: Question, error: float) -> bool:
    """Whether the error of a verdict leaves it on the right side of the capacity."""
    return abs(error) <= (FAILURE_MARGIN if question.case.row["status"] == "oom" else VERDICT_MARGIN)


def leave_models_out(fit: Fit, errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Each row's error when the rows of its model in its source had no say; `errors` and `slopes` are the fit's."""
    values, found = fit.values(), errors.copy()
    keys = [(q.case.source, q.case.model) for q in fit.questions]
    for key in dict.fromkeys(keys):
        out = np.array([k == key for k in keys])
        fit.put(fit.step(errors, slopes, 0.0, out))
        found[out] = fit.errors(np.flatnonzero(out))
        fit.put(values)
    return found


def leave_sources_out(fit: Fit, errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Each row's error when no row of its source had a say in any constant; `errors` and `slopes` are the fit's."""
    values, found = fit.values(), errors.copy()
    sources = np.array([q.case.source for q in fit.questions])
    for source in dict.fromkeys(sources):
        out = sources == source
        fit.put(_unseen(fit, fit.step(errors, slopes, 0.0, out), out))
        found[out] = fit.errors(np.flatnonzero(out))
        fit.put(values)
    return found


LEAST_OTHERS = 3
"""Of stacks that share a constant, to say how far off what is expected of it tends to be."""


def _unseen(fit: Fit, values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`values`, with constants that only left-out rows depend on as an unseen software would have them.

    That is what its profile expects, off by as much as other stacks' in the median; nothing (0, or the default) where
    it expects nothing.
    """
    seen = np.array([not out[rows].all() for rows in fit.touched])
    found = values.copy()
    for j, constant in enumerate(fit.constants):
        if seen[j]:
            continue
        if not fit.known[j]:
            default = StackProfile.model_fields[constant.name].default
            found[j] = np.log(default) if default else -np.inf
            continue
        off = [
            values[i] - fit.start[i]
            for i, other in enumerate(fit.constants)
            if other.name == constant.name and seen[i] and fit.known[i]
        ]
        found[j] = fit.start[j] + (np.median(off) if len(off) >= LEAST_OTHERS else 0.0)
    return found


def table(fit: Fit, title: str, report: Callable[[str], None]) -> None:
    """Prints the three errors of a fit, source by source."""
    errors = fit.errors()
    slopes = fit.jacobian(errors)
    kinds = {
        "fitted": errors,
        "model out": leave_models_out(fit, errors, slopes),
        "source out": leave_sources_out(fit, errors, slopes),
    }
    graded = np.array([q.case.row["grade"] in "AB" for q in fit.questions])
    report(f"{title}: median / 90th percentile of the relative error")
    for kind, errors in kinds.items():
        counted = np.concatenate(list(by_source(fit, errors).values()))
        report(f"  {kind:10} all {len(counted)} rows: {summary(counted)}")
        if fit.error is time_error:
            report(f"  {kind:10} {sum(graded)} rows of grade A and B: {summary(errors[graded])}")
        right = [_is_right(q, e) for q, e in zip(fit.questions, errors, strict=True) if _is_verdict(fit, q)]
        if right:
            report(f"    {len(right)} verdicts, right: {np.mean(right):.1%}")
        for source, part in by_source(fit, errors).items():
            report(f"    {source:30} {len(part):5} {summary(part)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="captured models, made when it does not exist")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=("time", "memory"))
    parser.add_argument("--markdown", type=Path, help="also write the tables into this file, between its marks")
    parser.add_argument("--warm", action="store_true", help="start from what the profiles hold, to save rounds")
    parser.add_argument("--write", action="store_true", help="put the values into the profiles")
    options = parser.parse_args(arguments)
    questions = _questions(options.data, options.cache)
    profiles, lines, fitted = Profiles(), list[str](), list[Constant]()

    def report(line: str) -> None:
        lines.append(line)
        _print(line)

    if options.only != "memory":
        constants = device_constants() + stack_constants(KINDS, profiles)
        fit = _concerned(time_rows(questions), constants, profiles, time_error)
        fitted += _fit("step time", fit, options, report)
    if options.only != "time":
        rows = [q for q in questions if q.case.measured_bytes or q.case.source == "hagemann2023"]
        constants = stack_constants(MEMORY_KINDS, profiles)
        fit = _concerned(rows, constants, profiles, memory_error)
        fitted += _fit("peak memory", fit, options, report)
    if options.write:
        write(profiles, fitted)
    if options.markdown is not None:
        fill(options.markdown, "fit", ["```", *lines, "```"])


def _fit(title: str, fit: Fit, options: argparse.Namespace, report: Callable[[str], None]) -> list[Constant]:
    """The constants fitted from what is expected (as they stand, with no rounds); prints errors and values."""
    if options.rounds:
        if not options.warm:
            fit.put(fit.start)
        fit.run(options.rounds, report)
    table(fit, title, report)
    _show(fit, report)
    return fit.constants


def _concerned(
    questions: list[Question],
    constants: list[Constant],
    profiles: Profiles,
    error: Callable[[Question, Profiles], float],
) -> Fit:
    """The fit of those constants that some row depends on."""
    fit = Fit(questions, constants, profiles, error)
    used = [constant for constant, rows in zip(constants, fit.touched, strict=True) if rows]
    return Fit(questions, used, profiles, error)


def _questions(data: Path, cache: Path | None) -> list[Question]:
    if cache is not None and cache.exists():
        known: list[Question] = pickle.loads(cache.read_bytes())
        return [replace(q, case=case(q.case.row)) for q in known]
    found = collect(data)
    if cache is not None:
        frozen = {id(q.library): q.library.frozen() for q in found}
        cache.write_bytes(pickle.dumps([replace(q, library=frozen[id(q.library)]) for q in found]))
    return found


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _show(fit: Fit, report: Callable[[str], None]) -> None:
    for constant, start in zip(fit.constants, np.exp(fit.start), strict=True):
        value = fit.profiles.get(constant)
        edge = " (at its limit)" if not constant.kind.lowest * 1.01 < value < constant.kind.highest / 1.01 else ""
        report(f"  {constant.owner:40} {constant.name:30} {start:10.4g} -> {value:10.4g}{edge}")


if __name__ == "__main__":
    main()
