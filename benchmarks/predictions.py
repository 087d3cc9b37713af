"""Profiles this machine once, then holds predictions for many layouts against training under them.

    python -m benchmarks.predictions [--out FOLDER] [--repeat N] [--worlds 1 2 4] [--only PREFIX]

Prints every layout's predicted and measured step and peak memory, then the median error, the rank correlation, how
much slower the layout with the best prediction is than the best measured one, and how much repetitions differ. Runs
are interleaved: every repetition goes through all layouts. What is measured already (in FOLDER) stays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galv import api
from galv.errors import GalvError
from galv.planner.plan import Plan
from galv.planner.plan_table import gib, seconds, table
from galv.profiles.measure.sampling import spread

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
        "max_position_embeddings": 256,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": 6,
        "n_embd": 192,
        "n_head": 4,
        "vocab_size": 4096,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
SEQ_LEN, GLOBAL_BATCH = 128, 16


@dataclass(frozen=True)
class Layout:
    """One model on one world under one strategy."""

    model: str
    world: int
    name: str
    options: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> str:
        """A name of its own."""
        return f"{self.model} {self.world} {self.name}"


@dataclass(frozen=True)
class Row:
    """What was predicted and measured of one layout; seconds and bytes, one measurement a repetition."""

    key: str
    group: str
    """Layouts among which a plan would have been chosen."""
    predicted_seconds: float
    predicted_bytes: int
    measured_seconds: tuple[float, ...]
    measured_bytes: tuple[int, ...]

    @property
    def time_error(self) -> float:
        return self.predicted_seconds / statistics.median(self.measured_seconds) - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / statistics.median(self.measured_bytes) - 1


def layouts() -> list[Layout]:
    """At least 24: two models on 1, 2 and 4 processes."""
    by_world: dict[int, dict[str, dict[str, Any]]] = {
        1: {"plain": {}, "recompute": {"recompute": "full"}, "microbatch 4": {"micro_batch": 4}},
        2: {
            "ddp": {"micro_batch": 4},
            "zero 2": {"zero": 2, "micro_batch": 4},
            "zero 3": {"zero": 3, "micro_batch": 4},
            "tp": {"tp": 2, "micro_batch": 4},
            "pp": {"pp": 2, "micro_batch": 4},
        },
        4: {
            "ddp": {"micro_batch": 4},
            "zero 3": {"zero": 3, "micro_batch": 4},
            "tp": {"tp": 4, "micro_batch": 8},
            "pp": {"pp": 4, "micro_batch": 4},
            "tp x dp": {"tp": 2, "micro_batch": 4},
            "pp x zero 1": {"pp": 2, "zero": 1, "micro_batch": 4},
            "tp x pp": {"tp": 2, "pp": 2, "micro_batch": 4},
        },
    }
    return [
        Layout(model, world, name, tuple(options.items()))
        for model in MODELS
        for world, ways in by_world.items()
        for name, options in ways.items()
    ]


def main() -> None:
    """Measures what is missing and prints everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("profile_benchmark"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=6.0, help="for each profile")
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", default="", help="layouts whose name begins so")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [x for x in layouts() if x.world in options.worlds and x.key.startswith(options.only)]
    profile = _profile(options.out, sorted({layout.model for layout in chosen}), options.minutes)
    plans = _plans(chosen, options.out, profile)
    for repetition in range(options.repeat):
        for layout in plans:
            _run(layout, options.out, repetition, options.steps)
    rows = [_row(layout, plan, options.out, options.repeat) for layout, plan in plans.items()]
    print(report([row for row in rows if row is not None]))


def _profile(folder: Path, models: Sequence[str], minutes: float) -> Path:
    profile = folder / "profile.json"
    words = ["profile", "-o", str(profile), "--devices", "cpu", "--nproc", "4", "--minutes", str(minutes)]
    if not profile.is_file():
        _galv(*words)
    for name in models:
        model = folder / f"{name}.json"
        model.write_text(json.dumps(MODELS[name]))
        sizes = [word for n in ("1", "4", "8") for word in ("--micro-batch", n)]
        _galv(*words, "--model", str(model), "--seq-len", str(SEQ_LEN), *sizes)
    return profile


