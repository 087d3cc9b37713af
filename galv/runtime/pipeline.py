"""Cuts the traced forward of a model into pipeline stages: what each stage computes, and what crosses to the next.

Modules run on the stage of their unit. Operators between them that need nothing but the model's inputs (position ids,
masks, rotary tables) are computed again on every stage that uses them; all others run as early as they can. So only
what must crosses a border: the hidden states, and whatever else a later stage takes from an earlier one (a skip
connection passes through the stages between). The modules stay the user's own, under their own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from galv.errors import ModelError
from galv.planner.plan import Plan
from galv.runtime.borders import UNIT
from galv.runtime.loss import no_loss
from galv.runtime.weight_gradients import WeightGradients


@dataclass(frozen=True, eq=False)
class Crossing:
    """A tensor that crosses from one stage to the next, as one rank holds it."""

    name: str
    meta: Tensor
    """Its shape and dtype, on the meta device."""
    needs_grad: bool


class StageModule(nn.Module):
    """One stage of a model: the modules of its units under their original names, and the forward between them.

    `forward(*crossings, **inputs)` takes what comes from the stage before and the model inputs named in
    `input_names`; it returns the tuple of `crossings_out`, or the loss on the last stage.
    """

    def __init__(
        self,
        graph: fx.Graph,
        stage_index: int,
        num_stages: int,
        crossings_in: Sequence[Crossing],
        crossings_out: Sequence[Crossing],
    ) -> None:
        super().__init__()
        self.stage_index, self.num_stages = stage_index, num_stages
        self.crossings_in, self.crossings_out = tuple(crossings_in), tuple(crossings_out)
        placeholders = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self.input_names = tuple(placeholders[len(self.crossings_in) :])
        self.tied_copies: frozenset[str] = frozenset()
        """Parameters of this stage that are copies of one on an earlier stage; a gradient norm skips them."""
        self.weight_gradients = WeightGradients()
        """Takes those that schedules with a split backward put off."""
        self._function = _compiled(graph)

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward(self, *crossings: Tensor, **inputs: Tensor) -> Any:
        """The tensors of `crossings_out`, or the loss on the last stage."""
        return self._function(self, *crossings, **inputs)


def build_stage(
    model: nn.Module, plan: Plan, glue: fx.GraphModule, stage_index: int, device: torch.device
) -> StageModule:
    """Stage `stage_index` of `plan` as a module, holding `model`'s own modules, whatever device they lie on now.

    `glue` is the model's forward with the units' modules as opaque calls, as one rank runs it (`with_borders`);
    constants and factories of the glue run on `device`. Raises ModelError when the plan's units do not run in the
    plan's order, and when the model returns no loss.
    """
    _check_loss(glue.graph)
    cut = _Cut(glue.graph, [index for index, stage in enumerate(plan.stages) for _ in stage.units])
    before, after = cut.crossings(stage_index - 1), cut.crossings(stage_index)
    graph = _stage_graph(cut, stage_index, before, after, device)
    stage = StageModule(
        graph,
        stage_index,
        len(plan.stages),
        [_described(node) for node in before],
        [_described(node) for node in after],
    )
    stage.tied_copies = _tied_copies(plan, stage_index)
    for unit in plan.stages[stage_index].units:
        for name in unit.modules:
            _attach(stage, name, model.get_submodule(name))
    for node in graph.nodes:
        if node.op == "get_attr":
            _attach_tensor(stage, str(node.target), model, glue, device)
    if stage_index == 0:  # what the glue does not use is nobody's else
        owned = tuple(f"{module}." for unit in plan.units() for module in unit.modules)
        for name in _persistent_buffers(model):
            if not name.startswith(owned):
                _attach_tensor(stage, name, model, glue, device)
    return stage


def _check_loss(glue: fx.Graph) -> None:
    result = next(reversed(glue.nodes)).all_input_nodes[0].meta["val"]
    if result.ndim:
        raise no_loss(f"a tensor of shape {tuple(result.shape)}")


# ----------------------------------------------------------------------------------------------- the cut


class _Cut:
    """Which stage computes each node of the glue; None for nodes that any stage can compute from the inputs."""

    def __init__(self, graph: fx.Graph, unit_stages: Sequence[int]) -> None:
        self.graph, self.num_stages = graph, unit_stages[-1] + 1
        self.stages: dict[fx.Node, int | None] = {}
        for node in graph.nodes:
            position = node.meta.get(UNIT)
            self.stages[node] = None if position is None else unit_stages[position]
            self._check_order(node)
        self.stages[self.output] = self.num_stages - 1

    @property
    def output(self) -> fx.Node:
        return next(reversed(self.graph.nodes))

    def _check_order(self, node: fx.Node) -> None:
        stage = self.stages[node]
        before = max((s for source in node.all_input_nodes if (s := self.stages[source]) is not None), default=0)
        if stage is not None and before > stage:
            raise ModelError(
                f"module {node.target!r} is on stage {stage} but needs a value from stage {before}; units must be "
                "listed in the order in which the model runs them"
            )

    def crossings(self, border: int) -> list[fx.Node]:
        """The nodes computed on stage `border` or earlier and used later, in the order of the graph."""
        if not 0 <= border < self.num_stages - 1:
            return []
        return [node for node, stage in self.stages.items() if stage is not None and self._crosses(node, stage, border)]

    def _crosses(self, node: fx.Node, stage: int, border: int) -> bool:
        return stage <= border and any((self.stages[user] or 0) > border for user in node.users)


def _described(node: fx.Node) -> Crossing:
    """The crossing tensor that `node` computes."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node.name} crosses a stage border but is no single tensor"
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return Crossing(node.name, meta, node.meta["grad"])


