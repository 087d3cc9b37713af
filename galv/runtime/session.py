"""A whole training run as its configuration says: data, learning rate, evaluation, checkpoints, weights to save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import Tensor

from galv.errors import UsageError
from galv.planner.plan import OptimizerName, Plan
from galv.runtime.checkpoint import CheckpointFolder
from galv.runtime.module import ParallelModule
from galv.runtime.synthetic import synthetic_batches
from galv.runtime.token_data import open_tokens, token_batches
from galv.runtime.train_config import Data, Optimizer, TrainConfig
from galv.runtime.trainer import StepRecord, train
from galv.runtime.weights import check_can_save, save_weights

_FAR = 10**6
"""A step that no run comes to: what evaluation begins with, so that made-up data too is not trained on."""


class Session:
    """One rank's run of `module` by `config`, from its newest checkpoint where there is one. All ranks make one alike.

    Raises UsageError for data, checkpoints or weights that cannot be used.
    """

    def __init__(self, module: ParallelModule, config: TrainConfig) -> None:
        self._module, self._config = module, config
        self._optimizer = module.optimizer(**_options(config.optimizer, module.plan.training.optimizer))
        self._folder = None
        self.done_steps = 0
        """Trained before this session began."""
        if config.checkpoints is not None:
            self._folder = CheckpointFolder(config.checkpoints.folder, keep=config.checkpoints.keep)
            self.done_steps = self._folder.resume(module, self._optimizer)
        if config.checkpoints is not None and self.done_steps >= config.steps:
            raise UsageError(
                f"the newest checkpoint in {config.checkpoints.folder} is of step {self.done_steps}, and the run has "
                f"{config.steps} steps: it is complete; raise steps to go on"
            )
        # Before the first step, so that data that cannot be read costs none.
        self._batches = self._open(config.data, self.done_steps)
        if config.evaluation is not None:
            self._open(config.evaluation, _FAR)
        if config.save_weights is not None:
            check_can_save(config.save_weights)

    def records(self) -> Iterator[StepRecord]:
        """What each step did; evaluates, saves checkpoints, and saves the weights after the last, as it is time."""
        config = self._config
        for record in train(
            self._module,
            self._batches,
            steps=config.steps,
            optimizer=self._optimizer,
            clip=config.optimizer.clip,
            first_step=self.done_steps + 1,
            learning_rate=lambda step: config.optimizer.lr * config.schedule.factor(step, config.steps),
        ):
            seen = record
            if config.evaluation is not None and self._is_time(record.step, config.evaluation.every):
                seen = replace(record, evaluation_loss=self._evaluate())
            if config.checkpoints is not None and self._is_time(record.step, config.checkpoints.every):
                assert self._folder is not None
                self._folder.save(record.step, self._module, self._optimizer)
            yield seen
        if config.save_weights is not None:
            save_weights(self._module, config.save_weights)

    def _is_time(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._config.steps

    def _evaluate(self) -> float:
        """The mean loss over the evaluation's batches, without dropout. Costs as many steps without their updates.

        A forward alone would do, but pipelines run forward and backward together; what is computed is dropped.
        """
        evaluation = self._config.evaluation
        assert evaluation is not None
        self._module.eval()
        losses = []
        for batch in islice(self._open(evaluation, _FAR), evaluation.batches):
            losses.append(self._module.train_step(self._module.shard_batch(batch)).item())
            self._optimizer.zero_grad()
        self._module.train()
        return sum(losses) / len(losses)

    def _open(self, data: Data, first_step: int) -> Iterator[Mapping[str, Tensor]]:
        plan, seed = self._module.plan, self._config.seed
        if data.tokens is None and data.dataset is None:
            return synthetic_batches(plan, seed, first_step)
        windows = open_tokens(data, _length(plan), seed)
        return token_batches(
            windows, plan, shifted=self._module.shifts_labels, first_step=0 if first_step == _FAR else first_step
        )


def _length(plan: Plan) -> int:
    if plan.training.seq_len is None:
        raise UsageError("token data needs a plan for samples of tokens, made with --seq-len")
    return plan.training.seq_len


def _options(config: Optimizer, name: OptimizerName) -> dict[str, Any]:
    """What the configuration says to the plan's optimizer."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if name == "adamw":
        return options | {"betas": config.betas, "eps": config.eps}
    return options | {"momentum": config.momentum}
