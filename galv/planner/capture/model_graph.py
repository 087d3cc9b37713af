"""Finds a model's units, sorts them into classes and gives the graph that the search works on.

One run of the model's skeleton shows in which order the blocks execute, whether they form a chain, and what lies
around them. Parameters used before the first block belong to the unit `embedding`, those used after the last one to
`head`; where nothing repeats, the whole model is the unit `model`. Work between two blocks counts for the block
before, and so does the loss when nothing after the last block has parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galv.errors import ModelError
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.fingerprint import fingerprint_as as fingerprint_as
from galv.planner.capture.fingerprint import tied_parameters, unit_parameters
from galv.planner.capture.inputs import check_inputs, input_specs
from galv.planner.capture.operators import storage_key
from galv.planner.capture.skeleton import Named, Skeleton, SkeletonRun
from galv.planner.capture.source import ModelSource
from galv.planner.capture.traced import FEW, ClassPlace, TracedFacts, model_inputs
from galv.planner.capture.units import (
    block_lists,
    distinguishing,
    num_parameters,
    owners,
    settings,
    stray_parameters,
    structure,
)
from galv.planner.graph import ModelGraph, UnitClass, UnitRef
from galv.planner.plan import Precision

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def capture(source: ModelSource, *, precision: Precision = "bf16", device_kind: DeviceKind = "cuda") -> ModelGraph:
    """The model as a chain of units with facts, traced in `precision` as a device of `device_kind` would run it.

    Nothing is computed: parameters and activations are on the meta device. Raises ModelError when the forward cannot
    be followed or a parameter belongs to no unit.
    """
    dtype = DTYPES[precision]
    model = _on_meta(source.build(), dtype, in_place=source.is_fresh)
    specs = input_specs(source.example, FEW, source.limits)
    check_inputs(model, {spec.name: torch.empty(0) for spec in specs})
    chain = _Chain.of(model, source, dtype, device_kind)
    units, places = chain.units()
    classes = {name: UnitClass(name, unit_parameters(model, place.modules)) for name, place in places.items()}
    fingerprint = fingerprint_as(model, units)
    assert fingerprint is not None, "the model has the modules of its own units"
    return ModelGraph(
        name=source.name,
        units=units,
        classes=classes,
        inputs=specs,
        num_samples=FEW,
        num_parameters=num_parameters(model),
        tied=tied_parameters(model),
        fingerprint=fingerprint,
        source=TracedFacts(chain.skeleton, source, dtype, places),
    )


# ----------------------------------------------------------------------------------------------- the chain


@dataclass(frozen=True, eq=False)
class _Chain:
    """The blocks in the order of execution and the modules around them."""

    skeleton: Skeleton
    run: SkeletonRun
    around: dict[str, int]
    """Stretch of each module around the blocks that holds parameters, in the order of execution."""

    @classmethod
    def of(cls, model: nn.Module, source: ModelSource, dtype: torch.dtype, device: DeviceKind) -> _Chain:
        """The longest chain: lists of blocks are given up, the smallest first, until the rest are one."""
        lists = sorted(block_lists(model), key=lambda blocks: sum(num_parameters(m) for _, m in blocks))
        inputs, known = model_inputs(source, FEW, dtype)
        for given_up in range(len(lists) + 1):
            blocks = [named for blocks in lists[given_up:] for named in blocks]
            around = owners(model, blocks) if blocks else [("", model)]
            skeleton = Skeleton(model, blocks, around, device)
            skeleton.kinds = _kinds(blocks)
            run = skeleton.run(inputs, known)
            if not blocks:
                return cls(skeleton, run, {"": 0})
            places = _places(around, run)
            if _is_chain(run, blocks) and all(stretch in (0, len(blocks)) for stretch in places.values()):
                _check_ownership(model, [name for name, _ in blocks], places)
                return cls(skeleton, run, places)
        raise AssertionError("a model without blocks is one unit")

    def units(self) -> tuple[tuple[UnitRef, ...], dict[str, ClassPlace]]:
        """The units in the order of execution, and where each class has its example."""
        last = len(self.run.calls)
        if not last:
            return (UnitRef("model", "model", ("",)),), {"model": ClassPlace(("",), None, (0,))}
        embedding = tuple(name for name, stretch in self.around.items() if stretch == 0)
        head = tuple(name for name, stretch in self.around.items() if stretch == last)
        stretches = [self._stretches(i, bool(embedding), bool(head)) for i in range(last)]
        keys = self._class_keys(stretches)
        names = _class_names(keys, [type(self._block(i)).__name__ for i in range(last)])
        units, places = [], {}
        if embedding:
            units.append(UnitRef("embedding", "embedding", embedding))
            places["embedding"] = ClassPlace(embedding, None, (0,))
        for i, call in enumerate(self.run.calls):
            name = names[keys[i]]
            units.append(UnitRef(call.name, name, (call.name,)))
            places.setdefault(name, ClassPlace((call.name,), i, stretches[i]))
        if head:
            units.append(UnitRef("head", "head", head))
            places["head"] = ClassPlace(head, None, (last,))
        return tuple(units), places

    def _block(self, position: int) -> nn.Module:
        return self.skeleton.model.get_submodule(self.run.calls[position].name)

    def _stretches(self, position: int, has_embedding: bool, has_head: bool) -> tuple[int, ...]:
        """The stretches that count for the block at `position`."""
        last, traces = len(self.run.calls) - 1, self.run.stretches
        before = (0,) if position == 0 and not has_embedding and not traces[0].is_empty else ()
        own_end = position < last or not has_head
        after = (position + 1,) if own_end and not traces[position + 1].is_empty else ()
        return before + after

    def _class_keys(self, stretches: Sequence[tuple[int, ...]]) -> list[Hashable]:
        """What blocks of one class have in common: structure, settings, how they are called, what follows them."""
        called = [(call.kind, call.activation) for call in self.run.calls]
        numbers = _telling_numbers(called, [call.numbers for call in self.run.calls])
        own = [(key, number) for key, number in zip(called, numbers, strict=True)]
        around = [tuple(self._work(stretch, i) for stretch in mine) for i, mine in enumerate(stretches)]
        alike = next((i for i in range(len(own) - 1) if own[i] == own[-1]), None)
        if alike is not None and not stretches[-1]:
            around[-1] = around[alike]
        return list(zip(own, around, strict=True))

    def _work(self, stretch: int, position: int) -> Hashable:
        return stretch <= position, tuple((op.name, op.flops) for op in self.run.stretches[stretch].operators)


# ----------------------------------------------------------------------------------------------- helpers


def _kinds(blocks: Sequence[Named]) -> dict[str, Hashable]:
    """For each block, what makes its outputs like another's: structure and telling settings."""
    groups: dict[Hashable, list[Named]] = {}
    for name, block in blocks:
        groups.setdefault(structure(block), []).append((name, block))
    kinds: dict[str, Hashable] = {}
    for shape, group in groups.items():
        told = settings([block for _, block in group])
        kinds |= {name: (shape, setting) for (name, _), setting in zip(group, told, strict=True)}
    return kinds


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


