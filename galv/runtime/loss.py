"""What one training loss is, and how many targets it is the mean of.

A microbatch's mean loss counts in proportion to its valid targets, so that the total is the mean over all targets of
the global batch however unevenly they are spread over microbatches and data-parallel groups. Which input holds the
targets follows from names and types alone, so that all ranks decide alike; values only show a wrong decision, and that
on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galv.errors import ModelError, UsageError

IGNORED = -100
"""The label of a target that does not count, as in `torch.nn.functional.cross_entropy` and Hugging Face models."""
TARGET_NAMES = ("labels", "label", "targets", "target", "lm_labels")
"""What models call the input that holds their targets; the first of them that a batch has is it."""


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output: `output.loss`, `output["loss"]`, or the output itself when it is a scalar.

    Raises ModelError when there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output if loss is None else loss
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    where = "" if loss is output else f" whose loss is {_described(loss)}"
    raise no_loss(f"{_described(output)}{where}")


def no_loss(returned: str) -> ModelError:
    """The error for a model that returns something else than a loss, which `returned` describes."""
    return ModelError(
        f"the model returned {returned}, which is no loss; a training step needs one scalar tensor, or something with "
        'it as `.loss` or ["loss"] (Hugging Face models return one when they are given `labels`)'
    )


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"a {kind} with {', '.join(map(str, output)) or 'nothing'}"
    return f"a {kind} of {len(output)}" if isinstance(output, (tuple, list)) else f"a {kind}"


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares position i with label i + 1, as Hugging Face causal language models do."""
    name = type(model).__name__
    return getattr(model, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


@dataclass(frozen=True)
class Targets:
    """Which input of a model holds its targets, and which of them count."""

    shifted: bool
    """See `shifts_labels`."""
    name: str | None = None
    """As the user named it; None: by `TARGET_NAMES`."""

    def counted(self, batch: Mapping[str, Any]) -> str | None:
        """The input whose entries are counted; None when samples are: targets of floating point have no ignored ones.

        Raises UsageError when the batch lacks the input that the user named.
        """
        if self.name is not None and self.name not in batch:
            raise UsageError(f"the batch has no {self.name!r}, which was named as targets; it has {', '.join(batch)}")
        names = TARGET_NAMES if self.name is None else (self.name,)
        return next((name for name in names if name in batch and is_integer(batch[name])), None)

    def count(self, batch: Mapping[str, Any]) -> Tensor:
        """The number of targets that the model's mean loss over `batch` is taken over, an int64 scalar.

        Targets that are not -100 (for causal language models without the first of each sequence, which nothing
        predicts); the number of samples when there are no integer targets.
        """
        name = self.counted(batch)
        if name is None:
            value = next(v for v in batch.values() if isinstance(v, Tensor) and v.ndim)
            return torch.tensor(len(value), device=value.device)
        return ((batch[name][..., 1:] if self.shifted else batch[name]) != IGNORED).sum()

    def others(self, batch: Mapping[str, Any]) -> list[str]:
        """Integer inputs that may be the targets in truth; none when the user has named them."""
        counted = self.counted(batch)
        if self.name is not None:
            return []
        return [name for name, value in batch.items() if name != counted and is_integer(value)]

    def weights(self, microbatches: Sequence[Mapping[str, Any]], group: dist.ProcessGroup, num_groups: int) -> Tensor:
        """`microbatch_weights` of this rank's microbatches.

        Raises UsageError, on every rank of `group`, when another input than the one counted holds -100 on one.
        """
        counts = torch.stack([self.count(microbatch) for microbatch in microbatches])
        others = self.others(microbatches[0])
        marks = [torch.stack([(m[name] == IGNORED).any() for m in microbatches]).any() for name in others]
        totals = torch.stack([counts.sum(), *marks])
        dist.all_reduce(totals, group=group)
        if others:
            self._check(microbatches[0], [n for n, mark in zip(others, totals[1:].tolist(), strict=True) if mark])
        return _shares(counts, totals[0], num_groups)

    def _check(self, batch: Mapping[str, Any], suspects: Sequence[str]) -> None:
        if suspects:
            counted = self.counted(batch)
            raise UsageError(
                f"{suspects[0]!r} holds {IGNORED}, the mark of targets that do not count, but the loss is weighted by "
                f"the {'number of samples' if counted is None else f'targets in {counted!r}'}; name the input that the "
                f'loss is a mean over: galv.parallelize(model, plan, targets="{suspects[0]}")'
            )


def is_integer(value: Any) -> bool:
    """Whether it is a tensor of integers (or truth values)."""
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def valid_count(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """`Targets.count` for a model as it is, with the targets found by name."""
    return Targets(shifts_labels(model)).count(batch)


def microbatch_weights(counts: Tensor, group: dist.ProcessGroup | None, num_groups: int) -> Tensor:
    """What each microbatch's mean loss is multiplied with before backward, float32 (num_microbatches,).

    `counts` are this rank's valid targets by microbatch, `group` the ranks that work on other samples (None: there are
    none) and `num_groups` how many they are. Gradients are averaged over them, hence the factor `num_groups`: divided
    by it, the weights of all microbatches of all groups sum to 1 (to 0 when the batch has no valid target at all).
    """
    total = counts.sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return _shares(counts, total, num_groups)


def _shares(counts: Tensor, total: Tensor, num_groups: int) -> Tensor:
    return counts.float() * num_groups / total.clamp(min=1)


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """`loss * weight`, and 0 where the weight is 0: the mean over no targets is not a number."""
    return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight
