"""galv in one sitting: plan a large model for machines that are not here, then plan a small one and train under it.

    python examples/demo.py [--steps N]

Prints the plans of Llama-3-8B on 8 and on 64 H100s. Then plans a small Llama for four processes on this CPU, trains it
under that plan, trains it again in one process, and prints both losses side by side.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import galv
from galv.planner.plan import Plan
from galv.runtime.trainer import single_process_losses

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "models"
TOLERANCE = 1e-3


def main() -> None:
    """Runs the demonstration; exit status 1 when the two losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    llama = str(CONFIGS / "llama-3-8b.json")
    for cluster, global_batch in (("h100-sxm-80:8x1", 64), ("h100-sxm-80:8x8", 512)):
        title(f"Llama-3-8B, sequence 8192, on {cluster}")
        print(galv.plan(llama, cluster=cluster, seq_len=8192, global_batch=global_batch))

    title("A small Llama on four processes of this CPU")
    small = galv.plan(str(CONFIGS / "llama-tiny.json"), cluster="cpu:4x1", seq_len=128, global_batch=16)
    print(small)

    title(f"{steps} steps under that plan")
    parallel = run(small, steps)
    title("The same steps in one process")
    alone = single_process_losses(galv.build_model(small), small, steps=steps)
    if not compare(parallel, alone):
        sys.exit(1)


def title(text: str) -> None:
    """Prints a heading."""
    print(f"\n=== {text} ===\n", flush=True)


def run(plan: Plan, steps: int) -> list[float]:
    """The losses that `galv run` prints for `plan`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        command = [sys.executable, "-m", "galv", "run", str(path), "--steps", str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = list(map(echo, process.stdout))
    if process.returncode:
        sys.exit(process.returncode)
    rows = (re.match(r"\s+\d+\s+(\d+\.\d+)\s", line) for line in lines)
    return [float(row[1]) for row in rows if row]


def echo(line: str) -> str:
    """`line`, also printed."""
    print(line, end="", flush=True)
    return line


def compare(parallel: list[float], alone: list[float]) -> bool:
    """Whether both runs had the same losses, printed side by side."""
    print(f"{'step':>6}  {'parallel':>9}  {'alone':>9}")
    for step, (ours, theirs) in enumerate(zip(parallel, alone, strict=True), start=1):
        print(f"{step:>6}  {ours:>9.4f}  {theirs:>9.4f}")
    worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(parallel, alone, strict=True))
    print(f"\nlargest difference {100 * worst:.4f} %: {'equal' if worst <= TOLERANCE else 'NOT EQUAL'}")
    return worst <= TOLERANCE


if __name__ == "__main__":
    main()
