"""Finds the experts of a block by how they are held and called, and runs the block on a part of them.

An experts module holds parameters of three or more dims whose first one counts experts, and is called with tokens, the
experts chosen for each and their weights. Modules of transformers that compute many experts at once have this form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galv.experts import exchange_tokens, set_counts
from galv.planner.capture.attention import DeviceKind
from galv.planner.capture.device import meta_as
from galv.planner.capture.operators import tensors_in
from galv.planner.capture.sample import ModuleCall
from galv.planner.capture.trace import Recorder
from galv.planner.graph import Exclusion
from galv.planner.plan import ExpertLayout, ExpertsModule

# ----------------------------------------------------------------------------------------------- where they are


@dataclass(eq=False)
class _Calls:
    """The calls of one module that holds what may be experts."""

    module: nn.Module
    seen: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)


def find_experts(unit_class: str, block: nn.Module, call: ModuleCall, device: DeviceKind) -> ExpertLayout | Exclusion:
    """Where the experts of `block` are, given a call of it on the meta device; or why it has none to share out."""
    held = {name: _Calls(module) for name, module in block.named_modules() if _num_experts(module)}
    if not held:
        return Exclusion(f"{unit_class} holds no experts: no parameter of three dims of which the first counts them")
    with ExitStack() as stack:
        for calls in held.values():
            handle = calls.module.register_forward_hook(partial(_note, calls), with_kwargs=True)
            stack.callback(handle.remove)
        with meta_as(device), torch.no_grad():
            block(*call.args, **call.kwargs)
    found = {name: _experts_module(name, calls) for name, calls in held.items()}
    modules = tuple(part for part in found.values() if isinstance(part, ExpertsModule))
    if not modules:
        return Exclusion(f"{unit_class}: {next(reason for reason in found.values() if isinstance(reason, str))}")
    counts = {_num_experts(held[part.module].module) for part in modules}
    if len(counts) > 1:
        return Exclusion(f"{unit_class}: its modules hold different numbers of experts, {sorted(counts)}")
    layout = ExpertLayout(unit_class=unit_class, num_experts=counts.pop(), modules=modules)
    return _rehearsed(layout, block, call, device)


def _num_experts(module: nn.Module) -> int:
    """The first dim of the module's own parameters of three or more dims, 0 where they differ or there are none."""
    sizes = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim >= 3}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 1 else 0


def _note(calls: _Calls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    calls.seen.append((args, kwargs, output))


def _experts_module(name: str, calls: _Calls) -> ExpertsModule | str:
    """The module as experts, or what it lacks to be some."""
    num_experts = _num_experts(calls.module)
    if not calls.seen:
        return f"{name} never runs"
    arguments = [_arguments(*seen) for seen in calls.seen]
    if None in arguments or len(set(arguments)) > 1:
        return f"{name} is not called with (tokens, width), (tokens, choices) integers and (tokens, choices) weights"
    assert arguments[0] is not None
    tokens, choices, weights = arguments[0]
    parameters = dict(calls.module.named_parameters())
    stray = next((own for own, parameter in parameters.items() if parameter.shape[:1] != (num_experts,)), None)
    if stray is not None:
        return f"{name}.{stray} of {tuple(parameters[stray].shape)} belongs to none of the {num_experts} experts alone"
    return ExpertsModule(
        module=name,
        parameters=tuple(parameters),
        tokens=tokens,
        choices=choices,
        weights=weights,
        counts=_counts(calls.module, num_experts),
    )


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[str, str, str] | None:
    """The names of tokens, choices and weights among a call's arguments; None for a call of another form."""
    named = {str(i): value for i, value in enumerate(args)} | kwargs
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if len(tensors) != 3 or sum(1 for _ in tensors_in((args, kwargs))) != 3 or not isinstance(output, Tensor):
        return None
    choices = [name for name, tensor in tensors.items() if not tensor.is_floating_point() and tensor.ndim == 2]
    if len(choices) != 1:
        return None
    shape = tensors[choices[0]].shape
    others = [name for name in tensors if name != choices[0] and tensors[name].shape[:1] == shape[:1]]
    tokens = [name for name in others if tensors[name].shape == output.shape and output.ndim == 2]
    weights = [name for name in others if name != tokens[0] and tensors[name].shape == shape] if tokens else []
    return (tokens[0], choices[0], weights[0]) if weights else None


def _counts(module: nn.Module, num_experts: int) -> tuple[str, ...]:
    """The attributes that hold the number of experts; where others have the same value, those that say so."""
    equal = [name for name, value in vars(module).items() if type(value) is int and value == num_experts]
    return tuple(sorted([name for name in equal if "expert" in name] or equal))


def _rehearsed(
    layout: ExpertLayout, block: nn.Module, call: ModuleCall, device: DeviceKind
) -> ExpertLayout | Exclusion:
    """`layout` if the block runs on one expert of each module, with the shapes that it has on all."""
    recorder = Recorder([])
    try:
        with sharing_experts(block, layout, layout.num_experts, recorder), meta_as(device), torch.no_grad():
            block(*call.args, **call.kwargs)
    except Exception as error:  # noqa: BLE001 -- whatever the model's own code raises
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Exclusion(f"{layout.unit_class} does not run on a part of its experts: {first}")
    return layout


# ----------------------------------------------------------------------------------------------- a part of them


@contextmanager
def sharing_experts(block: nn.Module, layout: ExpertLayout, degree: int, recorder: Recorder) -> Iterator[None]:
    """Within, `block` is one of `degree` ranks that share its experts: it holds its part and exchanges tokens.

    Routing is even: as many rows come to a rank as it sends. `recorder` sees the collectives.
    """
    local = layout.num_experts // degree

    def router(rows_each: Tensor, num_rows: int) -> _Even:
        return _Even(rows_each, num_rows, recorder)

    with ExitStack() as stack:
        for part in layout.modules:
            module = block.get_submodule(part.module)
            for name in part.parameters:
                stack.callback(_shortened(module, name, local))
            stack.callback(set_counts, module, part, layout.num_experts)
            set_counts(module, part, local)
            stack.callback(_set_forward, module, vars(module).get("forward"))
            exchange_tokens(module, part, layout.num_experts, router)
        yield


def _shortened(module: nn.Module, name: str, num_experts: int) -> Callable[[], None]:
    """Makes the parameter `name` of `module` one of `num_experts`, without values; gives what undoes that."""
    owner_name, _, own = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    whole = owner.get_parameter(own)
    part = nn.Parameter(whole.new_empty((num_experts, *whole.shape[1:])), requires_grad=whole.requires_grad)
    owner.register_parameter(own, part)
    return partial(owner.register_parameter, own, whole)


def _set_forward(module: nn.Module, own: Any) -> None:
    """Gives back the module's own forward, or its class's."""
    if own is None:
        del module.__dict__["forward"]
    else:
        module.forward = own


class _Even:
    """The route of evenly routed rows, as its collectives are recorded."""

    def __init__(self, rows_each: Tensor, num_rows: int, recorder: Recorder) -> None:
        recorder.record_collective("all_to_all", rows_each, "expert")
        self.experts = rows_each.new_empty(num_rows)
        self._recorder = recorder

    def there(self, rows: Tensor) -> Tensor:
        """As many rows as are sent."""
        received = _Exchange.apply(rows, self._recorder)
        assert isinstance(received, Tensor)
        return received

    back = there


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        recorder.record_collective("all_to_all", rows, "expert")
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        ctx.recorder.record_collective("all_to_all", gradient, "expert")
        return torch.empty_like(gradient), None
