"""Where values change their form between units: the traced forward of a plan, with what redistributes them in it.

A value lies in the form of the unit that makes it: for the samples of one of its data-parallel groups, whole or cut
along the sequence over its tensor axis. A unit that takes another form redistributes it, in front of what it does. A
module runs with its unit, an operator between modules with the latest unit that it takes something from. What follows
from nothing but the model's inputs (position ids, masks, rotary tables) is computed for the samples of every unit that
uses it, from redistributed inputs; it never changes its form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from galv.errors import ModelError
from galv.planner.plan import Layout, Plan, Redistribution, SequenceCut, Strategy, Unit
from galv.runtime.mesh import Meshes
from galv.runtime.randomness import Streams
from galv.runtime.sequence_parallel import to_part, to_whole
from galv.runtime.sized_glue import SizedGlue
from galv.runtime.tensor_parallel import REPLICATED, activation_argument, redistributor

UNIT = "unit"
"""In a node's meta, the position of the unit that it runs with; None when any can compute it from the inputs."""


@dataclass(frozen=True)
class Form:
    """How a value lies on the ranks of a stage."""

    degree: int
    """The data-parallel degree: each of so many groups has its samples."""
    layout: Layout = REPLICATED
    """On the tensor axis."""
    tp: int = 1
    """The ranks of the tensor axis, where it is cut."""
    sequence: SequenceCut | None = None
    """On the context axis; whole for None. It never is cut on both axes."""
    strategy: Strategy = field(default=Strategy(), compare=False)
    """Whose context axis that is."""

    @property
    def is_cut(self) -> bool:
        return self.layout.kind == "S" or self.sequence is not None

    @property
    def cut(self) -> tuple[int, int]:
        """(dim, number of parts) of what is cut."""
        if self.sequence is not None:
            return self.sequence.dim, self.sequence.degree
        assert self.layout.dim is not None, f"{self.layout} is a cut"
        return self.layout.dim, self.tp

    @classmethod
    def of(cls, unit: Unit, plan: Plan) -> Form:
        """The form of the activation that a unit takes and gives."""
        cut, sequence = unit.activation.kind == "S", plan.sequence_layout_of(unit)
        return cls(
            unit.strategy.dp,
            unit.activation,
            unit.strategy.tp if cut else 1,
            None if sequence is None else sequence.activation_cut,
            unit.strategy,
        )


def with_borders(
    glue: SizedGlue, plan: Plan, meshes: Meshes | None = None, streams: Streams | None = None
) -> fx.GraphModule:
    """The forward of `glue` as this rank runs it: sizes are its own, redistributions are operators between the others.

    `node.meta["val"]` is what one rank holds, `node.meta["unit"]` the position of the unit that a node runs with.
    `streams` give the random numbers of operators between the modules. Raises ModelError when samples lie in a way that
    cannot be redistributed, and when a module is no unit's. Without meshes the graph cannot run.
    """
    return _Borders(glue, plan, meshes, streams).built()


