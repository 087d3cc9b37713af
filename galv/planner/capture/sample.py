"""One unit of the model with the calls that it receives: what the search for tensor-parallel layouts starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of one module of a unit, as the model makes it. Tensors are on the meta device."""

    module: str
    """Name within the unit, see `plan.absolute_name`: "" for a repeated block, "0", "1", ... for embedding and head."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    activation: str | None
    """The argument that carries the activation: its position ("0") or its keyword; None when no argument is a tensor.

    For a repeated block it is the output of the unit before; every other tensor argument arrives whole on each rank.
    """

    def tensor(self) -> Tensor:
        """The activation itself."""
        assert self.activation is not None
        return self.args[int(self.activation)] if self.activation.isdigit() else self.kwargs[self.activation]


@dataclass(frozen=True, eq=False)
class UnitSample:
    """One unit of a unit class: modules on the meta device and example calls at `num_samples` samples."""

    unit_class: str
    modules: tuple[tuple[str, nn.Module], ...]
    """(fully qualified name, module) of the modules that the unit owns, in the order of execution."""
    calls: tuple[ModuleCall, ...]
    """A repeated block has one; embedding and head have one for each module that they own."""
    num_samples: int = 2
    repeated: bool = True
    """Whether it is a repeated block: then its activation may come and go sharded along the sequence."""
    tied: frozenset[str] = frozenset()
    """Parameters, named within the unit, that another unit holds as well."""

    def module(self, relative: str) -> nn.Module:
        """The module named `relative` within the unit, see `plan.absolute_name`. Raises AttributeError if none is."""
        if len(self.modules) == 1:
            return self.modules[0][1].get_submodule(relative)
        index, _, rest = relative.partition(".")
        return self.modules[int(index)][1].get_submodule(rest)
