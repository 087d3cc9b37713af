"""Finds a model's units, sorts them into classes and gives the graph that the search works on.

Repeated blocks are units, one module each. Between them, modules with parameters form a unit by the stretch in which
they are first used: `embedding` before the first block, `head` after the last one, `bridge 1` and so on in between.
Work between two blocks with no such module counts for the block before. Where nothing repeats, the units are parts
(`part encoder`), or the whole model is the unit `model`; a module that is not traced is `opaque NAME`.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.planner.capture.arrange import Arrangement, Problem, arranged, glue_of, matching
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.fingerprint import fingerprint_as as fingerprint_as
from galv.planner.capture.fingerprint import tied_parameters, unit_parameters
from galv.planner.capture.flow import edges_of, positions_of, why_no_pipeline
from galv.planner.capture.inputs import check_inputs, input_specs
from galv.planner.capture.opaque import Opaque
from galv.planner.capture.source import ModelSource
from galv.planner.capture.traced import FEW, ClassPlace, TracedFacts, model_inputs
from galv.planner.capture.units import distinguishing, num_parameters
from galv.planner.graph import Edge, Exclusion, ModelGraph, UnitClass, UnitRef
from galv.planner.plan import Precision

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def capture(
    source: ModelSource,
    *,
    precision: Precision = "bf16",
    device_kind: DeviceKind = "cuda",
    units: Sequence[str] | None = None,
    opaque: Sequence[str] = (),
) -> ModelGraph:
    """The model as units with facts, traced in `precision` as a device of `device_kind` would run it.

    `units` are patterns of module names that are to be units in place of the blocks that structure shows; `opaque`
    are patterns of modules that are not traced: each is one unit that every rank holds whole.

    Nothing is computed: parameters and activations are on the meta device. Raises ModelError when the forward cannot
    be followed, UsageError for patterns that match nothing.
    """
    dtype = DTYPES[precision]
    built = source.build()
    hidden = matching(built, opaque, "opaque pattern")
    stand_ins = {name: Opaque(name, built.get_submodule(name), dtype) for name in hidden}
    model = _on_meta(built, dtype, in_place=source.is_fresh)
    specs = input_specs(source.example, FEW, source.limits)
    check_inputs(model, {spec.name: torch.empty(0) for spec in specs})
    inputs, known = model_inputs(source, FEW, dtype)
    patterns = None if units is None else tuple(units)
    problem = Problem(model, inputs, known, device_kind, patterns, stand_ins)
    found = arranged(problem)
    refs, places = _Units(found, stand_ins).named()
    facts = TracedFacts(found.skeleton, source, dtype, places)
    classes = {name: _unit_class(name, model, place, facts) for name, place in places.items()}
    fingerprint = fingerprint_as(model, refs)
    assert fingerprint is not None, "the model has the modules of its own units"
    edges, no_pipeline = _flow(problem, found, refs)
    return ModelGraph(
        name=source.name,
        units=refs,
        classes=classes,
        inputs=specs,
        num_samples=FEW,
        num_parameters=num_parameters(model),
        tied=tied_parameters(model),
        fingerprint=fingerprint,
        source=facts,
        edges=edges,
        no_pipeline=no_pipeline,
        notes=tuple(_notes(model, found, stand_ins)),
    )


def _unit_class(name: str, model: nn.Module, place: ClassPlace, facts: TracedFacts) -> UnitClass:
    parameters = unit_parameters(model, place.modules, place.parameters)
    experts = facts.expert_layout(name)
    if isinstance(experts, Exclusion):
        return UnitClass(name, parameters, place.opaque is not None)
    shared = {f"{part.module}.{own}".lstrip(".") for part in experts.modules for own in part.parameters}
    marked = tuple(replace(parameter, is_expert=parameter.name in shared) for parameter in parameters)
    return UnitClass(name, marked, experts=experts.num_experts)


def _flow(problem: Problem, found: Arrangement, units: Sequence[UnitRef]) -> tuple[tuple[Edge, ...], str | None]:
    """(what flows between the units, why they cannot be stages of a pipeline)."""
    if found.is_whole:
        return (), found.reason or "nothing in it repeats, and no single tensor leads from one part of it to another"
    owners = {name: i for i, unit in enumerate(units) for name in (*unit.modules, *unit.parameters)}
    leaves = [name for unit in units for name in unit.modules]
    direct = [name for unit in units for name in unit.parameters]
    try:
        glue = glue_of(
            problem.model, leaves, problem.inputs, device=problem.device, direct=direct, opaque=problem.opaque
        )
    except ModelError as error:
        return (), str(error)
    positions = positions_of(glue.graph, owners)
    return edges_of(positions, FEW), why_no_pipeline(glue.graph, owners, [unit.name for unit in units])


def _notes(model: nn.Module, found: Arrangement, stand_ins: Iterable[str]) -> Iterable[str]:
    if not found.run.has_loss:
        yield (
            "the model returns no loss, so its loss is not in the estimate; a script of yours can train it, "
            "`galv run` without one and pipelines cannot"
        )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        yield (
            "BatchNorm normalizes over one microbatch on one rank, so training differs from that of one device on the "
            "whole batch"
        )
    for name in stand_ins:
        yield (
            f"{name} is opaque: it is one unit that every rank holds whole, and its FLOPs and bytes are those of one "
            "run with made-up values; others may differ"
        )
    if found.unused:
        yield f"the forward never uses {', '.join(found.unused)}, whose parameters are trainable; they get no gradient"


# ----------------------------------------------------------------------------------------------- units


@dataclass(eq=False)
class _Group:
    """A unit in the making."""

    name: str
    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    stretches: list[int] = field(default_factory=list)


class _Units:
    """The units of an arrangement, in the order of execution."""

    def __init__(self, found: Arrangement, opaque: Mapping[str, Opaque]) -> None:
        self.found, self.run, self.opaque = found, found.run, opaque
        self.groups: dict[str, _Group] = {}
        self.owner: list[str | None] = [None] * len(self.run.stretches)
        """The group of each stretch."""

    def named(self) -> tuple[tuple[UnitRef, ...], dict[str, ClassPlace]]:
        """The units and, for each class, the first unit that is an example of it."""
        if self.found.is_whole:
            every = tuple(range(len(self.run.stretches)))
            return (UnitRef("model", "model", ("",)),), {"model": ClassPlace(("",), (), every)}
        self._gather()
        self._give_stretches()
        names = self._class_names()
        refs: list[UnitRef] = []
        places: dict[str, ClassPlace] = {}
        for group in self.groups.values():
            refs.append(UnitRef(group.name, names[group.name], tuple(group.modules), tuple(group.parameters)))
            places.setdefault(names[group.name], self._place(group))
        return tuple(refs), places

    def _place(self, group: _Group) -> ClassPlace:
        stand_in = self.opaque.get(group.modules[0]) if group.name.startswith("opaque ") else None
        is_block = bool(group.calls) and stand_in is None
        return ClassPlace(
            tuple(group.modules),
            tuple(group.calls),
            tuple(group.stretches),
            parameters=tuple(group.parameters),
            is_block=is_block,
            opaque=stand_in,
        )

    # -- which units there are

    def _gather(self) -> None:
        """Groups in the order of execution: stretch 0, call 0, the stretch after it, and so on."""
        calls = {call.before: i for i, call in enumerate(self.run.calls)}
        last = max((call.before for call in self.run.calls), default=-1) + 1
        beside: list[str] = []
        for stretch in range(len(self.run.stretches)):
            members = [name for name, place in self.found.places.items() if place == stretch]
            if members and all(member in self.found.skeleton.direct for member in members):
                # Parameters alone make no unit: they go with the block that follows, or the last one.
                beside += members
            elif members:
                self._add(self._stretch_name(stretch, last), [*members, *beside], stretch)
                beside = []
            if stretch in calls:
                name = self.run.calls[calls[stretch]].name
                group = self._add(f"opaque {name}" if name in self.opaque else name, [name, *beside], None)
                beside = []
                group.calls.append(calls[stretch])

        if beside:
            self._add(next(reversed(self.groups)), beside, None)

    def _stretch_name(self, stretch: int, last: int) -> str:
        mark = self.run.marks[stretch]
        if mark is not None:
            return mark
        if not self.run.calls:
            return "model"
        if stretch == 0:
            return "embedding"
        if stretch == last:
            return "head"
        return f"bridge {1 + sum(name.startswith('bridge ') for name in self.groups)}"

    def _add(self, name: str, members: Sequence[str], stretch: int | None) -> _Group:
        group = self.groups.setdefault(name, _Group(name))
        for member in members:
            is_parameter = member in self.found.skeleton.direct
            held = group.parameters if is_parameter else group.modules
            if member not in held:
                held.append(member)
        if stretch is not None:
            self.owner[stretch] = name
        return group

    def _give_stretches(self) -> None:
        """Stretches that are no unit's own go to the unit before, those in front of all units to the first one."""
        after = {call.before + 1: call.name for call in self.run.calls}
        first = next(iter(self.groups))
        for stretch, mark in enumerate(self.run.marks):
            name = self.owner[stretch] or mark
            if name is None:
                called = after.get(stretch)
                name = first if called is None else f"opaque {called}" if called in self.opaque else called
            if not self.run.stretches[stretch].is_empty or self.owner[stretch]:
                self.groups[name].stretches.append(stretch)

    # -- which are alike

    def _class_names(self) -> dict[str, str]:
        """The class of each unit: blocks by what they do, any other unit its own."""
        blocks = [group for group in self.groups.values() if group.calls and group.modules[0] not in self.opaque]
        keys = self._keys(blocks)
        names = {name: name for name in self.groups}
        for group, name in zip(blocks, _readable(keys, [self._type(group) for group in blocks]), strict=True):
            names[group.name] = name
        return names

    def _type(self, group: _Group) -> str:
        return type(self.found.skeleton.model.get_submodule(group.modules[0])).__name__

    def _keys(self, blocks: Sequence[_Group]) -> list[Hashable]:
        """What blocks of one class have in common: structure, settings, how they are called, what follows them."""
        calls = [[self.run.calls[i] for i in group.calls] for group in blocks]
        called = [tuple((call.kind, call.activation) for call in each) for each in calls]
        numbers = _telling_numbers(called, [[n for call in each for n in call.numbers] for each in calls])
        own = list(zip(called, numbers, (tuple(group.parameters) for group in blocks), strict=True))
        around = [tuple(self._work(s, group) for s in group.stretches) for group in blocks]
        for i, group in enumerate(blocks):
            # The block in front of another unit's stretch is like its kin, though what follows it is not its own.
            alike = next((j for j in range(i) if own[j] == own[i]), None)
            if alike is not None and not group.stretches:
                around[i] = around[alike]
        return list(zip(own, around, strict=True))

    def _work(self, stretch: int, group: _Group) -> Hashable:
        before = stretch <= self.run.calls[group.calls[0]].before
        return before, tuple((op.name, op.flops) for op in self.run.stretches[stretch].operators)


