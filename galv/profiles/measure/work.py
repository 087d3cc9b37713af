"""The work behind each question, as eager training does it: fresh outputs, linear layers' layout, fused updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galv.profiles.measure.grid import Question

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# torch 2.13 has new names for the two, and warns of the old ones.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ADAMW_BYTES, _SGD_BYTES, _CLIP_BYTES = 28, 12, 12
"""Traffic of one parameter's update and clipping, as the cost models count it."""

Work = Callable[[], None]


@dataclass(frozen=True)
class Place:
    """Where the work runs, and the groups that it communicates in."""

    device: torch.device
    groups: Mapping[tuple[int, int], dist.ProcessGroup]
    """This rank's group of each (members, nodes)."""

    def synchronize(self) -> None:
        """Returns when the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def work_of(question: Question, place: Place) -> Work:
    """A function that does the work of `question` once. Collective where the question is."""
    return _WORK[question.kind](question, place)


def units_of_work(question: Question) -> int:
    """How often one run of the work does what is asked for."""
    return {"launch": _NUM_LAUNCHES, "traffic": 2 if question.traffic == "elementwise" else 1}.get(question.kind, 1)


_NUM_LAUNCHES = 200


def _launch(question: Question, place: Place) -> Work:
    """Small operators that autograd follows, forward and backward, as a training step issues them."""
    small = torch.ones(16, device=place.device, requires_grad=True)

    def run() -> None:
        out = small
        for _ in range(_NUM_LAUNCHES // 2):
            out = out * small
        out.backward(small)

    return run


def _matmul(question: Question, place: Place) -> Work:
    batch, m, n, k = question.shape
    dtype = DTYPES[question.dtype]
    if batch == 1:
        x, weight = _random(place, m, k, dtype=dtype), _random(place, n, k, dtype=dtype)
        return lambda: _drop(x @ weight.T)
    left, right = _random(place, batch, m, k, dtype=dtype), _random(place, batch, n, k, dtype=dtype)
    return lambda: _drop(left @ right.mT)


def _attention(question: Question, place: Place) -> Work:
    batch, heads, length, head_dim = question.shape
    shape, dtype = (batch, heads, length, head_dim), DTYPES[question.dtype]
    query, key, value = (_random(place, *shape, dtype=dtype) for _ in range(3))
    attend = nn.functional.scaled_dot_product_attention
    if question.phase == "forward":
        return lambda: _drop(attend(query, key, value, is_causal=True))
    leaves = [part.requires_grad_() for part in (query, key, value)]
    out = attend(query, key, value, is_causal=True)
    gradient = torch.ones_like(out)
    return lambda: _drop(torch.autograd.grad(out, leaves, gradient, retain_graph=True))


def _traffic(question: Question, place: Place) -> Work:
    kind = question.traffic
    if kind == "elementwise":
        # A sum moves three tensors and an activation two: on average 2.5 of 4 bytes an element.
        count = max(1, question.num_bytes // 10)
        a, b = _random(place, count), _random(place, count)

        def run() -> None:
            a + b
            nn.functional.silu(a)

        return run
    if kind in ("to_host", "to_device"):
        return _copy(question, place)
    per = {"adamw": _ADAMW_BYTES, "sgd": _SGD_BYTES, "clip": _CLIP_BYTES}[kind]
    parameter = nn.Parameter(_random(place, max(1, question.num_bytes // per)))
    parameter.grad = _random(place, parameter.numel())
    if kind == "clip":
        return lambda: _drop(nn.utils.clip_grad_norm_([parameter], 1.0))
    options = {"fused": True} if kind == "adamw" else {"foreach": True}
    family = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    optimizer = family([parameter], lr=1e-6, **options)  # type: ignore[arg-type]
    return lambda: _drop(optimizer.step())


def _copy(question: Question, place: Place) -> Work:
    on_device = torch.empty(question.num_bytes, dtype=torch.uint8, device=place.device)
    on_host = torch.empty(question.num_bytes, dtype=torch.uint8, pin_memory=place.device.type == "cuda")
    source, target = (on_device, on_host) if question.traffic == "to_host" else (on_host, on_device)
    return lambda: _drop(target.copy_(source, non_blocking=True))


def _collective(question: Question, place: Place) -> Work:
    group = place.groups[question.size, question.num_nodes]
    count = max(question.size, question.num_bytes // 4 // question.size * question.size)
    full, part = torch.zeros(count, device=place.device), torch.zeros(count // question.size, device=place.device)
    if question.collective == "p2p":
        return _send(full, group)
    first = dist.get_global_rank(group, 0)
    works: dict[str, Work] = {
        "all_reduce": lambda: _drop(dist.all_reduce(full, group=group)),
        "all_gather": lambda: _drop(_GATHER(full, part, group=group)),
        "reduce_scatter": lambda: _drop(_SCATTER(part, full, group=group)),
        "broadcast": lambda: _drop(dist.broadcast(full, src=first, group=group)),
    }
    if question.collective == "all_to_all":
        received = torch.empty_like(full)
        return lambda: _drop(dist.all_to_all_single(received, full, group=group))
    return works[question.collective]


def _send(message: Tensor, group: dist.ProcessGroup) -> Work:
    """One message from the first to the second member."""
    rank = dist.get_rank(group)
    other = dist.get_global_rank(group, 1 - rank)

    def run() -> None:
        if rank == 0:
            dist.send(message, other, group=group)
        else:
            dist.recv(message, other, group=group)

    return run


def _overlap(question: Question, place: Place) -> Work:
    compute = _matmul(Question("matmul", question.dtype, (1, 1024, 1024, 1024)), place)
    group = next(g for (size, _), g in place.groups.items() if size == question.size)
    message = torch.zeros(question.num_bytes // 4, device=place.device)

    def together() -> None:
        handle = dist.all_reduce(message, group=group, async_op=True)
        compute()
        assert handle is not None
        handle.wait()

    alone: dict[str, Work] = {
        "compute": compute,
        "communication": lambda: _drop(dist.all_reduce(message, group=group)),
        "together": together,
    }
    return alone[question.part]


def _random(place: Place, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=place.device).to(dtype)


def _drop(_: object) -> None:
    """Lets a result go, as training lets go of what nothing needs."""


_WORK: dict[str, Callable[[Question, Place], Work]] = {
    "reference": _matmul,
    "launch": _launch,
    "matmul": _matmul,
    "attention": _attention,
    "traffic": _traffic,
    "collective": _collective,
    "overlap": _overlap,
}
