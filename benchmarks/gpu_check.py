"""Profiles one device, predicts a model's step on it, trains, and prints how far off the prediction was.

    python -m benchmarks.gpu_check [--device cuda] [--out FOLDER] [--minutes M]

A few minutes on a GPU. Each layout is a whole plan: plain, with recomputation, and with offloaded activations and
optimizer where this galv runs that. `--device cpu` runs the same on a small model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from galv import api
from galv.errors import GalvError
from galv.planner.plan_table import gib, seconds, table

GPU_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
CPU_MODEL = GPU_MODEL | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Layout:
    """One way to train on one device."""

    name: str
    micro_batch: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One layout as predicted and as run."""

    name: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def row(self) -> tuple[str, ...]:
        """As a line of a table."""
        return (
            self.name,
            seconds(self.predicted_seconds),
            seconds(self.measured_seconds),
            f"{100 * (self.predicted_seconds / self.measured_seconds - 1):+.1f} %",
            gib(self.predicted_bytes),
            gib(self.measured_bytes),
            f"{100 * (self.predicted_bytes / self.measured_bytes - 1):+.1f} %",
        )


def grid(device: str) -> list[Layout]:
    """The layouts to run."""
    micro_batches = (1, 4) if device == "cuda" else (1, 2)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "selective recompute": {"recompute": "selective"},
        "full recompute": {"recompute": "full"},
        "offload activations": {"offload": ["activations"]},
        "offload optimizer": {"zero": 1, "offload": ["optimizer"]},
    }
    return [
        Layout(f"{name}, microbatch {size}", size, options) for name, options in ways.items() for size in micro_batches
    ]


def main(arguments: list[str] | None = None) -> list[Result]:
    """Runs everything and prints the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layouts", type=int, help="only so many")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    model, length = options.out / "model.json", 2048 if options.device == "cuda" else 32
    model.write_text(json.dumps(GPU_MODEL if options.device == "cuda" else CPU_MODEL))
    profile = options.out / "profile.json"
    measured = ["profile", "-o", str(profile), "--quick", "--devices", options.device, "--nproc", "1"]
    galv(*measured, "--minutes", str(options.minutes))
    galv(*measured, "--minutes", str(options.minutes), "--model", str(model), "--seq-len", str(length))
    results = []
    for layout in grid(options.device)[: options.layouts]:
        result = attempt(layout, model, length, profile, options.out, options.steps)
        results += [] if result is None else [result]
    print(report(results))
    return results


def attempt(layout: Layout, model: Path, length: int, profile: Path, folder: Path, steps: int) -> Result | None:
    """`run`; None, with a word of why, for what this galv or this device cannot do."""
    try:
        return run(layout, model, length, profile, folder, steps)
    except (GalvError, subprocess.CalledProcessError) as error:
        print(f"{layout.name}: left out: {error}", flush=True)
        return None


def run(layout: Layout, model: Path, length: int, profile: Path, folder: Path, steps: int) -> Result:
    """Predicts and trains one layout."""
    plan = api.estimate(
        str(model),
        cluster=f"{profile}:1x1",
        seq_len=length,
        global_batch=2 * layout.micro_batch,
        micro_batch=layout.micro_batch,
        **layout.options,
    )
    place, record = folder / "plan.json", folder / "run.json"
    plan.save(place)
    galv("run", str(place), "--steps", str(steps), "--record", str(record))
    kept = json.loads(record.read_text())
    predicted = plan.estimate.stages[0].memory
    # What torch's allocator counts on a GPU, all of the process on a CPU.
    expected = predicted.allocated_bytes if plan.cluster.kind == "cuda" else predicted.total_bytes
    peak = kept["stages"][0]["peak_bytes"]
    return Result(layout.name, plan.estimate.step_seconds, kept["step_seconds"], expected, peak)


def report(results: list[Result]) -> str:
    """All results as a table."""
    heads = ("layout", "predicted", "measured", "error", "GiB predicted", "measured", "error")
    return table([heads, *(result.row for result in results)], right=range(1, 7))


def galv(*words: str) -> None:
    """Runs a command of galv's."""
    subprocess.run([sys.executable, "-m", "galv", *words], check=True)


if __name__ == "__main__":
    main()