class _Borders:
    """One forward in the making."""

    def __init__(self, glue: SizedGlue, plan: Plan, meshes: Meshes | None, streams: Streams | None) -> None:
        self.glue, self.plan, self.meshes, self.streams = glue, plan, meshes, streams
        self.units = list(plan.units())
        self.owners = {
            name: index for index, unit in enumerate(self.units) for name in (*unit.modules, *unit.parameters)
        }
        self.positions = _positions(glue.graph, self.owners)
        self.varying = _varying(glue.graph)
        self.native = self._native_forms()
        self.graph = fx.Graph()
        self.made: dict[tuple[fx.Node, Form], fx.Node] = {}
        """By node of the glue and form: the node that has it so."""

    def built(self) -> fx.GraphModule:
        """The whole forward."""
        demanded = self._demanded_degrees()
        for node in self.glue.graph.nodes:
            if node.op == "output":
                (result,) = node.all_input_nodes
                last = len(self.units) - 1
                self.graph.output(self._in_form(result, Form(self.units[last].strategy.dp), last))
            elif node.op == "placeholder" or self.positions[node] is not None:
                self._copy(node, self.native[node])
            else:
                for degree in sorted(demanded[node]):
                    self._copy(node, Form(degree))
        return fx.GraphModule(self.glue.module, self.graph)

    # -- forms

    def _native_forms(self) -> dict[fx.Node, Form]:
        """The form in which each node is computed; that of inputs for what any unit can compute."""
        forms: dict[fx.Node, Form] = {}
        for node in self.glue.graph.nodes:
            position = self.positions[node]
            unit = self.units[position or 0]
            forms[node] = Form(unit.strategy.dp)
            source, value = _whole(node), node.meta.get("val")
            if source.op == "call_module" and isinstance(value, Tensor) and value.is_floating_point():
                forms[node] = Form.of(unit, self.plan)
            elif position is not None and (form := _common_form(node, forms)) is not None:
                forms[node] = form
        return forms

    def _demanded_degrees(self) -> dict[fx.Node, set[int]]:
        """For what any unit can compute, the data-parallel degrees of those that use it."""
        demanded: dict[fx.Node, set[int]] = {node: set() for node in self.glue.graph.nodes}
        for node in reversed(self.glue.graph.nodes):
            position = self.positions[node]
            if node.op == "output":
                degrees = {self.units[-1].strategy.dp}
            elif position is not None:
                degrees = {self.units[position].strategy.dp}
            else:
                degrees = demanded[node]
            for source in node.all_input_nodes:
                demanded[source] |= degrees
        return demanded

    # -- nodes

    def _copy(self, node: fx.Node, form: Form) -> None:
        """Adds `node`, computed in `form` from arguments in the forms that it takes."""
        position = self.positions[node]
        num_samples = self.plan.samples_at(form.degree)
        args, kwargs = self.glue.arguments(node, num_samples)
        if node.op == "call_module":
            assert position is not None, "a module has a unit"
            args, kwargs = self._module_arguments(args, kwargs, self.units[position], position)
        else:
            whole = Form(form.degree)
            args, kwargs = fx.map_arg(
                (args, kwargs), lambda source: self._in_form(source, form if _rank(source) > 1 else whole, position)
            )
        copy = self.graph.create_node(node.op, self._target(node, form), args, kwargs, node.name)
        self._describe(copy, node, form, position)

    def _module_arguments(self, args: Any, kwargs: Any, unit: Unit, position: int) -> tuple[Any, Any]:
        """What a unit's module takes: the activation as the unit has it, all else whole."""
        leads = activation_argument(args, kwargs, _is_tensor, _is_floating)

        def taken(key: int | str, value: Any) -> Any:
            form = Form.of(unit, self.plan) if key == leads else Form(unit.strategy.dp)
            return fx.map_arg(value, lambda source: self._in_form(source, form, position))

        return tuple(taken(i, x) for i, x in enumerate(args)), {key: taken(key, x) for key, x in kwargs.items()}

    def _target(self, node: fx.Node, form: Form) -> Any:
        """What `node` calls; random numbers come from the stream of its samples."""
        if self.streams is None or not _is_random(node):
            return node.target
        assert callable(node.target), "an operator"
        return self.streams.drawing(node.target, form.degree)

    def _in_form(self, node: fx.Node, form: Form, position: int | None) -> fx.Node:
        """The node that has the value of `node` in `form`; if need be redistributed now, by the unit at `position`."""
        native = self.native[node]
        if not isinstance(node.meta.get("val"), Tensor):  # several tensors: each is redistributed itself
            return self.made[node, native]
        known = self.made.get((node, form))
        # What a later unit has redistributed comes too late for an earlier one.
        if known is None or (form != native and (known.meta[UNIT] or 0) > (position or 0)):
            self._redistribute(node, native, form, None if self.positions[node] is None else position)
        return self.made[node, form]

    def _redistribute(self, node: fx.Node, source: Form, target: Form, position: int | None) -> None:
        moves = source.degree != target.degree
        batch_dim = self.glue.batch_dim(node) if moves else None
        if moves and batch_dim is None:
            self._check_mean(node)
        step = redistribution(self.meshes, source, target, batch_dim, varies=node in self.varying)
        copy = self.graph.call_function(step, (self.made[node, source],))
        self._describe(copy, node, target, position)

    def _describe(self, copy: fx.Node, node: fx.Node, form: Form, position: int | None) -> None:
        """Notes what `copy`, which has the value of `node` in `form`, is on one rank."""
        value = self.glue.value(node, self.plan.samples_at(form.degree))
        if value is not None and form.is_cut:
            dim, parts = form.cut
            value = value.narrow(dim, 0, value.shape[dim] // parts)
        copy.meta.update(val=value, grad=node.meta.get("grad", False), **{UNIT: position})
        self.made[node, form] = copy

    def _check_mean(self, node: fx.Node) -> None:
        """Raises ModelError for what is no mean over samples and yet differs between groups of them."""
        if node in self.varying and not node.meta["val"].is_floating_point():
            raise ModelError(
                f"{node.name} is made of all samples of a data-parallel group and used by a unit with groups of "
                "another size; only means over samples, in floating point, can be"
            )


def redistribution(
    meshes: Meshes | None, source: Form, target: Form, batch_dim: int | None = None, *, varies: bool = True
) -> Callable[[Tensor], Tensor]:
    """What brings a value from one form to another on this rank: whole, then to the other samples, then cut."""

    def redistribute(value: Tensor) -> Tensor:
        assert meshes is not None, "only a graph with meshes runs"
        if source.sequence is not None and source.sequence == target.sequence and source.degree == target.degree:
            return value
        if source.sequence is not None:
            value = to_whole(value, source.sequence, meshes.context(source.strategy))
        if source.layout.kind == "S":
            change = Redistribution(source=source.layout, target=REPLICATED)
            value = redistributor(meshes.tensor(source.tp))(value, change)
        if source.degree != target.degree:
            value = meshes.move(source.degree, target.degree)(value, batch_dim, varies=varies)
        if target.sequence is not None:
            value = to_part(value, target.sequence, meshes.context(target.strategy))
        if target.layout.kind == "S":
            change = Redistribution(source=REPLICATED, target=target.layout)
            value = redistributor(meshes.tensor(target.tp))(value, change)
        return value

    return redistribute


# ----------------------------------------------------------------------------------------------- what follows from what


def _positions(graph: fx.Graph, owners: Mapping[str, int]) -> dict[fx.Node, int | None]:
    """The position of the unit that each node runs with; None for what any can compute."""
    positions: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        before = max((p for source in node.all_input_nodes if (p := positions[source]) is not None), default=None)
        if node.op in ("call_module", "get_attr") and str(node.target) in owners:
            positions[node] = owners[str(node.target)]
        elif node.op == "call_module":
            raise ModelError(f"no unit of the plan holds module {node.target!r}; was the plan made for this model?")
        else:
            positions[node] = 0 if before is None and _is_random(node) else before
    return positions


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _varying(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on the values of the model's inputs, hence on which samples a group has."""
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    return varying


def _whole(node: fx.Node) -> fx.Node:
    """The node that `node` is the first part of, or itself."""
    while node.op == "call_function" and node.args[1:] == (0,) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _common_form(node: fx.Node, forms: Mapping[fx.Node, Form]) -> Form | None:
    """The form of an operator that works element by element on values cut alike; None where it needs whole ones."""
    if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    given = {forms[source] for source in node.all_input_nodes if _rank(source) > 1}
    form = next(iter(given)) if len(given) == 1 else None
    return form if form is not None and form.is_cut else None


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, Tensor) else 0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def _is_floating(value: Any) -> bool:
    return _is_tensor(value) and value.meta["val"].is_floating_point()
