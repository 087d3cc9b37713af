"""Where a parallel model's first weights come from, without any rank ever holding the whole model.

* A model on the meta device is initialized piece by piece: a piece is a repeated block, or one module outside of
  blocks. Each piece is drawn with a seed of its own by the model's own rules (see `initializing`), so that every plan
  starts from the weights that `initialize` gives one device of the same kind.
* Given `weights`, parameters are read from there, one tensor at a time.
* A model on a real device keeps its weights; those of rank 0 count.

Parameters are kept in single precision at least: they are what the optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galv.errors import ModelError
from galv.runtime.initializing import Initializer
from galv.runtime.ties import Ties, named_tensors, own_tensors

Weights = Mapping[str, Tensor] | Callable[[str], Tensor | None]
"""Full tensors by fully qualified name; a function may return None for a name that it does not have."""


def initialize(model: nn.Module, seed: int = 0, device: str | torch.device = "cpu") -> nn.Module:
    """`model`, in place, with every meta tensor initialized: the single-device reference of a parallel run.

    Raises ModelError for a tensor that the model itself does not initialize.
    """
    Materializer(model, Ties(model), seed=seed, device=torch.device(device)).fill(model, "")
    return model


def broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Gives every rank rank 0's values of all tensors that are not on the meta device, in place."""
    for _, tensor in named_tensors(model):
        if not tensor.is_meta and tensor.numel():
            value = tensor.detach()
            moved = value.to(device).contiguous()
            # As bytes: not every backend knows every type.
            dist.broadcast(moved.reshape(-1).view(torch.uint8), 0)
            value.copy_(moved)


class Materializer:
    """Puts real tensors on the device in the places of a model, a part of the model at a time.

    `model` is the whole model, not parallelized yet; `ties` says which places of what `fill` is given share a tensor.
    """

    def __init__(
        self, model: nn.Module, ties: Ties, *, seed: int, device: torch.device, weights: Weights | None = None
    ) -> None:
        self._ties, self._device, self._weights = ties, device, _reader(weights)
        is_real = not any(tensor.is_meta for _, tensor in named_tensors(model))
        self._initializer = None if is_real else Initializer(model, seed, device)

    def fill(self, module: nn.Module, name: str) -> None:
        """Makes every tensor of `module`, the model's part of that name, real and on the device."""
        drawn: dict[str, Tensor] = {}
        for part_name, part in module.named_modules():
            for own_name, tensor in list(own_tensors(part)):
                if tensor.is_meta:
                    full_name = ".".join(filter(None, (name, part_name, own_name)))
                    self._ties.replace(part, own_name, self._settled(self._real(full_name, tensor, drawn), tensor))
                elif tensor.device != self._device or _is_narrow(tensor):
                    self._ties.replace(part, own_name, self._settled(tensor, tensor))

    def _real(self, name: str, meta: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        """The value of the tensor called `name`; `drawn` holds what is drawn but not yet placed."""
        assert self._initializer is not None, f"{name} has come to lie on the meta device"
        aliases = self._initializer.aliases(name)
        if self._weights is not None:
            value = next((found for alias in aliases if (found := self._weights(alias)) is not None), None)
            if value is not None:
                return _checked(name, value, meta)
            if isinstance(meta, nn.Parameter):
                raise ModelError(f"the weights given have no {name!r}, which the model needs")
        if aliases[0] not in drawn:
            drawn.update(self._initializer.draw(aliases[0]))
        return drawn.pop(aliases[0])

    def _settled(self, value: Tensor, old: Tensor) -> Tensor:
        """`value` on the device, in the form (parameter or buffer) and precision that `old` should have."""
        if not isinstance(old, nn.Parameter):
            return value.detach().to(self._device, old.dtype)
        dtype = torch.float32 if _is_narrow(old) else old.dtype
        return nn.Parameter(value.detach().to(self._device, dtype), requires_grad=old.requires_grad)


def _is_narrow(tensor: Tensor) -> bool:
    """Whether it is a parameter of less than single precision."""
    return isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.itemsize < 4


def _checked(name: str, value: Tensor, meta: Tensor) -> Tensor:
    if value.shape != meta.shape:
        raise ModelError(f"the weights given for {name!r} have shape {tuple(value.shape)}, not {tuple(meta.shape)}")
    return value


def _reader(weights: Weights | None) -> Callable[[str], Tensor | None] | None:
    if isinstance(weights, Mapping):
        table = weights
        return lambda name: table.get(name)
    return weights
