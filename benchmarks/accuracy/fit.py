"""Fits the constants of device and stack profiles to published runs, and says how far they carry.

    python benchmarks/accuracy/fit.py --data DIR [--write] [--cache FILE] [--markdown FILE]

Device constants are shared by all sources, stack constants by all rows of that software. Errors are printed three ways:
on the rows fitted, with each model left out of its source (one Gauss-Newton step from the fit, without its rows), and
with each source left out (devices from the other sources, fitted stack figures the median of the other stacks').
`--write` puts the values into the profiles.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from accuracy.markdown import fill
from accuracy.questions import Question, collect
from accuracy.rows import case
from galv.planner.by_stack import priced_stages, step_seconds
from galv.planner.plan import Estimate
from galv.profiles.cluster import ClusterProfile
from galv.profiles.device import DeviceProfile
from galv.profiles.stack import StackProfile

PROFILES = Path(__file__).parents[2] / "galv" / "profiles"

FAMILIES = {
    "a100": ("a100-sxm-80", "a100-sxm-40", "a800-sxm-80"),
    "h100": ("h100-sxm-80", "h800-sxm-80", "h200-sxm-141"),
}
"""Devices with one chip share its constants."""

PRIOR_WEIGHT = 0.5
"""Pull of a constant towards its start: this many rows' worth at a factor of e, with errors counted in tenths."""
TENTH = 0.1


@dataclass(frozen=True)
class Constant:
    """One fitted constant: of a device family or a stack."""

    owner: str
    name: str
    lowest: float
    highest: float


def device_constants() -> list[Constant]:
    """What is fitted of a device: at most 6 each."""
    return [
        constant
        for family in FAMILIES
        for constant in (
            Constant(f"device:{family}", "matmul_efficiency", 0.4, 0.95),
            Constant(f"device:{family}", "matmul_half_k", 20, 300),
            Constant(f"device:{family}", "attention_forward_efficiency", 0.1, 0.8),
            Constant(f"device:{family}", "attention_backward_efficiency", 0.1, 0.65),
        )
    ]


LIMITS = {
    "elementwise_passes": (0.2, 16.0),
    "product_share": (0.75, 1.05),
    "loss_bytes_per_logit": (2.0, 120.0),
    "flash_share": (0.3, 1.5),
    "score_passes": (2.0, 40.0),
    "host_seconds_per_operator": (2e-6, 2e-4),
    "host_seconds_per_collective": (1e-6, 1e-3),
    "stall_seconds": (1e-3, 0.1),
    "microbatch_seconds": (1e-5, 0.05),
    "wide_job_stall_seconds": (0.01, 1.0),
    "step_seconds": (1e-3, 2.0),
    "network_share": (0.1, 1.1),
    "network_hop_seconds": (1e-6, 8e-4),
    "node_decay": (0.01, 1.0),
    "gather_overlap": (0.05, 1.0),
    "gradient_overlap": (0.01, 1.0),
    "bucket_bytes": (2e6, 4e9),
    "update_bytes": (20.0, 300.0),
}
MEMORY_LIMITS = {
    "saved_share": (0.005, 3.0),
    "logit_bytes": (1.0, 24.0),
    "gradient_bytes": (1.5, 8.0),
    "overhead_bytes": (1e7, 6e9),
    "score_bytes": (0.5, 12.0),
}


