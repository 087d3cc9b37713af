"""What one training loss is, and how many targets it is the mean of.

A microbatch's mean loss counts in proportion to its valid targets, so that the total is the mean over all targets of
the global batch however unevenly they are spread over microbatches and data-parallel groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galv.errors import ModelError

IGNORED = -100
"""The label of a target that does not count, as in `torch.nn.functional.cross_entropy` and Hugging Face models."""


def loss_of(output: Any) -> Tensor:
    """The scalar loss in a model's output: `output.loss`, `output["loss"]`, or the output itself when it is a scalar.

    Raises ModelError when there is none.
    """
    loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
    raise ModelError(
        f"the model returned {got}, which is no loss; it must return a scalar tensor or something with one as `.loss` "
        'or ["loss"] (Hugging Face models do when they are given `labels`)'
    )


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares position i with label i + 1, as Hugging Face causal language models do."""
    name = type(model).__name__
    return getattr(model, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


def valid_count(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The number of targets that the model's mean loss over `batch` is taken over, an int64 scalar.

    Labels that are not -100 (for causal language models without the first of each sequence, which nothing predicts);
    the number of samples when there are no integer `labels`.
    """
    return count_targets(batch, shifted=shifts_labels(model))


def count_targets(batch: Mapping[str, Tensor], *, shifted: bool) -> Tensor:
    """`valid_count` for callers that know already whether the model shifts its labels."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        any_tensor = next(iter(batch.values()))
        return torch.tensor(len(any_tensor), device=any_tensor.device)
    return ((labels[..., 1:] if shifted else labels) != IGNORED).sum()


def microbatch_weights(counts: Tensor, group: dist.ProcessGroup | None, num_groups: int) -> Tensor:
    """What each microbatch's mean loss is multiplied with before backward, float32 (num_microbatches,).

    `counts` are this rank's valid targets by microbatch, `group` the ranks that work on other samples (None: there are
    none) and `num_groups` how many they are. Gradients are averaged over them, hence the factor `num_groups`: divided
    by it, the weights of all microbatches of all groups sum to 1 (to 0 when the batch has no valid target at all).
    """
    total = counts.sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return counts.float() * num_groups / total.clamp(min=1)


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """`loss * weight`, and 0 where the weight is 0: the mean over no targets is not a number."""
    return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight
