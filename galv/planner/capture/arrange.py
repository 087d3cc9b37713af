"""Decides what the units of a model are made of: repeated blocks, parts, and what lies around them.

Lists of blocks that structure (or the user) proposes are tried in one run of the model's skeleton. A list stays when
each of its blocks works on the output of the one before; several lists may run one after the other (an encoder and a
decoder) or side by side (two towers). Where no list stays, the model is cut into parts on its glue graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from galv.errors import ModelError, UsageError
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.device import meta_as
from galv.planner.capture.glue import trace_glue
from galv.planner.capture.opaque import Opaque
from galv.planner.capture.parts import Part, part_names, parts_of
from galv.planner.capture.skeleton import Named, Skeleton, SkeletonRun, detached
from galv.planner.capture.units import block_lists, num_parameters, owners, settings, stray_parameters, structure
from galv.storages import storage_key


@dataclass(frozen=True, eq=False)
class Problem:
    """A model on the meta device with its inputs, and what the user wants of its units."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    known: Mapping[str, Tensor]
    device: DeviceKind
    patterns: tuple[str, ...] | None = None
    """Modules that are to be units."""
    opaque: Mapping[str, Opaque] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Which modules are stubbed, which are not, and the run that shows when each is called."""

    skeleton: Skeleton
    run: SkeletonRun
    places: dict[str, int]
    """Stretch of each module or direct parameter around the blocks, in the order of execution."""
    unused: tuple[str, ...]
    """Those of them that are trainable, and that no stretch uses."""
    is_whole: bool = False
    """Whether the model is left as one unit."""
    reason: str | None = None
    """Why no parts were found."""


def matching(model: nn.Module, patterns: Sequence[str], role: str) -> list[str]:
    """The outermost modules with parameters whose names match one of `patterns` (`*` and `?` as in file names).

    Raises UsageError for a pattern that matches none.
    """
    if not patterns:
        return []
    names = [name for name, module in model.named_modules() if name and num_parameters(module)]
    found = []
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise UsageError(
                f"{role} {pattern!r} matches no module with parameters of {type(model).__name__}; "
                f"it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )
        found += hits
    return [name for name in names if name in found and not any(name.startswith(f"{outer}.") for outer in found)]


def arranged(problem: Problem) -> Arrangement:
    """The arrangement of the model. Raises ModelError when its forward cannot be followed."""
    lists = _proposed(problem)
    while True:
        blocks = [named for blocks in lists for named in blocks]
        if not blocks and not problem.opaque:
            return _in_parts(problem)
        found = _tried(problem, blocks)
        failed = None if problem.patterns is not None else _failed(found.run, lists)
        if failed is None:
            return found
        lists = [blocks for blocks in lists if blocks is not failed]


def _proposed(problem: Problem) -> list[list[Named]]:
    """Lists of blocks, the opaque modules left out."""
    model, opaque = problem.model, problem.opaque
    if problem.patterns is not None:
        names = matching(model, problem.patterns, "units pattern")
        return [[(name, model.get_submodule(name)) for name in names if name not in opaque]]
    return [
        kept
        for blocks in block_lists(model)
        if (kept := [(name, module) for name, module in blocks if not _overlaps(name, opaque)])
    ]


def _overlaps(name: str, opaque: Mapping[str, Opaque]) -> bool:
    return any(f"{name}.".startswith(f"{o}.") or o.startswith(f"{name}.") for o in opaque)


def _tried(problem: Problem, blocks: Sequence[Named]) -> Arrangement:
    model, opaque = problem.model, problem.opaque
    stubs = [*blocks, *((name, model.get_submodule(name)) for name in opaque)]
    around = owners(model, stubs)
    direct = stray_parameters(model, [name for name, _ in (*stubs, *around)])
    skeleton = Skeleton(model, stubs, around, problem.device, direct=direct, substitutes=opaque)
    skeleton.kinds = kinds_of(blocks)
    run = skeleton.run(problem.inputs, problem.known)
    places, unused = _places(skeleton, run)
    return Arrangement(skeleton, run, places, unused)


# ----------------------------------------------------------------------------------------------- are lists chains


def _failed(run: SkeletonRun, lists: Sequence[Sequence[Named]]) -> Sequence[Named] | None:
    """The smallest list that is no chain, or stands in the way of an order of execution; None when all are well."""
    called: dict[str, list[int]] = {}
    for i, call in enumerate(run.calls):
        called.setdefault(call.name, []).append(i)
    order = {name: position for position, name in enumerate(called)}
    bad = [blocks for blocks in lists if not _is_chain(run, [name for name, _ in blocks], called)]
    for call in run.calls:
        sources = {order[run.calls[i].name] for origins in call.origins.values() for i in origins}
        if max(sources, default=-1) > order[call.name]:
            bad += [blocks for blocks in lists if call.name in dict(blocks)]
    return min(bad, key=lambda blocks: sum(num_parameters(m) for _, m in blocks)) if bad else None


def _is_chain(run: SkeletonRun, names: Sequence[str], called: Mapping[str, Sequence[int]]) -> bool:
    """Whether all of them are called, and each in turn depends on the one before."""
    if any(name not in called for name in names):
        return False
    ordered = sorted(names, key=lambda name: called[name][0])
    for before, name in pairwise(ordered):
        origins = frozenset().union(*(found for i in called[name] for found in run.calls[i].origins.values()))
        if not origins & set(called[before]):
            return False
    return True


# ----------------------------------------------------------------------------------------------- around the blocks


def _places(skeleton: Skeleton, run: SkeletonRun) -> tuple[dict[str, int], tuple[str, ...]]:
    """(the stretch in which each module and parameter around the blocks is first used, those that are never)."""
    called = {name: stretch for name, (stretch, _) in run.module_calls.items()}
    uncalled, unused = {}, []
    held = {name: list(module.parameters()) for name, module in skeleton.owners}
    held |= {name: [skeleton.model.get_parameter(name)] for name in skeleton.direct}
    for name, parameters in held.items():
        if name in called:
            continue
        uses = [stretch for p in parameters for stretch in run.uses.get(storage_key(p), ())]
        if not uses and any(parameter.requires_grad for parameter in parameters):
            unused.append(name)
        uncalled[name] = min(uses, default=-1)
    first = min([*called.values(), *(s for s in uncalled.values() if s >= 0)], default=0)
    return called | {name: first if stretch < 0 else stretch for name, stretch in uncalled.items()}, tuple(unused)


# ----------------------------------------------------------------------------------------------- parts


def _in_parts(problem: Problem) -> Arrangement:
    """The model cut on its glue graph, or, where that cannot be made, as one unit."""
    model = problem.model
    around = owners(model, [])
    if [name for name, _ in around] == [""]:
        return _as_one(problem, "its parameters lie directly in it")
    try:
        glue = glue_of(model, [name for name, _ in around], problem.inputs, device=problem.device)
    except ModelError as error:
        return _as_one(problem, str(error))
    weights = {name: float(num_parameters(module)) for name, module in around}
    parts = parts_of(glue.graph, weights)
    if len(parts) < 2:
        return _as_one(problem, None)
    return _marked(problem, around, parts)


def _marked(problem: Problem, around: Sequence[Named], parts: Sequence[Part]) -> Arrangement:
    marks = {name: mark for part, mark in zip(parts, part_names(parts), strict=True) for name in part}
    skeleton = Skeleton(problem.model, [], around, problem.device, marks=marks)
    run = skeleton.run(problem.inputs, problem.known)
    places, unused = _places(skeleton, run)
    return Arrangement(skeleton, run, places, unused)


def _as_one(problem: Problem, reason: str | None) -> Arrangement:
    skeleton = Skeleton(problem.model, [], [("", problem.model)], problem.device)
    run = skeleton.run(problem.inputs, problem.known)
    return Arrangement(skeleton, run, {"": 0}, (), is_whole=True, reason=reason)


# ----------------------------------------------------------------------------------------------- the glue


def glue_of(
    model: nn.Module,
    leaves: Sequence[str],
    inputs: Mapping[str, Tensor],
    *,
    device: DeviceKind,
    direct: Sequence[str] = (),
    opaque: Mapping[str, Opaque] | None = None,
) -> fx.GraphModule:
    """`trace_glue` in which leaves that are alike, and called alike, run once. Raises ModelError as that does."""
    kinds = kinds_of([(name, model.get_submodule(name)) for name in leaves])
    made: dict[Hashable, Any] = {}

    def example(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stand_in = (opaque or {}).get(name)
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        key = (kinds[name], _shapes(args), _shapes(kwargs))
        if key not in made:
            with meta_as(device):
                made[key] = detached(forward(*args, **kwargs))
        return made[key]

    return trace_glue(model, leaves, inputs, direct=direct, example=example)


def _shapes(tree: Any) -> Hashable:
    leaves, spec = torch.utils._pytree.tree_flatten(tree)
    return str(spec), tuple(
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else str(x) for x in leaves
    )


# ----------------------------------------------------------------------------------------------- kinds


def kinds_of(blocks: Sequence[Named]) -> dict[str, Hashable]:
    """For each block, what makes its outputs like another's: structure and telling settings."""
    groups: dict[Hashable, list[Named]] = {}
    for name, block in blocks:
        groups.setdefault(structure(block), []).append((name, block))
    kinds: dict[str, Hashable] = {}
    for shape, group in groups.items():
        told = settings([block for _, block in group])
        kinds |= {name: (shape, setting) for (name, _), setting in zip(group, told, strict=True)}
    return kinds