class Profiles:
    """The shipped profiles with some constants changed."""

    def __init__(self) -> None:
        self.stacks = {path.stem: json.loads(path.read_text()) for path in sorted((PROFILES / "stacks").glob("*.json"))}
        self.devices: dict[str, dict[str, float]] = {family: {} for family in FAMILIES}
        self._clusters: dict[ClusterProfile, ClusterProfile] = {}
        self._resolved: dict[str, StackProfile] = {}

    def get(self, constant: Constant) -> float:
        """The value as it stands."""
        kind, owner = constant.owner.split(":")
        if kind == "stack":
            return float(self._merged(owner)[constant.name])
        if constant.name in self.devices[owner]:
            return self.devices[owner][constant.name]
        device = json.loads((PROFILES / "library" / f"{FAMILIES[owner][0]}.json").read_text())["device"]
        value = device[constant.name]
        return float(value["bf16"] if isinstance(value, dict) else value)

    def set(self, constant: Constant, value: float) -> None:
        """Changes one constant."""
        kind, owner = constant.owner.split(":")
        if kind == "stack":
            self.stacks[owner][constant.name] = value
            self.stacks[owner].setdefault("sources", {}).setdefault(constant.name, "fitted")
            self._resolved.clear()
        else:
            self.devices[owner][constant.name] = value
            self._clusters.clear()

    def _merged(self, name: str) -> dict[str, Any]:
        own = dict(self.stacks[name])
        like = own.pop("like", None)
        if like is None:
            return own
        base = self._merged(like)
        fitted = tuple(dict.fromkeys([*base.get("fitted", ()), *own.get("fitted", ())]))
        return {**base, **own, "fitted": fitted, "sources": {**base["sources"], **own["sources"]}}

    def stack(self, name: str) -> StackProfile:
        if name not in self._resolved:
            self._resolved[name] = StackProfile.model_validate(self._merged(name))
        return self._resolved[name]

    def parents(self, name: str) -> list[str]:
        """The stack and those that it is like."""
        like = self.stacks[name].get("like")
        return [name, *(self.parents(like) if like else [])]

    def cluster(self, cluster: ClusterProfile) -> ClusterProfile:
        """`cluster` with its device as it stands."""
        if cluster not in self._clusters:
            self._clusters[cluster] = cluster.model_copy(update={"device": self._device(cluster.device)})
        return self._clusters[cluster]

    def _device(self, device: DeviceProfile) -> DeviceProfile:
        values = next((self.devices[f] for f, names in FAMILIES.items() if device.name in names), {})
        if not values:
            return device
        figures: dict[str, Any] = dict(values)
        if "matmul_efficiency" in figures:
            rate = figures["matmul_efficiency"]
            figures["matmul_efficiency"] = {**device.matmul_efficiency, "bf16": rate, "fp16": rate}
        return DeviceProfile.model_validate({**device.model_dump(), **figures})


def predict(question: Question, profiles: Profiles) -> Estimate:
    """The estimate of one row with the constants of `profiles`."""
    return priced_stages(
        question.library,
        profiles.cluster(question.case.cluster),
        profiles.stack(question.case.stack),
        question.layout,
        question.request,
    ).estimate


# ----------------------------------------------------------------------------------------------- least squares