def _class_names(keys: Sequence[Hashable], types: Sequence[str]) -> dict[Hashable, str]:
    """A readable name for each distinct key: the blocks' type, numbered from the second class of a type on."""
    names: dict[Hashable, str] = {}
    counts: dict[str, int] = {}
    for key, kind in zip(keys, types, strict=True):
        if key not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[key] = kind if counts[kind] == 1 else f"{kind}.{counts[kind]}"
    return names


def _is_chain(run: SkeletonRun, blocks: Sequence[Named]) -> bool:
    return run.is_chain and sorted(call.name for call in run.calls) == sorted(name for name, _ in blocks)


def _places(around: Sequence[Named], run: SkeletonRun) -> dict[str, int]:
    """The stretch that each module around the blocks is first used in, in the order of execution.

    Raises ModelError for a module with trainable parameters that is never used.
    """
    called = {name: stretch for name, (stretch, _) in run.module_calls.items()}
    uncalled = {}
    for name, module in around:
        if name in called:
            continue
        uses = [stretch for p in module.parameters() for stretch in run.uses.get(storage_key(p), ())]
        if not uses and any(parameter.requires_grad for parameter in module.parameters()):
            raise ModelError(
                f"the forward never uses module {name!r}, whose parameters are trainable; remove it, or freeze it "
                "with requires_grad_(False)"
            )
        uncalled[name] = min(uses, default=0)
    return called | uncalled


def _check_ownership(model: nn.Module, blocks: Sequence[str], around: dict[str, int]) -> None:
    stray = stray_parameters(model, [*blocks, *around])
    if stray:
        raise ModelError(
            f"no unit can own the parameters {', '.join(stray)}: they lie directly in a module that also contains the "
            f"repeated blocks {blocks[0]} to {blocks[-1]}. Put them in a module of their own"
        )


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
