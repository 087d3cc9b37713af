"""What rank 0 tells of a training run: a table or JSON lines, TensorBoard events, and the estimate beside it all."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from galv.errors import UsageError
from galv.planner.plan import Plan
from galv.planner.plan_table import count, gib, seconds
from galv.runtime.train_config import TrainConfig
from galv.runtime.trainer import StepRecord


class Told:
    """The voice of a run that goes on after `done_steps`. Raises UsageError where TensorBoard is asked for in vain."""

    def __init__(self, plan: Plan, config: TrainConfig, done_steps: int) -> None:
        self._plan, self._config, self._done = plan, config, done_steps
        self._is_table = config.metrics.format == "table"
        folder = config.metrics.tensorboard
        self._events = None if folder is None else _events(folder)

    def while_training(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The records, each told when it comes; a progress bar where a person looks on."""
        if self._is_table:
            print(self._header(), flush=True)
        with _progress(self._config.steps - self._done) as advance:
            for record in records:
                is_time = record.step % self._config.metrics.every == 0 or record.step == self._config.steps
                if is_time or record.evaluation_loss is not None:
                    print(self._line(record) if self._is_table else json.dumps(self._figures(record)), flush=True)
                self._write_events(record)
                advance()
                yield record

    def at_the_end(self, records: list[StepRecord], peaks: list[int]) -> None:
        """What was measured beside what the plan promised."""
        measured = _median_seconds(records)
        if self._is_table:
            print(self._summary(measured, peaks), flush=True)
        else:
            estimate = self._plan.estimate
            said: dict[str, Any] = {"measured_step_seconds": measured, "estimated_step_seconds": estimate.step_seconds}
            said |= {"measured_peak_bytes": peaks, "estimated_peak_bytes": list(estimate.peak_bytes)}
            print(json.dumps(said), flush=True)
        if self._events is not None:
            self._events.close()

    # -- one step

    def _figures(self, record: StepRecord) -> dict[str, float]:
        figures = {
            "step": record.step,
            "loss": record.loss,
            "gradient_norm": record.gradient_norm,
            "learning_rate": record.learning_rate,
            "seconds": record.seconds,
            f"{self._unit()}_per_second": self._per_second(record.seconds),
            "peak_bytes": record.peak_bytes,
        }
        if record.evaluation_loss is not None:
            figures["evaluation_loss"] = record.evaluation_loss
        return figures

    def _line(self, record: StepRecord) -> str:
        held_out = "" if record.evaluation_loss is None else f"   evaluation loss {record.evaluation_loss:.4f}"
        return (
            f"{record.step:>6}  {record.loss:>9.4f}  {record.gradient_norm:>9.3f}  {seconds(record.seconds):>9}  "
            f"{self._per_second(record.seconds):>12,.0f}{held_out}"
        )

    def _write_events(self, record: StepRecord) -> None:
        if self._events is not None:
            for name, value in self._figures(record).items():
                if name != "step":
                    self._events.add_scalar(name, value, record.step)

    # -- the whole run

    def _header(self) -> str:
        plan, training, data = self._plan, self._plan.training, self._config.data
        source = data.tokens or data.dataset or "synthetic data"
        resumed = f"going on after step {self._done}\n" if self._done else ""
        return (
            f"{plan.model.name}, {count(plan.model.num_parameters)} parameters, on {plan.num_devices} x "
            f"{plan.cluster.device}: global batch {training.global_batch}, {training.precision}, {training.optimizer}, "
            f"{source}\n{resumed}\n"
            f"{'step':>6}  {'loss':>9}  {'grad norm':>9}  {'time':>9}  {self._unit() + '/s':>12}"
        )

    def _summary(self, measured: float, peaks: list[int]) -> str:
        estimate = self._plan.estimate
        rate = f"{self._per_second(measured):,.0f}", f"{estimate.tokens_per_second:,.0f}"
        rows = [
            ("", "measured", "estimated"),
            ("step", seconds(measured), seconds(estimate.step_seconds)),
            (f"{self._unit()}/s", *rate),
        ]
        for stage, (peak, expected) in enumerate(zip(peaks, estimate.peak_bytes, strict=True)):
            place = f", stage {stage}" if len(peaks) > 1 else ""
            rows.append((f"peak memory{place}", f"{gib(peak)} GiB", f"{gib(expected)} GiB"))
        return "\n" + "\n".join(f"{name:<22}{first:>12}{second:>12}" for name, first, second in rows)

    def _unit(self) -> str:
        return "samples" if self._plan.training.seq_len is None else "tokens"

    def _per_second(self, step_seconds: float) -> float:
        return self._plan.training.global_batch * (self._plan.training.seq_len or 1) / step_seconds


def _median_seconds(records: list[StepRecord]) -> float:
    """Of a step; the first warms up and counts only when alone."""
    return statistics.median(record.seconds for record in records[1:] or records)


def _events(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("metrics.tensorboard needs the package: pip install tensorboard") from error
    return SummaryWriter(folder)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A function that says that one more step is done."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Lines go above the bar when both are on the terminal, and untouched to a file or pipe.
    display = Progress(console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
    with display:
        task = display.add_task("training", total=steps)
        yield lambda: display.advance(task)