@dataclass
class Fit:
    """One least-squares problem: rows, constants, and how a row's error is found."""

    questions: list[Question]
    constants: list[Constant]
    profiles: Profiles
    error: Callable[[Question, Profiles], float]

    def __post_init__(self) -> None:
        self.start = self.values()
        self._touched = [
            [i for i, q in enumerate(self.questions) if self._concerns(constant, q)] for constant in self.constants
        ]

    def values(self) -> np.ndarray:
        return np.log([self.profiles.get(constant) for constant in self.constants])

    def put(self, values: np.ndarray) -> None:
        for constant, value in zip(self.constants, values, strict=True):
            if abs(np.log(self.profiles.get(constant)) - value) > 1e-12:
                self.profiles.set(constant, float(np.exp(value)))

    def _concerns(self, constant: Constant, question: Question) -> bool:
        kind, owner = constant.owner.split(":")
        if kind == "device":
            return question.case.cluster.device.name in FAMILIES[owner]
        chain = self.profiles.parents(question.case.stack)
        if owner not in chain:
            return False
        nearer = chain[: chain.index(owner)]
        return not any(constant.name in self.profiles.stacks[name] for name in nearer)

    def errors(self, which: Iterable[int] | None = None) -> np.ndarray:
        """Each row's error with the constants as they stand."""
        rows = range(len(self.questions)) if which is None else which
        return np.array([self.error(self.questions[i], self.profiles) for i in rows])

    def jacobian(self, errors: np.ndarray, step: float = 0.02) -> np.ndarray:
        values, found = self.values(), np.zeros((len(self.questions), len(self.constants)))
        for j, constant in enumerate(self.constants):
            room = np.log(constant.highest) - values[j]
            moved = step if room > step else -step
            self.profiles.set(constant, float(np.exp(values[j] + moved)))
            rows = self._touched[j]
            found[rows, j] = (self.errors(rows) - errors[rows]) / moved
            self.profiles.set(constant, float(np.exp(values[j])))
        return found

    def step(self, errors: np.ndarray, slopes: np.ndarray, damping: float, without: np.ndarray | None = None) -> Any:
        """The constants after one damped Gauss-Newton step; rows in `without` do not count.

        Robust as the Cauchy distribution is: rows that are off by tenths, as by stalls that nothing recorded explains,
        have little say. Constants at their limit that would leave it stay there, and the others are found without them.
        """
        weights = 1 / (1 + (errors / TENTH) ** 2)
        if without is not None:
            weights = np.where(without, 0, weights)
        values = self.values()
        pull = PRIOR_WEIGHT * TENTH**2 * np.eye(len(values))
        normal = slopes.T @ (weights[:, None] * slopes) + pull
        side = -slopes.T @ (weights * errors) - pull @ (values - self.start)
        normal += damping * np.diag(np.diag(normal) + 1e-9)
        lowest = np.log([c.lowest for c in self.constants])
        highest = np.log([c.highest for c in self.constants])
        free = np.ones(len(values), dtype=bool)
        moved = values
        while free.any():
            step = np.linalg.solve(normal[np.ix_(free, free)], side[free])
            moved = values.copy()
            moved[free] += np.clip(step, -0.7, 0.7)
            stuck = free & ((moved > highest) & (values > highest - 1e-3) | (moved < lowest) & (values < lowest + 1e-3))
            if not stuck.any():
                break
            free &= ~stuck
        return np.clip(moved, lowest, highest)

    def cost(self, errors: np.ndarray, values: np.ndarray) -> float:
        cauchy = TENTH**2 / 2 * np.log1p((errors / TENTH) ** 2)
        return float(cauchy.sum() + PRIOR_WEIGHT * TENTH**2 / 2 * ((values - self.start) ** 2).sum())

    def run(self, rounds: int, report: Callable[[str], None]) -> None:
        """Least squares until nothing is gained."""
        errors, damping = self.errors(), 0.01
        for round_ in range(rounds):
            slopes, values = self.jacobian(errors), self.values()
            before = self.cost(errors, values)
            for _ in range(5):
                self.put(self.step(errors, slopes, damping))
                moved = self.errors()
                if self.cost(moved, self.values()) < before:
                    break
                self.put(values)
                damping = max(damping * 6, 0.05)
            else:
                break
            errors, damping = moved, damping / 4
            report(f"round {round_}: median {np.median(abs(errors)):.4f} p90 {np.quantile(abs(errors), 0.9):.4f}")
            if self.cost(errors, self.values()) > before * (1 - 1e-3):
                break


VERDICT_MARGIN = 0.005
"""How far on the right side of the capacity a verdict is asked to be; an error beyond it is a wrong verdict."""


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
    margin = float(np.log(question.device_bytes(estimate) / question.case.cluster.device.memory_bytes))
    return (
        min(margin - VERDICT_MARGIN, 0.0) if question.case.row["status"] == "oom" else max(margin + VERDICT_MARGIN, 0.0)
    )


# ----------------------------------------------------------------------------------------------- the command


def time_rows(questions: Iterable[Question]) -> list[Question]:
    """Rows that fix time constants: grade A and B, and of the launch-bound C rows of one source every fourth."""
    found = [q for q in questions if q.case.measured_seconds is not None and q.case.row["status"] == "ok"]
    dense = [q for q in found if q.case.row["grade"] in "AB" and q.case.source not in UNUSABLE_TIME]
    return dense + [q for q in found if q.case.source == "vtrain_megatron_a100"][::4]


UNUSABLE_TIME = ("megatron_core_golden",)
"""Sources whose equal rows differ by a quarter and more in time."""


def stack_constants(limits: dict[str, tuple[float, float]], profiles: Profiles, names: Iterable[str]) -> list[Constant]:
    """The constants that the stacks themselves declare as fitted."""
    return [
        Constant(f"stack:{name}", field, *limits[field])
        for name in names
        for field in profiles.stacks[name].get("fitted", ())
        if field in limits
    ]


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
        fit.put(_borrowed(fit, fit.step(errors, slopes, 0.0, out), slopes, out))
        found[out] = fit.errors(np.flatnonzero(out))
        fit.put(values)
    return found


