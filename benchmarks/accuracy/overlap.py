"""Fits how much computation, all-gathers and host copies slow each other down, from a profile of all at once.

    python benchmarks/accuracy/overlap.py --data DIR [--write] [--markdown FILE]

Reads `overlap.csv` of DIR. What each work takes alone is fitted along, a rate for each machine and group; only the
slowdowns of pairs are kept. `--write` puts them into the profiles of the devices measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from accuracy.markdown import fill
from accuracy.profiles import DEVICES
from galv.cost_models.overlap import together_seconds
from galv.profiles.device import OverlapSlowdown, load_device

Row = dict[str, str]

LIBRARY = Path(__file__).parents[2] / "galv" / "profiles" / "library"
PAIRS = ("compute_link", "compute_network", "compute_host", "link_host", "network_host", "host_host")
SPREAD = 0.05
"""Errors beyond this have little say: Cauchy's loss."""
ROUNDS = 40


class Machine:
    """The rows of one device, and the constants that predict them: logarithms of rates, then of slowdowns."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.measured = np.array([float(row["seconds"]) for row in rows])
        self._works = [dict(_works(row)) for row in rows]
        self.rates = sorted({name for works in self._works for name in works})
        self.pairs = [pair for pair in PAIRS if "network" not in pair or any("network" in r for r in self.rates)]

    def start(self) -> np.ndarray:
        """Rates at which each work alone would explain its slowest row, and works that hardly disturb each other."""
        rates = [
            np.median([w[name] / s for w, s in zip(self._works, self.measured, strict=True) if name in w])
            for name in self.rates
        ]
        return np.log([*rates, *[1.1] * len(self.pairs)])

    def slowdown(self, values: np.ndarray) -> OverlapSlowdown:
        """The slowdowns among `values`; where no network was measured, it is taken to be as a link."""
        found = dict(zip(self.pairs, np.exp(values[len(self.rates) :]).tolist(), strict=True))
        found = {pair: found.get(pair, found.get(pair.replace("network", "link"))) for pair in PAIRS}
        return OverlapSlowdown.model_construct(**found, link_network=1.0)

    def errors(self, values: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Logarithms of predicted over measured seconds, of all rows or of those numbered."""
        which = np.arange(len(self.rows)) if rows is None else rows
        rates = dict(zip(self.rates, np.exp(values[: len(self.rates)]).tolist(), strict=True))
        slowdown = self.slowdown(values)
        predicted = [
            together_seconds([(name.split()[0], size / rates[name]) for name, size in works.items()], slowdown)
            for works in (self._works[i] for i in which)
        ]
        errors: np.ndarray = np.log(np.array(predicted) / self.measured[which])
        return errors

    def fit(self) -> np.ndarray:
        """Damped least squares with Cauchy's loss; slowdowns stay between 1 and 2."""
        values, damping = self.start(), 0.01
        lowest = np.full(len(values), -np.inf)
        highest = np.full(len(values), np.inf)
        lowest[len(self.rates) :], highest[len(self.rates) :] = 0.0, np.log(2.0)
        errors = self.errors(values)
        for spread in (1.0, SPREAD):
            for _ in range(ROUNDS):
                slopes = self._slopes(values, errors, highest)
                before = _cost(errors, spread)
                for _ in range(6):
                    moved = np.clip(values + _step(errors, slopes, spread, damping), lowest, highest)
                    found = self.errors(moved)
                    if _cost(found, spread) < before:
                        break
                    damping *= 5
                else:
                    break
                values, errors, damping = moved, found, damping / 4
                if _cost(errors, spread) > before * (1 - 1e-4):
                    break
        return values

    def _slopes(self, values: np.ndarray, errors: np.ndarray, highest: np.ndarray) -> np.ndarray:
        slopes = np.zeros((len(errors), len(values)))
        for j in range(len(values)):
            moved, step = values.copy(), 0.01 if values[j] + 0.01 < highest[j] else -0.01
            moved[j] += step
            rows = self._touched(j)
            slopes[rows, j] = (self.errors(moved, rows) - errors[rows]) / step
        return slopes

    def _touched(self, j: int) -> np.ndarray:
        """The rows that depend on the constant numbered `j`."""
        if j >= len(self.rates):
            return np.arange(len(self.rows))
        return np.flatnonzero([self.rates[j] in works for works in self._works])


