"""Runs the localized module on the meta device and sees to it that every tensor has the shape that was decided.

A rehearsal follows the layout through `galv.localize`, as training will, and compares each torch function's result with
the trace. Where a size is written into the model as a constant (`split(768)`, `view(b, s, 12, 64)`) the shapes differ;
the first rehearsal finds the local sizes, the second is held to them. What cannot be mended is a `Misfit`: then the
search must keep that value whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from galv.localize import localize, with_integers
from galv.planner.capture.known_values import GroupedProducts
from galv.planner.plan import LocalArgument, ModuleLayout, Redistribution, SequenceMode, TensorParallelLayout
from galv.planner.sharding.choices import Choice
from galv.planner.sharding.place import Place, global_shape, local_shape, place_of
from galv.planner.sharding.sizes import Shape, local_sizes, misplaced_bounds
from galv.planner.sharding.trace import Call, OwnParameter, Trace
from galv.planner.sharding.watch import FunctionCounter, Site, constants_in, counted, shapes_in


@dataclass(frozen=True)
class Misfit:
    """A call that does not run on a shard as decided."""

    call: Call
    reason: str


class _MisfitError(Exception):
    def __init__(self, misfit: Misfit) -> None:
        super().__init__(misfit.reason)
        self.misfit = misfit


def local_arguments(
    trace: Trace, chosen: Sequence[Choice], modules: tuple[ModuleLayout, ...], degree: int, sequence: SequenceMode
) -> tuple[LocalArgument, ...] | Misfit:
    """The sizes to be shrunk for the layout to run, proven by running it; or the call that cannot be made to run."""
    layout = TensorParallelLayout(unit_class="", degree=degree, sequence=sequence, modules=modules)
    try:
        found = _Rehearsal(trace, chosen, layout, mend=True).run()
        proof = layout.model_copy(update={"local_arguments": found})
        _Rehearsal(trace, chosen, proof, mend=False).run()
    except _MisfitError as error:
        return error.misfit
    return found


def misfit_on_shards(trace: Trace, chosen: Sequence[Choice], degree: int) -> Misfit | None:
    """The call that does not run on one of `degree` parts of the sequence, as it is; None when all do."""
    layout = TensorParallelLayout(unit_class="", degree=degree, sequence="none", modules=())
    try:
        _Rehearsal(trace, chosen, layout, mend=False, exchanges=True).run()
    except _MisfitError as error:
        return error.misfit
    return None


class _Rehearsal:
    """One run. `exchanges`: attention is not computed but believed, for its ranks exchange what they lack."""

    def __init__(
        self,
        trace: Trace,
        chosen: Sequence[Choice],
        layout: TensorParallelLayout,
        *,
        mend: bool,
        exchanges: bool = False,
    ) -> None:
        self.trace, self.layout, self.degree, self.mend = trace, layout, layout.degree, mend
        self.exchanges = exchanges
        self.places = [choice.output for choice in chosen]
        self.stored = {
            (id(self._module(node.mark.module)), node.mark.name): choice.stored
            for node, choice in zip(trace.nodes, chosen, strict=True)
            if isinstance(node.mark, OwnParameter)
        }
        self.found: list[LocalArgument] = []
        self.position = 0
        self.counter = FunctionCounter(self._watch)

    def run(self) -> tuple[LocalArgument, ...]:
        """The local arguments found. Raises `_MisfitError`."""
        trace = self.trace
        args, kwargs = self._inputs()
        handles = []
        try:
            with torch.enable_grad(), GroupedProducts(), self.counter, counted(trace.name, trace.module, self.counter):
                handles = localize(self._module, self.layout, self._redistribute, self._local_parameter)
                trace.module(*args, **kwargs)
        except _MisfitError:
            raise
        except Exception as error:
            raise self._misfit(f"{type(error).__name__}: {error}") from error
        finally:
            for handle in handles:
                handle.remove()
        if self.position != len(trace.calls):
            raise self._misfit(f"{len(trace.calls) - self.position} calls are missing")
        return tuple(self.found)

    # -- the hands that `localize` is given

    def _module(self, name: str) -> nn.Module:
        return self.trace.module.get_submodule(name.removeprefix(self.trace.name).removeprefix("."))

    def _inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = self.trace.call
        places = iter([self.places[node.index] for node in self.trace.nodes_of("input")])
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        local = [self._part(x, next(places)) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(local, spec)
        return args, kwargs

    def _part(self, value: Tensor, place: Place | None) -> Tensor:
        if place is None or not place.is_sharded:
            return value
        return value.new_empty(local_shape(tuple(value.shape), place, self.degree))

    def _local_parameter(self, module: nn.Module, name: str) -> Tensor:
        place = self.stored[id(module), name]
        assert place is not None
        with self.counter.paused():
            parameter: Tensor = getattr(module, name)
            shape = local_shape(tuple(parameter.shape), place, self.degree)
            return torch.empty(shape, dtype=parameter.dtype, device="meta")

    def _redistribute(self, tensor: Tensor, change: Redistribution) -> Tensor:
        with self.counter.paused():
            whole = global_shape(tuple(tensor.shape), place_of(change.source), self.degree)
            return tensor.new_empty(local_shape(whole, place_of(change.target), self.degree))

    # -- every call

    def _watch(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        if self.position == len(self.trace.calls) or self.trace.calls[self.position].site != site:
            raise self._misfit(f"{site.module} calls {site.function}, which it does not call when whole")
        call = self.trace.calls[self.position]
        whole = [self.trace.nodes[i].shape for i in call.results]
        local = [self._local(i) for i in call.results]
        output, error = self._tried(call, func, args, kwargs, local)
        if error and self.mend:
            change = self._change(call, args, kwargs, whole, local)
            args, kwargs = with_integers((args, kwargs), change.get)
            output, error = self._tried(call, func, args, kwargs, local)
            self.found.append(LocalArgument(**vars(site), arguments=change))
        if error:
            raise self._misfit(error)
        self.position += 1
        return output

    def _change(
        self, call: Call, args: Any, kwargs: Any, whole: Sequence[Shape], local: Sequence[Shape]
    ) -> dict[int, int]:
        places = [self.places[i] for i in call.results]
        if any(place is not None and place.dim == 0 and place.chunks > 1 for place in places):
            return {}  # a product with the number of samples, good for this number only
        with self.counter.paused():
            return local_sizes(call, args, kwargs, whole, local)

    def _tried(self, call: Call, func: Any, args: Any, kwargs: Any, wanted: list[Shape]) -> tuple[Any, str]:
        """The output of the call and "", or what is wrong with it."""
        with self.counter.paused():
            if constants_in((args, kwargs)) != call.constants:
                return None, f"{constants_in((args, kwargs))} in place of {call.constants}"
            misplaced = misplaced_bounds(call, args, kwargs)
        if misplaced:
            return None, misplaced
        if self.exchanges and call.site.function == "scaled_dot_product_attention":
            return args[0].new_empty(wanted[0]), ""
        try:
            output = func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            return None, str(error)
        shapes = list(shapes_in(output))
        return output, "" if shapes == wanted else f"it gives {shapes} in place of {wanted}"

    def _local(self, node: int) -> Shape:
        place = self.places[node]
        assert place is not None
        return local_shape(self.trace.nodes[node].shape, place, self.degree)

    def _misfit(self, reason: str) -> _MisfitError:
        call = self.trace.calls[min(self.position, len(self.trace.calls) - 1)]
        return _MisfitError(Misfit(call, reason))
