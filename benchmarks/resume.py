"""Kills ranks of runs with checkpoints, resumes, and compares the losses: `python benchmarks/resume.py [--kills N]`.

A run is killed at random moments, from the start of its ranks to their end, one random rank by SIGKILL each time, and
started again by the same command; when it comes to its end before its moment, another begins. Every loss that any of
them prints must be the unbroken run's of that step, to the last bit, and so must the weights at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2 zero3": (2, ["--zero", "3"]),
    "pp2 dp2 zero2": (4, ["--pp", "2", "--zero", "2"]),
}
STEPS, EVERY = 40, 6
SECONDS_TO_END = 300.0
"""A run that takes longer to end after one of its ranks was killed hangs, even on a loaded machine."""


@dataclass(frozen=True)
class Ended:
    """How one start of the run ended."""

    status: int
    losses: dict[int, float]
    killed_rank: int | None
    seconds_to_end: float
    """From the kill."""
    message: str


def main() -> None:
    """Prints a line for every kill of every layout; fails when a loss or a weight differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="*", default=[*LAYOUTS], choices=[*LAYOUTS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        agree = [_layout(name, Path(folder), options) for name in options.layouts]
    sys.exit(0 if all(agree) else 1)


def _layout(name: str, root: Path, options: argparse.Namespace) -> bool:
    """Whether killed and resumed runs under that layout equal the unbroken one."""
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    world_size, command = _prepared(name, folder)
    start = time.monotonic()
    unbroken = _run(command(folder / "unbroken"), None, 0.0)
    seconds = time.monotonic() - start
    assert unbroken.status == 0 and len(unbroken.losses) == STEPS, unbroken.message
    print(f"{name}: {STEPS} steps in {seconds:.1f} s, a checkpoint every {EVERY}")
    print(
        f"{'kill':>6}{'rank':>6}{'after':>9}{'status':>8}{'ended in':>10}{'steps seen':>12}{'largest difference':>20}"
    )
    draw = random.Random(options.seed)
    number, attempt, same = 0, 0, True
    while True:
        moment = draw.uniform(0, seconds) if number < options.kills else None
        ended = _run(command(folder / f"broken-{attempt}"), moment, draw.randrange(world_size))
        differences = [abs(loss - unbroken.losses[step]) for step, loss in ended.losses.items()]
        same &= not any(differences)
        if ended.killed_rank is not None:
            number += 1
            seen = f"{min(ended.losses)}-{max(ended.losses)}" if ended.losses else "none"
            print(
                f"{number:>6}{ended.killed_rank:>6}{moment:>7.1f} s{ended.status:>8}{ended.seconds_to_end:>8.1f} s"
                f"{seen:>12}{max(differences, default=0.0):>20}",
                flush=True,
            )
            same &= ended.status == 128 + signal.SIGKILL and ended.message.count("was stopped by SIGKILL") == 1
            continue
        same &= ended.status == 0 and _equal_weights(folder / "unbroken", folder / f"broken-{attempt}")
        print(
            f"{'end':>6}{ended.status:>23}{min(ended.losses, default=0):>20}-{STEPS}{max(differences):>19}", flush=True
        )
        attempt += 1
        if number >= options.kills:
            print(f"losses and weights {'equal' if same else 'DIFFER FROM'} the unbroken run's\n")
            return same


def _prepared(name: str, folder: Path) -> tuple[int, Any]:
    """The number of ranks, and the command that trains with checkpoints and weights in a folder."""
    world_size, layout = LAYOUTS[name]
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    tokens = np.random.default_rng(0).integers(0, MODEL["vocab_size"], 20_000).astype("uint16")
    tokens.tofile(folder / "tokens.bin")
    words = ["estimate", folder / "config.json", "--cluster", f"cpu:{world_size}x1", "--seq-len", "32"]
    sizes = ["--global-batch", "8", "--precision", "fp32", *layout, "-o", folder / "plan.json"]
    subprocess.run([*_galv(), *map(str, words + sizes)], check=True, capture_output=True, cwd=ROOT)

    def command(run: Path) -> list[str]:
        config = {
            "steps": STEPS,
            "data": {"tokens": str(folder / "tokens.bin")},
            "schedule": {"kind": "cosine", "warmup_steps": 5},
            "checkpoints": {"folder": str(run / "checkpoints"), "every": EVERY},
            "metrics": {"format": "jsonl"},
            "save_weights": str(run / "weights"),
        }
        run.mkdir(exist_ok=True)
        (run / "train.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return [*_galv(), "run", str(folder / "plan.json"), "--config", str(run / "train.yaml")]

    return world_size, command


def _galv() -> list[str]:
    return [sys.executable, "-m", "galv"]


def _run(command: list[str], moment: float | None, rank: int) -> Ended:
    """Starts `command` and kills that rank `moment` seconds after the first rank was there, if it still runs then."""
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    killed: list[float] = []
    killer = threading.Thread(target=_kill, args=(run, moment, rank, killed), daemon=True)
    if moment is not None:
        killer.start()
    out, err = run.communicate(timeout=600)
    end = time.monotonic()
    records = [json.loads(line) for line in out.splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "step" in record}
    seconds = end - killed[0] if killed else 0.0
    assert seconds < SECONDS_TO_END, f"the run took {seconds:.0f} s to end"
    # A rank that was killed in the middle of its own end changes nothing.
    broken = bool(killed) and run.returncode != 0
    return Ended(run.returncode, losses, rank if broken else None, seconds, err)


def _kill(run: subprocess.Popen[str], moment: float, rank: int, killed: list[float]) -> None:
    while run.poll() is None and rank not in _ranks(run.pid):
        time.sleep(0.05)
    end = time.monotonic() + moment
    while run.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process = _ranks(run.pid).get(rank)
    if run.poll() is None and process is not None:
        os.kill(process, signal.SIGKILL)
        killed.append(time.monotonic())


def _ranks(launcher: int) -> dict[int, int]:
    """The process of each rank that `launcher` has started."""
    return {rank: process for process in _children(launcher) if (rank := _rank(process)) is not None}


def _children(process: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            yield from map(int, task.read_text().split())


def _rank(process: int) -> int | None:
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), None)


def _equal_weights(first: Path, second: Path) -> bool:
    one, other = (load_file(folder / "weights" / "model.safetensors") for folder in (first, second))
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


if __name__ == "__main__":
    main()