def _plans(chosen: Sequence[Layout], folder: Path, profile: Path) -> dict[Layout, Plan]:
    plans = {}
    for layout in chosen:
        try:
            plans[layout] = api.estimate(
                str(folder / f"{layout.model}.json"),
                cluster=f"{profile}:{layout.world}x1",
                seq_len=SEQ_LEN,
                global_batch=GLOBAL_BATCH,
                **dict(layout.options),
            )
        except GalvError as error:
            print(f"{layout.key}: left out: {error}")
            continue
        plans[layout].save(folder / f"{_slug(layout)}.plan.json")
    return plans


def _run(layout: Layout, folder: Path, repetition: int, steps: int) -> None:
    record = folder / f"{_slug(layout)}.{repetition}.json"
    if not record.is_file():
        plan = folder / f"{_slug(layout)}.plan.json"
        try:
            _galv("run", str(plan), "--steps", str(steps), "--record", str(record))
        except subprocess.CalledProcessError as error:
            print(f"{layout.key}: {error}", flush=True)


def _row(layout: Layout, plan: Plan, folder: Path, repeat: int) -> Row | None:
    records = [folder / f"{_slug(layout)}.{i}.json" for i in range(repeat)]
    kept = [json.loads(record.read_text()) for record in records if record.is_file()]
    if not kept:
        return None
    return Row(
        key=layout.key,
        group=f"{layout.model} {layout.world}",
        predicted_seconds=plan.estimate.step_seconds,
        predicted_bytes=max(plan.estimate.peak_bytes),
        measured_seconds=tuple(record["step_seconds"] for record in kept),
        measured_bytes=tuple(max(stage["peak_bytes"] for stage in record["stages"]) for record in kept),
    )


def _slug(layout: Layout) -> str:
    return layout.key.replace(" ", "-")


def _galv(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "galv", *words], check=True, stdout=subprocess.DEVNULL)


# ----------------------------------------------------------------------------------------------- what it says


def report(rows: Sequence[Row]) -> str:
    """Every layout, then the figures that sum them up."""
    heads = ("layout", "predicted", "measured", "error", "repetitions", "GiB predicted", "measured", "error")
    lines: list[tuple[str, ...]] = [heads]
    lines += [_line(row) for row in rows]
    return f"{table(lines, right=range(1, 8))}\n\n" + "\n".join(summary(rows))


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.key,
        seconds(row.predicted_seconds),
        seconds(statistics.median(row.measured_seconds)),
        f"{100 * row.time_error:+.1f} %",
        f"+-{100 * spread(row.measured_seconds):.1f} %",
        gib(row.predicted_bytes),
        gib(statistics.median(row.measured_bytes)),
        f"{100 * row.memory_error:+.1f} %",
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """Median error, rank correlation, regret and memory error, a line each."""
    if not rows:
        return ["nothing was measured"]
    measured = [statistics.median(row.measured_seconds) for row in rows]
    regrets = regret(rows)
    steps = statistics.median(abs(row.time_error) for row in rows)
    peaks = statistics.median(abs(row.memory_error) for row in rows)
    return [
        f"{len(rows)} layouts; median error of the step {100 * steps:.1f} %",
        f"rank correlation {rank_correlation([row.predicted_seconds for row in rows], measured):.3f}",
        f"chosen over best measured: worst {100 * max(regrets):.1f} %, median {100 * statistics.median(regrets):.1f} %",
        f"median error of the peak memory {100 * peaks:.1f} %",
        f"repetitions differ by {100 * statistics.median(spread(row.measured_seconds) for row in rows):.1f} %",
    ]


def regret(rows: Sequence[Row]) -> list[float]:
    """For each group, by what share the layout with the least prediction was slower than the fastest one."""
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        chosen = min(members, key=lambda row: row.predicted_seconds)
        best = min(statistics.median(row.measured_seconds) for row in members)
        found.append(statistics.median(chosen.measured_seconds) / best - 1)
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; 1 of fewer than two."""
    if len(one) < 2:
        return 1.0
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*map(_floats, ranks))


def _floats(values: Sequence[int]) -> list[float]:
    return list(map(float, values))


if __name__ == "__main__":
    main()
