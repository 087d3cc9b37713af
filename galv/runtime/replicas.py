"""DistributedDataParallel in the form that the model needs, which the graph of its first forward shows.

DDP waits for the gradient of every parameter, or, at the cost of a walk through the autograd graph and one more
collective a step, finds out each time which parameters take part. Models with a parameter that does not are rare, and
only they get the second form. A model whose parameters all take part at first but not later ends with DDP's own error;
ZeRO 1 has no such limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree


class Replicas:
    """`model`, to be called in its place, with its gradients averaged over `group`; the ranks' weights are equal.

    All ranks of `group` must call it alike.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group = _Held(model), group
        self._ddp: DistributedDataParallel | None = None
        self.reduces = True
        """Whether the backward of the next forward averages gradients, with all accumulated before."""

    @property
    def finds_unused(self) -> bool:
        """Whether each backward finds out which parameters take part. False until the first forward."""
        return self._ddp is not None and bool(self._ddp.find_unused_parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this rank's samples."""
        if self._ddp is None:
            output = self._model(*args, **kwargs)
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            if not trained or not torch.is_grad_enabled():
                return output
            # DDP takes the forward that there is for its own: backward comes after it in any case.
            self._ddp = self._replicated(_reaches(output, trained), trained[0].device)
            self._model.computed = (output,)
        self._ddp.require_backward_grad_sync = self.reduces
        return self._ddp(*args, **kwargs)

    def _replicated(self, reaches_all: bool, device: torch.device) -> DistributedDataParallel:
        missing = torch.tensor(not reaches_all, dtype=torch.int32, device=device)
        dist.all_reduce(missing, dist.ReduceOp.MAX, group=self._group)
        ddp = DistributedDataParallel(
            self._model,
            process_group=self._group,
            gradient_as_bucket_view=True,
            init_sync=False,
            find_unused_parameters=bool(missing),
        )
        # Buffers are computed alike on every rank. (The constructor's argument for this is renamed in torch 2.13.)
        ddp.broadcast_buffers = False
        return ddp


class _Held(nn.Module):
    """The model, which returns what it has computed already where there is such."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.computed: tuple[Any, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.computed:
            (output,), self.computed = self.computed, ()
            return output
        return self.model(*args, **kwargs)


def _reaches(output: Any, parameters: list[nn.Parameter]) -> bool:
    """Whether backward from `output`, or from the loss in it, reaches every one of `parameters`.

    True, too, where that cannot be seen: behind reentrant checkpoints, and in outputs of unknown kinds.
    """
    waiting = [tensor.grad_fn for tensor in _roots(output) if tensor.grad_fn is not None]
    if not waiting:
        return True
    seen, reached = set(waiting), set[int]()
    while waiting:
        node = waiting.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        if (variable := getattr(node, "variable", None)) is not None:
            reached.add(id(variable))
        following = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= following
        waiting.extend(following)
    return reached.issuperset(map(id, parameters))


def _roots(output: Any) -> list[Tensor]:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return [leaf for leaf in pytree.tree_leaves(output if loss is None else loss) if isinstance(leaf, Tensor)]
