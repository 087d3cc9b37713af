"""Stands at the places where `galv.localize` hooks: module borders, and torch functions counted per module.

Both the trace and the rehearsal of a layout watch a module through this, so they see one and the same sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from galv.localize import with_integers


@dataclass(frozen=True)
class Site:
    """Where a torch function is called: the running module, the function's name, and how many such calls came before.

    Counted as in `plan.LocalArgument`.
    """

    module: str
    function: str
    occurrence: int


class FunctionCounter(TorchFunctionMode):
    """Gives every torch function that a watched module calls to `watch(site, func, args, kwargs)`."""

    def __init__(self, watch: Callable[[Site, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.watch = watch
        self._running: list[tuple[str, dict[str, int]]] = []
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets calls pass that are not the user's."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def enter(self, module: str) -> None:
        """From here on `module` is the one that calls."""
        self._running.append((module, {}))

    def leave(self) -> None:
        """The caller is again the module before."""
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._paused or not self._running or name == "__get__":  # reading an attribute is not a call
            return func(*args, **kwargs)
        module, seen = self._running[-1]
        occurrence = seen.get(name, 0)
        seen[name] = occurrence + 1
        return self.watch(Site(module, name, occurrence), func, args, kwargs)


@contextmanager
def counted(name: str, root: nn.Module, counter: FunctionCounter) -> Iterator[None]:
    """Tells `counter` which module of `root` is running; `root` itself is called `name`."""
    with ExitStack() as stack:
        for path, module in paths(name, root):
            for handle in (
                module.register_forward_pre_hook(lambda m, a, p=path: counter.enter(p)),
                module.register_forward_hook(lambda m, a, o: counter.leave(), always_call=True),
            ):
                stack.callback(handle.remove)
        yield


def paths(name: str, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of `root` with its name within the unit."""
    return ((".".join(p for p in (name, relative) if p), module) for relative, module in root.named_modules())


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree of arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def integers_in(tree: Any) -> tuple[int, ...]:
    """The integers among the arguments of a call, counted as in `plan.LocalArgument`."""
    found: list[int] = []

    def keep(_: int, value: int) -> int:
        found.append(value)
        return value

    with_integers(tree, keep)
    return tuple(found)


def shapes_in(tree: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors of a tree."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(tree))


def constants_in(tree: Any) -> tuple[float | bool, ...]:
    """The floats and truth values among the arguments of a call: a shard must see the same ones."""
    return tuple(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, (float, bool)))
