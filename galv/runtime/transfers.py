"""What pipeline ranks send each other: activations up the model, gradients down, each in the order of the schedule.

From a rank to another messages go in the order in which the sender runs the operations that make them. The receiver
knows that order, and posts its receives in it, so the two always agree on what comes next. Messages to higher ranks and
to lower ones have a communicator each: NCCL runs what one communicator carries between two ranks one after the other,
and would wait for ever where both send first. A receive is posted an operation ahead of need, so that it overlaps with
computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from galv.schedules import Operation, Orders

Directions = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""The groups for messages to higher and to lower pipeline ranks."""


def directions(mesh: DeviceMesh, axis: str) -> Directions:
    """Groups for the messages along an axis. Every rank must call it.

    They are the axis's own group where messages of two directions cannot hold each other up.
    """
    group = mesh.get_group(axis)
    if "nccl" not in str(dist.get_backend(group)):
        return group, group
    names = mesh.mesh_dim_names or ()
    lists = mesh.mesh.movedim(names.index(axis), -1).reshape(-1, mesh[axis].size()).tolist()
    up, _ = dist.new_subgroups_by_enumeration(lists)
    down, _ = dist.new_subgroups_by_enumeration(lists)
    assert up is not None and down is not None
    return up, down


@dataclass(frozen=True, eq=False)
class _Sent:
    """A message on its way."""

    peer: int
    needed_at: int
    """The place of the operation that takes it, in its rank's order."""
    works: tuple[dist.Work, ...]
    tensors: tuple[Tensor, ...]
    """Must live until they have arrived."""


class Transfers:
    """One rank's messages in a step of `orders`.

    `tensors_of(operation)` are empty tensors for what an operation of another rank sends to this one.
    """

    def __init__(
        self, orders: Orders, rank: int, groups: Directions, tensors_of: Callable[[Operation], Sequence[Tensor]]
    ) -> None:
        self._orders, self._rank, self._groups, self._tensors_of = orders, rank, groups, tensors_of
        self._places = {op: place for run in orders.ranks for place, op in enumerate(run)}
        self._messages = {peer: list(self._messages_of(peer)) for peer in range(len(orders.ranks)) if peer != rank}
        self._coming: dict[int, Iterator[Operation]] = {}
        self._posted: dict[Operation, tuple[list[dist.Work], Sequence[Tensor]]] = {}
        self._sent: list[_Sent] = []
        # What a fake group carries has arrived at once, though its works do not say so.
        self._at_once = "fake" in str(dist.get_backend(groups[0]))

    def begin(self) -> None:
        """A step begins."""
        self._coming = {peer: iter(messages) for peer, messages in self._messages.items()}

    def source(self, operation: Operation) -> Operation | None:
        """The operation of another rank whose result `operation` takes, if there is one."""
        others = (op for op in self._orders.needs(operation) if self._orders.rank_of(op.chunk) != self._rank)
        return next(others, None)

    def expect(self, operation: Operation) -> None:
        """Posts the receive of what `operation` takes, and of all that comes before it from there."""
        source = self.source(operation)
        if source is None or source in self._posted:
            return
        peer = self._orders.rank_of(source.chunk)
        for coming in self._coming[peer]:
            tensors = self._tensors_of(coming)
            self._posted[coming] = [self._call(dist.irecv, t, peer, self._rank) for t in tensors], tensors
            if coming == source:
                return

    def receive(self, operation: Operation) -> Sequence[Tensor]:
        """What `operation` takes from another rank, once it is there."""
        source = self.source(operation)
        assert source is not None
        self.expect(operation)
        works, tensors = self._posted.pop(source)
        for work in works:
            work.wait()
        if works:
            self._settle(self._orders.rank_of(source.chunk), self._places[source])
        return tensors

    def send(self, taker: Operation, tensors: Sequence[Tensor]) -> None:
        """Sends what `taker`, an operation of another rank, takes."""
        peer = self._orders.rank_of(taker.chunk)
        works = tuple(self._call(dist.isend, tensor, self._rank, peer) for tensor in tensors)
        self._sent.append(_Sent(peer, self._places[taker], works, tuple(tensors)))
        self._settle(-1, -1)

    def finish(self) -> None:
        """Waits until everything has arrived."""
        for sent in self._sent:
            for work in sent.works:
                work.wait()
        self._sent.clear()

    def _call(self, kind: Callable[..., dist.Work | None], tensor: Tensor, source: int, target: int) -> dist.Work:
        group = self._groups[0 if target > source else 1]
        peer = target if source == self._rank else source
        work = kind(tensor, group=group, **{"group_dst" if kind is dist.isend else "group_src": peer})
        assert work is not None, "this rank is in the group"
        return work

    def _messages_of(self, peer: int) -> Iterator[Operation]:
        """The operations of `peer` whose results come to this rank, in order."""
        for operation in self._orders.ranks[peer]:
            taker = taker_of(operation, self._orders)
            if taker is not None and self._orders.rank_of(taker.chunk) == self._rank:
                yield operation

    def _settle(self, peer: int, place: int) -> None:
        """Lets go of what has arrived: what is known to be complete, and what `peer` has taken before `place`."""
        left = []
        for sent in self._sent:
            taken = sent.peer == peer and sent.needed_at <= place
            if taken or self._at_once or all(work.is_completed() for work in sent.works):
                for work in sent.works:
                    work.wait()
            else:
                left.append(sent)
        self._sent = left


def taker_of(operation: Operation, orders: Orders) -> Operation | None:
    """The operation on the neighbouring chunk that takes what `operation` makes, if there is one."""
    kind, chunk, microbatch = operation
    if kind == "forward":
        return Operation(kind, chunk + 1, microbatch) if chunk + 1 < orders.num_chunks else None
    return Operation(kind, chunk - 1, microbatch) if chunk and kind != "weight" else None


def warm_up(orders: Orders, rank: int, groups: Directions, device: torch.device) -> None:
    """Opens every connection that a step needs. All ranks call it, and open them in one order."""
    pairs = sorted(
        {
            (orders.rank_of(op.chunk), orders.rank_of(taker.chunk))
            for run in orders.ranks
            for op in run
            if (taker := taker_of(op, orders)) is not None
        }
    )
    for source, target in pairs:
        group = groups[0 if target > source else 1]
        if source != target and rank == source:
            dist.send(torch.zeros(1, device=device), group=group, group_dst=target)
        elif source != target and rank == target:
            dist.recv(torch.zeros(1, device=device), group=group, group_src=source)
