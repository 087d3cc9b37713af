"""Prices published training runs with galv and prints how far off it is.

    python benchmarks/published.py --data DIR [--source NAME] [--grade AB|ABC] [--json] [--markdown FILE]
    python benchmarks/published.py --data DIR --collectives --operators

DIR holds `published.csv` (and, for profiles, `collectives.csv` and `operators.csv`): any file with those columns will
do. Every usable row is priced by `galv.estimate` under the stack profile of the software that ran it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from accuracy import metrics, operators, profiles, rows
from accuracy.markdown import fill
from accuracy.metrics import Answer
from accuracy.questions import peak_bytes

import galv

COLUMNS = (
    ("time_rows", "rows", "d"),
    ("time_median", "median", ".1%"),
    ("time_p90", "p90", ".1%"),
    ("time_bias", "bias", "+.1%"),
    ("memory_rows", "rows", "d"),
    ("memory_median", "median", ".1%"),
    ("memory_p90", "p90", ".1%"),
    ("spearman", "rank", ".2f"),
    ("regret_mean", "regret", ".1%"),
    ("regret_max", "worst", ".1%"),
    ("regret_sound", "regret, sound sets", ".1%"),
    ("verdict_rows", "verdicts", "d"),
    ("verdict_accuracy", "right", ".1%"),
    ("missed_oom", "missed", ".1%"),
)
JSON_KEYS = (*(name for name, _, _ in COLUMNS), "choice_sets", "memory_bias")


def priced(cases: Iterable[rows.Case], left_out: Counter[tuple[str, str]]) -> Iterator[Answer]:
    """What galv says of every case; reasons for the others go to `left_out`."""
    ordered = sorted(cases, key=lambda case: (case.model_key, case.precision))
    for done, case in enumerate(ordered):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done + 1} of {len(ordered)} rows")
        try:
            graph = rows.graph(case.model_key, case.precision)
            plan = galv.estimate(
                graph,
                cluster=case.cluster,
                seq_len=case.seq_len,
                precision=case.precision,  # type: ignore[arg-type]
                stack=case.stack,
                **case.layout,
            )
        except galv.GalvError as error:
            left_out[case.source, str(error)] += 1
            continue
        estimate = plan.estimate
        yield Answer(case, estimate.step_seconds, peak_bytes(case, estimate), estimate.fits)


def by_source(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers of every source, in the order of the names."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.case.source, []).append(answer)
    return dict(sorted(found.items()))


def as_json(answers: Sequence[Answer], grades: str) -> dict[str, Any]:
    """All figures, by source and in all."""

    def figures(some: Sequence[Answer]) -> dict[str, Any]:
        summary = metrics.summary(some, grades)
        return {name: summary[name] for name in JSON_KEYS}

    return {
        "sources": {name: figures(some) for name, some in by_source(answers).items()},
        "all": figures(answers),
    }


# ----------------------------------------------------------------------------------------------- tables


def table(figures: dict[str, Any]) -> list[str]:
    """A Markdown table of all figures, a source a line."""
    lines = [
        "| source | " + " | ".join(name for _, name, _ in COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for name, one in [*figures["sources"].items(), ("**all**", figures["all"])]:
        lines.append(f"| {name} | " + " | ".join(_cell(one[key], form) for key, _, form in COLUMNS) + " |")
    return lines


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def left_out_lines(left_out: Counter[tuple[str, str]]) -> list[str]:
    """Why rows were left out, most frequent first."""
    return [f"* {source}: {count} rows: {reason}" for (source, reason), count in left_out.most_common()]


def confusion_lines(answers: Sequence[Answer]) -> list[str]:
    """Verdicts measured and predicted."""
    counts = metrics.confusion(answers)
    names = ("fits", "out of memory")
    lines = ["| measured | predicted to fit | predicted out of memory |", "|---|---:|---:|"]
    return lines + [f"| {a} | {counts[a, names[0]]} | {counts[a, names[1]]} |" for a in names]


def worst_lines(answers: Sequence[Answer], grades: str, count: int = 20) -> list[str]:
    """The rows whose step time is predicted worst."""
    timed = [a for a in answers if a.time_ratio is not None and a.case.row["grade"] in grades]
    timed.sort(key=lambda a: -abs((a.time_ratio or 1) - 1))
    return [
        f"* {a.case.row['row_id']} {a.case.model} {_layout(a.case)}: {a.case.measured_seconds:.4g} s measured, "
        f"{a.seconds:.4g} s predicted"
        for a in timed[:count]
    ]


def _layout(case: rows.Case) -> str:
    given = case.layout
    parts = [f"{case.row['num_gpus']} {case.row['gpu']}", f"tp {given['tp']}", f"pp {given['pp']}"]
    return ", ".join([*parts, f"zero {given['zero']}", f"micro batch {given['micro_batch']}", given["recompute"]])


def report(answers: Sequence[Answer], left_out: Counter[tuple[str, str]], grades: str, seconds: float) -> list[str]:
    """All that the command prints."""
    return [
        f"{len(answers)} rows priced in {seconds:.0f} s; step times of grade {grades}, memory of all grades.",
        "",
        *table(as_json(answers, grades)),
        "",
        "Verdicts:",
        "",
        *confusion_lines(answers),
        "",
        "Worst step times:",
        "",
        *worst_lines(answers, grades),
        "",
        "Rows left out:",
        "",
        *left_out_lines(left_out),
    ]


# ----------------------------------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prices published training runs and prints galv's error.")
    parser.add_argument("--data", type=Path, default=os.environ.get("GALV_PUBLISHED"), help="folder of published.csv")
    parser.add_argument("--source", help="only the rows of this source")
    parser.add_argument("--grade", choices=("AB", "ABC"), default="AB", help="grades of the rows whose time counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", type=Path, help="also write the tables into this file, between its marks")
    parser.add_argument("--collectives", action="store_true", help="price the profiles of collectives instead")
    parser.add_argument("--operators", action="store_true", help="price the profiles of operators instead")
    options = parser.parse_args(arguments)
    if options.data is None:
        say("no published runs to compare with: give --data DIR or set GALV_PUBLISHED")
        return 0
    options.data = Path(options.data)
    if options.collectives or options.operators:
        lines = [*profiles.collective_report(options.data)] if options.collectives else []
        lines += [*operators.operator_report(options.data)] if options.operators else []
        say("\n".join(lines))
        if options.markdown is not None:
            fill(options.markdown, "profiles", ["```", *lines, "```"])
        return 0
    return _published(options)


def _published(options: argparse.Namespace) -> int:
    started, left_out = time.perf_counter(), Counter[tuple[str, str]]()
    chosen = [row for row in rows.read_rows(options.data) if options.source in (None, row["source"])]
    cases = rows.cases(chosen, lambda row, reason: left_out.update([(row["source"], reason)]))
    launches = Counter(case.source for case in cases if rows.LAUNCH_BOUND in case.assumptions)
    answers = list(priced(cases, left_out))
    for source, count in launches.items():
        left_out[source, f"step time only: {rows.LAUNCH_BOUND}, says the row"] += count
    if options.json:
        say(json.dumps(as_json(answers, options.grade), indent=2))
        return 0
    lines = report(answers, left_out, options.grade, time.perf_counter() - started)
    say("\n".join(lines))
    if options.markdown is not None:
        fill(options.markdown, "tables", lines)
    return 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