def _works(row: Row) -> Iterator[tuple[str, float]]:
    """The works of a row with their sizes: FLOPs, bytes. A name starts with the resource."""
    flops = 2.0 * float(row["matmul_m"]) * float(row["matmul_n"]) * float(row["matmul_k"])
    across = int(row["num_nodes"]) > 1
    group = f"{'network' if across else 'link'} {row['group_intra']}x{row['group_inter']}"
    sizes = {
        "compute": flops,
        group: float(row["all_gather_bytes"]),
        f"host in {row['group_intra']}": float(row["host_to_device_bytes"]),
        f"host out {row['group_intra']}": float(row["device_to_host_bytes"]),
    }
    yield from ((name, size) for name, size in sizes.items() if size > 0)


def _cost(errors: np.ndarray, spread: float) -> float:
    return float(np.log1p((errors / spread) ** 2).sum())


def _step(errors: np.ndarray, slopes: np.ndarray, spread: float, damping: float) -> np.ndarray:
    weights = 1 / (1 + (errors / spread) ** 2)
    normal = slopes.T @ (weights[:, None] * slopes)
    normal += damping * np.diag(np.diag(normal) + 1e-9)
    step: np.ndarray = np.clip(np.linalg.solve(normal, -slopes.T @ (weights * errors)), -1, 1)
    return step


def read_machines(data: Path) -> dict[str, Machine]:
    """The rows of `overlap.csv` by device."""
    found: dict[str, list[Row]] = {}
    with (data / "overlap.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(DEVICES[row["gpu"]], []).append(row)
    return {name: Machine(rows) for name, rows in found.items()}


def report(device: str, machine: Machine, values: np.ndarray) -> Iterator[str]:
    """Lines: the error of the fit, of works that take the longest's time, and of works one after the other."""
    yield f"{device}: {_summary(machine.errors(values))}"
    count = len(machine.pairs)
    for name, level in (("undisturbed", 0.0), ("one after the other", np.log(2.0))):
        other = np.concatenate([values[:-count], np.full(count, level)])
        yield f"  all pairs {name}: {_summary(machine.errors(other))}"
    for pair, value in zip(machine.pairs, np.exp(values[-count:]), strict=True):
        yield f"  {pair:16} {value:.3f} (profile: {getattr(load_device(device).overlap, pair):.3f})"


def _summary(errors: np.ndarray) -> str:
    relative = abs(np.exp(errors) - 1)
    return f"{len(errors)} rows, median {np.median(relative):.1%}, p90 {np.quantile(relative, 0.9):.1%}"


def write(device: str, slowdown: OverlapSlowdown) -> None:
    """Puts the slowdowns, three digits each, into the files of the device and of those that are said to be like it."""
    figures = {pair: float(f"{getattr(slowdown, pair):.3g}") for pair in PAIRS}
    for path in LIBRARY.glob("*.json"):
        entry = json.loads(path.read_text())
        overlap = entry["device"]["overlap"]
        if path.stem == device or overlap["sources"]["compute_host"].startswith(f"as {device}:"):
            overlap |= figures
            path.write_text(json.dumps(entry, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="put the values into the profiles")
    parser.add_argument("--markdown", type=Path, help="also write the lines into this file, between its marks")
    options = parser.parse_args(arguments)
    lines = []
    for device, machine in read_machines(options.data).items():
        values = machine.fit()
        lines += report(device, machine, values)
        if options.write:
            write(device, machine.slowdown(values))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.markdown is not None:
        fill(options.markdown, "overlap", ["```", *lines, "```"])


if __name__ == "__main__":
    main()
