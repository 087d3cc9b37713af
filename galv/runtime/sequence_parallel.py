"""Blocks whose sequence is cut over a context axis of their own, with real collectives.

`galv.context_parallel` says what that means; this module gives it ranks that talk to one another, and puts it into the
user's blocks. A block takes and gives its activation cut; whoever is between units calls `to_part` and `to_whole`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galv.context_parallel import DeviceKind, exchanging_attention, local_arguments
from galv.context_parallel import to_part as to_part
from galv.context_parallel import to_whole as to_whole
from galv.planner.plan import SequenceLayout
from galv.runtime.randomness import ShardRegions
from galv.runtime.regroup import Peers, gathered


class ContextRanks:
    """The ranks of a group that share a sequence, see `context_parallel.Ranks`."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), group.size(), group
        self.kind: DeviceKind = "cuda" if device_type == "cuda" else "cpu"

    def exchange(self, tensor: Tensor) -> Tensor:
        """All-to-all along dim 0."""
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=self._group)
        return received

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A step round the ring, under way when this returns."""
        arriving = torch.empty_like(tensor)
        following, preceding = (
            dist.get_global_rank(self._group, (self.rank + step) % self.size) for step in (1, self.size - 1)
        )
        messages = [
            dist.P2POp(dist.isend, tensor, following, self._group),
            dist.P2POp(dist.irecv, arriving, preceding, self._group),
        ]
        under_way = dist.batch_isend_irecv(messages)

        def arrived() -> Tensor:
            for message in under_way:
                message.wait()
            return arriving

        return arrived

    def gather(self, tensor: Tensor) -> Tensor:
        """All-gather along a new dim 0."""
        return gathered(tensor.unsqueeze(0), 0, Peers(self._group, self.size))

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce, in place."""
        dist.all_reduce(tensor, group=self._group)
        return tensor


def apply_sequence_parallel(
    block: nn.Module, layout: SequenceLayout, ranks: ContextRanks, device: torch.device
) -> None:
    """Makes `block` compute on this rank's part of the sequence, in place. `ranks` are the context axis.

    It takes its activation cut and all else whole. Random numbers differ between the ranks. Apply it inside of
    recomputation and after tensor parallelism.
    """
    regions = ShardRegions(device, ranks.rank)
    running: list[contextlib.ExitStack] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        regions.enter()
        args, kwargs = local_arguments(args, kwargs, layout, ranks)
        running.append(contextlib.ExitStack())
        running[-1].enter_context(exchanging_attention(layout, ranks))
        return args, kwargs

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if running:
            running.pop().close()
        regions.leave()

    block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    # Also when recomputing stops early, by an exception.
    block.register_forward_hook(after, always_call=True)