# ----------------------------------------------------------------------------------------------- helpers


def _telling_numbers(keys: Sequence[Hashable], numbers: Sequence[Sequence[float | None]]) -> list[Hashable]:
    """For each call, its number arguments that tell some calls with an equal key from others."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    told: list[Hashable] = [()] * len(keys)
    for members in groups.values():
        columns = list(zip(*(numbers[i] for i in members), strict=True))
        for i, values in zip(members, distinguishing(columns, len(members)), strict=True):
            told[i] = values
    return told


def _readable(keys: Sequence[Hashable], types: Sequence[str]) -> list[str]:
    """For each key a name: the blocks' type, numbered from the second class of a type on."""
    names: dict[Hashable, str] = {}
    counts: dict[str, int] = {}
    for key, kind in zip(keys, types, strict=True):
        if key not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[key] = kind if counts[kind] == 1 else f"{kind}.{counts[kind]}"
    return [names[key] for key in keys]


# ----------------------------------------------------------------------------------------------- the meta device


def _on_meta(model: nn.Module, dtype: torch.dtype, *, in_place: bool) -> nn.Module:
    """The model on the meta device in training mode, its floating parameters as `dtype`, ties kept.

    Buffers keep their dtype, as mixed precision leaves them. A person's own model is copied, not changed.
    """
    replaced: dict[int, Any] = {}
    for parameter in model.parameters():
        like = dtype if parameter.is_floating_point() else parameter.dtype
        meta = torch.empty_like(parameter, device="meta", dtype=like)
        replaced[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for tensor in _other_tensors(model):
        replaced.setdefault(id(tensor), tensor.detach().to("meta"))
    if in_place:
        _replace(model, replaced)
    else:
        model = copy.deepcopy(model, replaced)
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return model.train()


def _other_tensors(model: nn.Module) -> list[Tensor]:
    """Buffers, and tensors that are plain attributes of modules."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    return [*model.buffers(), *(value for value in attributes if isinstance(value, Tensor))]


def _replace(model: nn.Module, replaced: dict[int, Any]) -> None:
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[name] = replaced[id(value)]
