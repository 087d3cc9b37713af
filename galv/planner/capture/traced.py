"""Answers for the facts of every unit class by tracing, each (class, layout, microbatch) at most once.

Traces are made at two microbatch sizes and extended to any other; where the two do not agree in their operators, the
size asked for is traced itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from galv.planner.capture.emulate import Emulation
from galv.planner.capture.experts import find_experts
from galv.planner.capture.facts import NOTHING, block_facts, extended, facts_of, joined, size_bytes, traced_block
from galv.planner.capture.opaque import Opaque
from galv.planner.capture.sample import ModuleCall, UnitSample
from galv.planner.capture.skeleton import BlockCall, Skeleton, SkeletonRun
from galv.planner.capture.source import ModelSource
from galv.planner.capture.trace import Recorder
from galv.planner.graph import Exclusion, UnitFacts
from galv.planner.plan import (
    ContextMode,
    ExpertLayout,
    Layout,
    ModuleLayout,
    Redistribution,
    SequenceLayout,
    SequenceMode,
    TensorParallelLayout,
    absolute_name,
)
from galv.storages import tensors_in

FEW, MANY = 2, 4
"""Samples of the two traces that others are extended from. A single sample is traced itself: dims of length 1 make
some operators disappear."""


@dataclass(frozen=True)
class ClassPlace:
    """Where an example of a unit class lies in the model."""

    modules: tuple[str, ...]
    calls: tuple[int, ...]
    """Positions among the calls of blocks; none for what is not stubbed."""
    stretches: tuple[int, ...]
    """The stretches around the blocks that count for it."""
    parameters: tuple[str, ...] = ()
    is_block: bool = False
    """Whether it is a repeated block."""
    opaque: Opaque | None = None
    """The stand-in of a module that is not traced."""


class Layouts(NamedTuple):
    """What one rank is of: the layouts on the tensor, context and expert axes, None where an axis has one rank."""

    tensor: TensorParallelLayout | None
    sequence: SequenceLayout | None
    experts: tuple[ExpertLayout, int] | None = None
    """Those that are shared out, and over how many ranks."""

    def text(self, exclude: set[str] | None = None) -> str:
        """The same for equal layouts, `exclude` left out of the one on the tensor axis."""
        tensor = "" if self.tensor is None else self.tensor.model_dump_json(exclude=exclude)
        experts = "" if self.experts is None else f"ep{self.experts[1]}"
        return tensor + ("" if self.sequence is None else self.sequence.model_dump_json()) + experts


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
        self._lent_by_size: dict[int, dict[int, dict[int, int]]] = {}
        self._layouts: dict[tuple[str, int, SequenceMode], TensorParallelLayout | Exclusion] = {}
        self._sequence_layouts: dict[tuple[str, ContextMode, int, int], SequenceLayout | Exclusion] = {}
        self._experts: dict[str, ExpertLayout | Exclusion] = {}

    # -- questions

    def facts(
        self,
        unit_class: str,
        layout: TensorParallelLayout | None,
        microbatch: int,
        *,
        sequence: SequenceLayout | None = None,
        ep: int = 1,
    ) -> UnitFacts:
        """The facts of `unit_class` for `microbatch` samples on one rank; `layout` None means tp 1."""
        layouts = Layouts(layout, sequence, None if ep == 1 else (self._experts_of(unit_class), ep))
        key = (unit_class, layouts.text(), microbatch)
        if key not in self._facts:
            self._facts[key] = self._found(unit_class, layouts, microbatch)
        return self._facts[key]

    def layout(self, unit_class: str, degree: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion:
        """The placements found for a tensor-parallel degree, or why there are none."""
        from galv.planner.sharding import find_layout  # it imports the sample type from here

        if self.places[unit_class].opaque is not None:
            return _whole(self.sample(unit_class), degree, sequence)
        key = (unit_class, degree, sequence)
        if key not in self._layouts:
            self._layouts[key] = find_layout(self.sample(unit_class), degree, sequence)
        return self._layouts[key]

    def sequence_layout(
        self, unit_class: str, mode: ContextMode, degree: int, *, tp: int = 1
    ) -> SequenceLayout | Exclusion:
        """The cut of the sequence over `degree` ranks, each with a tensor axis of `tp`, or why there is none."""
        from galv.planner.sharding import find_sequence_layout  # it imports the sample type from here

        place = self.places[unit_class]
        if place.opaque is not None or not place.is_block:
            return Exclusion(
                f"{unit_class} is no repeated block that was traced; only those are cut along the sequence"
            )
        key = (unit_class, mode, degree, tp)
        if key not in self._sequence_layouts:
            self._sequence_layouts[key] = find_sequence_layout(self.sample(unit_class), mode, degree, tp=tp)
        return self._sequence_layouts[key]

    def expert_exclusion(self, unit_class: str, degree: int, *, tp: int = 1) -> Exclusion | None:
        """Why the experts cannot be shared out over `degree` ranks; None where they can."""
        found = self.expert_layout(unit_class)
        if isinstance(found, Exclusion):
            return found
        if found.num_experts % degree:
            return Exclusion(f"the {found.num_experts} experts of {unit_class} cannot be shared by {degree} ranks")
        return None if tp == 1 else self._beside_tensor_axis(found, tp)

    def _beside_tensor_axis(self, experts: ExpertLayout, tp: int) -> Exclusion | None:
        """What keeps experts that are cut over `tp` ranks each from being shared out over others."""
        held = {part.module for part in experts.modules}
        layouts = [self.layout(experts.unit_class, tp, mode) for mode in ("none", "megatron")]
        found = [layout for layout in layouts if isinstance(layout, TensorParallelLayout)]
        stored = (x for layout in found for part in layout.modules if part.module in held for x in _stored(part))
        if any(layout.kind == "S" and layout.dim == 0 for layout in stored):
            return Exclusion(f"the tensor axis of {tp} ranks shares out the experts of {experts.unit_class} itself")
        return None if found else next(layout for layout in layouts if isinstance(layout, Exclusion))

    def expert_layout(self, unit_class: str) -> ExpertLayout | Exclusion:
        """Where the experts of a unit class are, or why it has none to share out."""
        if unit_class not in self._experts:
            self._experts[unit_class] = self._found_experts(unit_class)
        return self._experts[unit_class]

    def _found_experts(self, unit_class: str) -> ExpertLayout | Exclusion:
        place = self.places[unit_class]
        if not place.is_block:
            return Exclusion(f"{unit_class} is no repeated block")
        sample = self.sample(unit_class)
        if len(sample.calls) > 1:
            return Exclusion(f"{unit_class} runs more than once")
        return find_experts(unit_class, sample.modules[0][1], sample.calls[0], self.skeleton.device)

    def _experts_of(self, unit_class: str) -> ExpertLayout:
        found = self.expert_layout(unit_class)
        assert not isinstance(found, Exclusion), found.reason
        return found

    def sample(self, unit_class: str) -> UnitSample:
        """An example unit of the class with the calls that it receives."""
        if unit_class not in self._samples:
            self._samples[unit_class] = self._sample(unit_class)
        return self._samples[unit_class]

    def _sample(self, unit_class: str) -> UnitSample:
        place, run = self.places[unit_class], self.run(FEW)
        modules = tuple((name, self.skeleton.model.get_submodule(name)) for name in place.modules)
        if place.calls:
            calls = [_module_call(run.calls[i]) for i in place.calls]
        else:
            named = {name: i for i, name in enumerate(place.modules)} if len(place.modules) > 1 else {}
            calls = [
                ModuleCall(str(named.get(name, "")), call.args, call.kwargs, call.activation)
                for name, (_, call) in run.module_calls.items()
                if name in place.modules
            ]
        tied = frozenset(self._tied(modules))
        return UnitSample(unit_class, modules, tuple(calls), FEW, place.is_block, tied)

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

    def _found(self, unit_class: str, layout: Layouts, microbatch: int) -> UnitFacts:
        if microbatch in (1, FEW, MANY):
            return self._traced(unit_class, layout, microbatch)
        few, many = (self._traced(unit_class, layout, size) for size in (FEW, MANY))
        found = extended((FEW, few), (MANY, many), microbatch)
        return self._traced(unit_class, layout, microbatch) if found is None else found

    def _traced(self, unit_class: str, layout: Layouts, num_samples: int) -> UnitFacts:
        place = self.places[unit_class]
        key = (unit_class, _content(layout, place), num_samples)
        if key not in self._exact:
            self._exact[key] = self._trace(place, layout, num_samples)
        return self._exact[key]

    def _trace(self, place: ClassPlace, layout: Layouts, num_samples: int) -> UnitFacts:
        run = self.run(num_samples)
        pieces = [(2 * run.calls[i].before + 1, self._call_facts(place, run.calls[i], layout)) for i in place.calls]
        cut = None if place.calls else layout.tensor
        local = run if cut is None else self._local_run(place, cut, num_samples)
        pieces += [(2 * i, self._stretch_facts(local, run, i, num_samples)) for i in place.stretches]
        return joined([facts for _, facts in sorted(pieces, key=lambda piece: piece[0])] or [NOTHING])

    def _call_facts(self, place: ClassPlace, call: BlockCall, layout: Layouts) -> UnitFacts:
        if place.opaque is not None:
            return _opaque_facts(place.opaque, call)
        block = self.skeleton.model.get_submodule(call.name)
        facts = block_facts(block, _module_call(call), self.skeleton.device, *layout)
        # An input of the model is there anyway, whoever saves it.
        return replace(facts, input_bytes=0, input_is_saved=False) if call.activation in call.given else facts

    def _stretch_facts(self, local: SkeletonRun, run: SkeletonRun, stretch: int, num_samples: int) -> UnitFacts:
        """The facts of a stretch, with what it makes and blocks save: tables of positions, an encoder's output."""
        ends = next((call for call in run.calls if call.before == stretch), None)
        begins = next((call for call in run.calls if call.before + 1 == stretch), None)
        passed = 0 if ends is None or ends.activation is None else size_bytes(_module_call(ends).tensor())
        given = 0 if begins is None or run.marks[stretch] else begins.output_bytes
        trace = local.stretches[stretch]
        facts = facts_of(trace, input_bytes=given, output_bytes=passed)
        lent = {key: size for key, size in self._lent(num_samples).get(stretch, {}).items() if key not in trace.saved}
        return replace(facts, saved_bytes=facts.saved_bytes + sum(lent.values())) if lent else facts

    def _lent(self, num_samples: int) -> dict[int, dict[int, int]]:
        """For each stretch, the storages (with their bytes) that it made and blocks save, activations left out."""
        if num_samples not in self._lent_by_size:
            lent: dict[int, dict[int, int]] = {}
            seen: set[Hashable] = set()
            for call in self.run(num_samples).calls:
                if (call.kind, call.numbers) in seen or call.name in self.skeleton.substitutes:
                    continue
                seen.add((call.kind, call.numbers))
                block = self.skeleton.model.get_submodule(call.name)
                _, saved = traced_block(block, _module_call(call), self.skeleton.device)
                for stretch, key, size in _made_around(call, saved):
                    lent.setdefault(stretch, {})[key] = size
            self._lent_by_size[num_samples] = lent
        return self._lent_by_size[num_samples]

    def _local_run(self, place: ClassPlace, layout: TensorParallelLayout, num_samples: int) -> SkeletonRun:
        """A run in which one rank's part of the modules around the blocks computes."""

        def emulate(recorder: Recorder) -> Emulation:
            return self._emulation(place, layout, recorder)

        return self._run(num_samples, emulate, stops_at_block=place.stretches == (0,) and bool(self.skeleton.blocks))

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


