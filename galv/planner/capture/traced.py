"""Answers for the facts of every unit class by tracing, each (class, layout, microbatch) at most once.

Traces are made at two microbatch sizes and extended to any other; where the two do not agree in their operators, the
size asked for is traced itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from galv.planner.capture.emulate import Emulation
from galv.planner.capture.facts import block_facts, extended, facts_of, joined, size_bytes
from galv.planner.capture.sample import ModuleCall, UnitSample
from galv.planner.capture.skeleton import BlockCall, Skeleton, SkeletonRun
from galv.planner.capture.source import ModelSource
from galv.planner.capture.trace import Recorder, Trace
from galv.planner.graph import Exclusion, UnitFacts
from galv.planner.plan import SequenceMode, TensorParallelLayout, absolute_name

FEW, MANY = 2, 4
"""Samples of the two traces that others are extended from. A single sample is traced itself: dims of length 1 make
some operators disappear."""


@dataclass(frozen=True)
class ClassPlace:
    """Where an example of a unit class lies in the model."""

    modules: tuple[str, ...]
    block: int | None
    """Position among the executed blocks, None for embedding, head and a whole model."""
    stretches: tuple[int, ...]
    """The stretches around the blocks that count for it."""


class TracedFacts:
    """The `FactsSource` of a captured model."""

    def __init__(
        self, skeleton: Skeleton, source: ModelSource, dtype: torch.dtype, places: dict[str, ClassPlace]
    ) -> None:
        self.skeleton, self.source, self.dtype, self.places = skeleton, source, dtype, places
        self._runs: dict[int, SkeletonRun] = {}
        self._exact: dict[tuple[str, str, int], UnitFacts] = {}
        self._facts: dict[tuple[str, str, int], UnitFacts] = {}
        self._samples: dict[str, UnitSample] = {}
        self._layouts: dict[tuple[str, int, SequenceMode], TensorParallelLayout | Exclusion] = {}

    # -- questions

    def facts(self, unit_class: str, layout: TensorParallelLayout | None, microbatch: int) -> UnitFacts:
        """The facts of `unit_class` for `microbatch` samples on one rank; `layout` None means tp 1."""
        key = (unit_class, "" if layout is None else layout.model_dump_json(), microbatch)
        if key not in self._facts:
            self._facts[key] = self._found(unit_class, layout, microbatch)
        return self._facts[key]

    def layout(self, unit_class: str, degree: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion:
        """The placements found for a tensor-parallel degree, or why there are none."""
        from galv.planner.sharding import find_layout  # it imports the sample type from here

        key = (unit_class, degree, sequence)
        if key not in self._layouts:
            self._layouts[key] = find_layout(self.sample(unit_class), degree, sequence)
        return self._layouts[key]

    def sample(self, unit_class: str) -> UnitSample:
        """An example unit of the class with the calls that it receives."""
        if unit_class not in self._samples:
            self._samples[unit_class] = self._sample(unit_class)
        return self._samples[unit_class]

    def _sample(self, unit_class: str) -> UnitSample:
        place, run = self.places[unit_class], self.run(FEW)
        modules = tuple((name, self.skeleton.model.get_submodule(name)) for name in place.modules)
        if place.block is not None:
            calls = [_module_call(run.calls[place.block])]
        else:
            named = {name: i for i, name in enumerate(place.modules)} if len(place.modules) > 1 else {}
            calls = [
                ModuleCall(str(named.get(name, "")), call.args, call.kwargs, call.activation)
                for name, (_, call) in run.module_calls.items()
                if name in place.modules
            ]
        tied = frozenset(self._tied(modules))
        return UnitSample(unit_class, modules, tuple(calls), FEW, place.block is not None, tied)

    def _tied(self, modules: tuple[tuple[str, nn.Module], ...]) -> Iterator[str]:
        """The parameters of `modules`, named within their unit, that the model also holds elsewhere."""
        named = self.skeleton.model.named_parameters(remove_duplicate=False)
        prefixes = tuple(f"{name}." if name else "" for name, _ in modules)
        elsewhere = {id(parameter) for name, parameter in named if not name.startswith(prefixes)}
        for position, (_, module) in enumerate(modules):
            for name, parameter in module.named_parameters():
                if id(parameter) in elsewhere:
                    yield name if len(modules) == 1 else f"{position}.{name}"

    # -- traces

    def run(self, num_samples: int) -> SkeletonRun:
        """The run of the whole model's skeleton for `num_samples`, nothing sharded."""
        if num_samples not in self._runs:
            self._runs[num_samples] = self._run(num_samples)
        return self._runs[num_samples]

    def _run(
        self,
        num_samples: int,
        emulate: Callable[[Recorder], Emulation] | None = None,
        *,
        stops_at_block: bool = False,
    ) -> SkeletonRun:
        inputs, known = model_inputs(self.source, num_samples, self.dtype)
        return self.skeleton.run(inputs, known, emulate, stops_at_block=stops_at_block)

    def _found(self, unit_class: str, layout: TensorParallelLayout | None, microbatch: int) -> UnitFacts:
        if microbatch in (1, FEW, MANY):
            return self._traced(unit_class, layout, microbatch)
        few, many = (self._traced(unit_class, layout, size) for size in (FEW, MANY))
        found = extended((FEW, few), (MANY, many), microbatch)
        return self._traced(unit_class, layout, microbatch) if found is None else found

    def _traced(self, unit_class: str, layout: TensorParallelLayout | None, num_samples: int) -> UnitFacts:
        place = self.places[unit_class]
        key = (unit_class, _content(layout, place), num_samples)
        if key not in self._exact:
            self._exact[key] = self._trace(place, layout, num_samples)
        return self._exact[key]

    def _trace(self, place: ClassPlace, layout: TensorParallelLayout | None, num_samples: int) -> UnitFacts:
        run, block = self.run(num_samples), place.block
        if block is None:
            (stretch,) = place.stretches
            local = run if layout is None else self._local_run(place, layout, num_samples)
            return _stretch_facts(local.stretches[stretch], run.calls, stretch)
        call = run.calls[block]
        module = self.skeleton.model.get_submodule(call.name)
        own = block_facts(module, _module_call(call), self.skeleton.device, layout)
        around = {stretch: _stretch_facts(run.stretches[stretch], run.calls, stretch) for stretch in place.stretches}
        before = [facts for stretch, facts in around.items() if stretch <= block]
        after = [facts for stretch, facts in around.items() if stretch > block]
        return joined([*before, own, *after])

    def _local_run(self, place: ClassPlace, layout: TensorParallelLayout, num_samples: int) -> SkeletonRun:
        """A run in which one rank's part of the modules around the blocks computes."""

        def emulate(recorder: Recorder) -> Emulation:
            return self._emulation(place, layout, recorder)

        return self._run(num_samples, emulate, stops_at_block=place.stretches == (0,))

    def _emulation(self, place: ClassPlace, layout: TensorParallelLayout, recorder: Recorder) -> Emulation:
        def module_named(relative: str) -> nn.Module:
            return self.skeleton.model.get_submodule(absolute_name(place.modules, relative))

        return Emulation(module_named, layout, recorder)


# ----------------------------------------------------------------------------------------------- helpers


def model_inputs(
    source: ModelSource, num_samples: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(inputs on the meta device, floating ones as `dtype`; the values of integer inputs that have some)."""
    example = source.example(num_samples)
    inputs = {
        name: torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        for name, tensor in example.items()
    }
    known = {name: t.cpu() for name, t in example.items() if not t.is_meta and not t.is_floating_point()}
    return inputs, known


def _module_call(call: BlockCall) -> ModuleCall:
    return ModuleCall("", call.args, call.kwargs, call.activation)


def _content(layout: TensorParallelLayout | None, place: ClassPlace) -> str:
    """What of a layout makes a difference to the trace: around the blocks, the sequence mode does not."""
    if layout is None:
        return ""
    return layout.model_dump_json(exclude={"sequence"} if place.block is None else None)


def _stretch_facts(trace: Trace, calls: Sequence[BlockCall], stretch: int) -> UnitFacts:
    """The facts of the stretch before block `stretch` of `calls`."""
    given = calls[stretch - 1].output_bytes if stretch else 0
    passed = size_bytes(_module_call(calls[stretch]).tensor()) if stretch < len(calls) else 0
    return facts_of(trace, input_bytes=given, output_bytes=passed)