def _is_device(fit: Fit) -> np.ndarray:
    return np.array([constant.owner.startswith("device:") for constant in fit.constants])


def _borrowed(fit: Fit, values: np.ndarray, slopes: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`values`, those of stacks that only left-out rows use replaced by the median of the same constant elsewhere."""
    used = np.abs(slopes).sum(axis=0) > 0
    kept = np.abs(slopes[~out]).sum(axis=0) > 0
    found = values.copy()
    for j, constant in enumerate(fit.constants):
        if _is_device(fit)[j] or kept[j] or not used[j]:
            continue
        others = [values[i] for i, c in enumerate(fit.constants) if c.name == constant.name and kept[i]]
        found[j] = statistics.median(others) if others else fit.start[j]
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
    report(f"{title}: median / 90th percentile of the relative error")
    for kind, errors in kinds.items():
        counted = np.concatenate(list(by_source(fit, errors).values()))
        report(f"  {kind:10} all {len(counted)} rows: {summary(counted)}")
        verdicts = errors[[_is_verdict(fit, q) for q in fit.questions]]
        if len(verdicts):
            report(f"    {len(verdicts)} verdicts, right: {np.mean(abs(verdicts) <= VERDICT_MARGIN):.1%}")
        for source, part in by_source(fit, errors).items():
            report(f"    {source:30} {len(part):5} {summary(part)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="captured models, made when it does not exist")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=("time", "memory"))
    parser.add_argument("--markdown", type=Path, help="also write the tables into this file, between its marks")
    parser.add_argument("--write", action="store_true", help="put the values into the profiles")
    options = parser.parse_args(arguments)
    questions = _questions(options.data, options.cache)
    profiles, lines = Profiles(), list[str]()

    def report(line: str) -> None:
        lines.append(line)
        _print(line)

    names = list(profiles.stacks)
    if options.only != "memory":
        fit = _concerned(
            time_rows(questions), device_constants() + stack_constants(LIMITS, profiles, names), profiles, time_error
        )
        fit.run(options.rounds, report)
        table(fit, "step time", report)
        _show(fit, report)
    if options.only != "time":
        rows = [q for q in questions if q.case.measured_bytes or q.case.source == "hagemann2023"]
        fit = _concerned(rows, stack_constants(MEMORY_LIMITS, profiles, names), profiles, memory_error)
        fit.run(options.rounds, report)
        table(fit, "peak memory", report)
        _show(fit, report)
    if options.write:
        write(profiles)
    if options.markdown is not None:
        fill(options.markdown, "fit", ["```", *lines, "```"])


def _concerned(
    questions: list[Question],
    constants: list[Constant],
    profiles: Profiles,
    error: Callable[[Question, Profiles], float],
) -> Fit:
    """The fit of those constants that some row depends on."""
    fit = Fit(questions, constants, profiles, error)
    used = [constant for constant, rows in zip(constants, fit._touched, strict=True) if rows]
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
        edge = " (at its limit)" if not constant.lowest * 1.01 < value < constant.highest / 1.01 else ""
        report(f"  {constant.owner:40} {constant.name:30} {start:10.4g} -> {value:10.4g}{edge}")


def write(profiles: Profiles) -> None:
    """Puts the constants into the shipped files, three digits each."""
    for name, figures in profiles.stacks.items():
        rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in figures.items()}
        (PROFILES / "stacks" / f"{name}.json").write_text(json.dumps(rounded, indent=2) + "\n")
    for family, values in profiles.devices.items():
        for device in FAMILIES[family]:
            path = PROFILES / "library" / f"{device}.json"
            entry = json.loads(path.read_text())
            for field, value in values.items():
                digits = float(f"{value:.3g}")
                if isinstance(entry["device"][field], dict):
                    entry["device"][field] |= {"bf16": digits, "fp16": digits}
                else:
                    entry["device"][field] = digits
            path.write_text(json.dumps(entry, indent=2) + "\n")


if __name__ == "__main__":
    main()
