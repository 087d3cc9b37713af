"""Which places of a model share one tensor: replacing it in one place replaces it in all."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer of its own."""


class Ties:
    """The shared parameters and buffers of a model, as they are tied now. Keeps no tensor alive."""

    def __init__(self, root: nn.Module) -> None:
        by_tensor: dict[int, list[Place]] = {}
        for module in root.modules():
            for name, tensor in own_tensors(module):
                by_tensor.setdefault(id(tensor), []).append((module, name))
        self._peers = {place: places for places in by_tensor.values() if len(places) > 1 for place in places}

    def places(self, module: nn.Module, name: str) -> list[Place]:
        """Every place that shares the tensor `name` of `module`, this one among them."""
        return self._peers.get((module, name), [(module, name)])

    def replace(self, module: nn.Module, name: str, new: Tensor) -> None:
        """Puts `new` in the place of `module`'s `name`, wherever that is shared."""
        for owner, own_name in self.places(module, name):
            table = owner._parameters if own_name in owner._parameters else owner._buffers
            table[own_name] = new  # type: ignore[assignment]  # parameters are only replaced by parameters


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of `module` itself, with their own names."""
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer with its fully qualified name, tied ones under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in own_tensors(module):
            yield ".".join(filter(None, (prefix, name))), tensor