# ----------------------------------------------------------------------------------------------- the stage's forward


def _stage_graph(
    cut: _Cut, stage_index: int, before: Sequence[fx.Node], after: Sequence[fx.Node], device: torch.device
) -> fx.Graph:
    last = stage_index == cut.num_stages - 1
    results = cut.output.all_input_nodes if last else after
    needed = _needed(cut, stage_index, results, set(before))
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in before}
    order = sorted(needed, key=lambda node: node.op != "placeholder")
    for node in order:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].kwargs = _on_device(node, copies[node].kwargs, device)
    graph.output(copies[results[0]] if last else tuple(copies[node] for node in after))
    return graph


def _needed(cut: _Cut, stage_index: int, results: Iterable[fx.Node], given: set[fx.Node]) -> list[fx.Node]:
    """What the stage computes: its own nodes and what these take from the inputs, in the order of the graph."""
    wanted = {node for node, stage in cut.stages.items() if stage == stage_index and node.op != "output"}
    wanted.update(node for node in results if node not in given)
    for node in reversed(list(cut.stages)):
        if node in wanted:
            wanted.update(source for source in node.all_input_nodes if source not in given)
    return [node for node in cut.stages if node in wanted]


def _on_device(node: fx.Node, kwargs: Any, device: torch.device) -> Any:
    return {**kwargs, "device": device} if node.op == "call_function" and kwargs.get("device") is not None else kwargs


def _compiled(graph: fx.Graph) -> Any:
    """The graph as a Python function of the module and its placeholders; it forgets values after their last use."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<pipeline stage>", "exec"), namespace)
    return namespace["forward"]


# ----------------------------------------------------------------------------------------------- the stage's modules


def _attach(root: nn.Module, name: str, module: nn.Module) -> None:
    """Makes `module` known as `root.<name>`, through empty modules on the way."""
    path, _, last = name.rpartition(".")
    _holder(root, path).add_module(last, module)


def _attach_tensor(stage: nn.Module, name: str, model: nn.Module, glue: fx.GraphModule, device: torch.device) -> None:
    """Makes a buffer or parameter of the model, or a constant of the glue, known as `stage.<name>`."""
    if name in dict(model.named_parameters()):
        _holder(stage, name.rpartition(".")[0]).register_parameter(name.rpartition(".")[2], model.get_parameter(name))
        return
    if name not in dict(model.named_buffers()):
        stage.register_buffer(name, getattr(glue, name).to(device), persistent=False)
        return
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    if path and not any(True for _ in owner.parameters()):
        _attach(stage, path, owner)
        return
    holder = _holder(stage, path)
    if last not in holder._buffers:
        holder.register_buffer(last, owner._buffers[last], last not in owner._non_persistent_buffers_set)


def _persistent_buffers(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip(".")


def _holder(root: nn.Module, path: str) -> nn.Module:
    """The module `root.<path>`, made of empty modules where there are none."""
    holder = root
    for part in filter(None, path.split(".")):
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    return holder


def side_by_side(stages: Sequence[StageModule]) -> nn.Module:
    """One module that holds what all `stages` of a rank hold, under the names in the model."""
    if len(stages) == 1:
        return stages[0]
    root = nn.Module()
    for stage in stages:
        _merge(root, stage)
    return root


def _merge(target: nn.Module, source: nn.Module) -> None:
    for name, parameter in source._parameters.items():
        target.register_parameter(name, parameter)
    for name, buffer in source._buffers.items():
        target.register_buffer(name, buffer, name not in source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        if type(child) is nn.Module:  # made by `_holder`
            _merge(_holder(target, name), child)
        else:
            target.add_module(name, child)


# ----------------------------------------------------------------------------------------------- tied weights


def separate_copies(stages: Sequence[StageModule]) -> None:
    """Gives each of a rank's stages a copy of its own of a tied weight that an earlier one of them holds, too."""
    taken: set[int] = set()
    for stage in stages:
        for module in stage.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in taken:
                    copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    module._parameters[name] = copy
        taken |= {id(parameter) for parameter in stage.parameters()}


def module_stages(plan: Plan) -> dict[str, int]:
    """The stage of each module, and of each parameter beside modules, that a unit owns."""
    return {
        name: index
        for index, stage in enumerate(plan.stages)
        for unit in stage.units
        for name in (*unit.modules, *unit.parameters)
    }


def stage_of(parameter: str, stages: dict[str, int]) -> int:
    """The stage, among those of `module_stages`, that holds `parameter`."""
    return next(stage for name, stage in stages.items() if parameter == name or parameter.startswith(f"{name}."))


def _tied_copies(plan: Plan, stage_index: int) -> frozenset[str]:
    stages = module_stages(plan)
    copies: set[str] = set()
    for group in plan.model.tied:
        held = {name: stage_of(name, stages) for name in group}
        copies |= {name for name, stage in held.items() if stage == stage_index > min(held.values())}
    return frozenset(copies)