def _content(layout: Layouts, place: ClassPlace) -> str:
    """What of a layout makes a difference to the trace: around the blocks, the sequence mode does not."""
    return "" if place.opaque is not None else layout.text(None if place.calls else {"sequence"})


def _stored(part: ModuleLayout) -> Iterator[Layout]:
    return (change.source for change in part.parameters.values())


def _made_around(call: BlockCall, saved: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """(stretch, storage, bytes) of the arguments that were made around the blocks and that the block saves."""
    position = 0
    for key, value in call.arguments.items():
        held = list(tensors_in(value))
        kept = saved & set(range(position, position + len(held)))
        if kept and key != call.activation:
            yield from call.makers[key]
        position += len(held)


def _opaque_facts(opaque: Opaque, call: BlockCall) -> UnitFacts:
    """The facts of one run of an opaque module on made-up values."""
    made = ModuleCall("", opaque.made_up(call.args), opaque.made_up(call.kwargs), call.activation)
    return block_facts(opaque.module, made, "cpu")


def _whole(sample: UnitSample, degree: int, sequence: SequenceMode) -> TensorParallelLayout:
    """The layout of a unit that every rank holds whole."""
    keep = Redistribution(source=Layout(kind="R"), target=Layout(kind="R"))
    parts = [
        ModuleLayout(module=name, parameters=dict.fromkeys(own, keep))
        for name, module in sample.modules[0][1].named_modules()
        if (own := [parameter for parameter, _ in module.named_parameters(recurse=False)])
    ]
    return TensorParallelLayout(unit_class=sample.unit_class, degree=degree, sequence=sequence, modules=tuple(parts))
