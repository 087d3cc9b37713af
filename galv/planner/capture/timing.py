"""Times the distinct units of a model, forward and backward, on one device and without a distributed launch.

Of every class of repeated blocks one module is given real weights and real inputs of the shapes that the trace saw.
What stands around the blocks is timed as the whole model with its blocks passed over, and shared out among those units
in proportion to their prices.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from galv.cost_models.compute import phase_seconds
from galv.cost_models.unit import unit_key
from galv.planner.capture.model_graph import capture
from galv.planner.capture.operators import tensors_in
from galv.planner.capture.skeleton import BlockCall
from galv.planner.capture.source import resolve_model
from galv.planner.capture.traced import TracedFacts
from galv.planner.graph import ModelGraph
from galv.planner.plan import Precision
from galv.profiles.device import load_device
from galv.profiles.measure.sampling import spread
from galv.profiles.readings import Phase, UnitReading

ROUNDS = 5
LEAST_SECONDS = 0.02
"""Of one sample."""


@dataclass(frozen=True)
class UnitsRequest:
    """What is to be timed."""

    model: str
    inputs: str | None
    seq_len: int | None
    precision: Precision
    samples: tuple[int, ...]
    """Microbatch sizes; others are interpolated."""
    units: tuple[str, ...] | None
    device: str
    seconds: float = 120.0
    """All that taking samples may take; every unit is timed once even so."""
    known: tuple[UnitReading, ...] = ()
    """What need not be timed again."""


Durations = dict[Phase, list[float]]


@dataclass(frozen=True)
class _Timed:
    """Something that can be run and how long it took so far."""

    unit_classes: tuple[str, ...]
    samples: int
    run: Callable[[], tuple[float, float]]
    """Seconds of one forward and one backward."""
    taken: Durations


def time_units(
    request: UnitsRequest, together: Callable[[], Any] | None, told: Callable[[str, int, int], None]
) -> tuple[UnitReading, ...]:
    """Readings of every unit class that `request.known` lacks.

    `together`, where given, returns once all processes that are to work at the same time have called it.
    """
    source = resolve_model(request.model, request.inputs, seq_len=request.seq_len)
    device = torch.device(request.device)
    kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    graph = capture(source, precision=request.precision, device_kind=kind, units=request.units)
    assert isinstance(graph.source, TracedFacts), "of a captured model"
    works = list(_works(graph, graph.source, request, device))
    if together is not None:
        together()
    start = time.perf_counter()
    for done in range(ROUNDS):
        if done and time.perf_counter() - start > request.seconds:
            break
        for index, work in enumerate(works):
            told("timing units", done * len(works) + index, ROUNDS * len(works))
            _sample(work)
    return tuple(reading for work in works for reading in _readings(graph, work, request))


def _sample(work: _Timed) -> None:
    """One sample of both directions, the mean of as many runs as it takes; the very first run warms up."""
    if not work.taken["forward"]:
        work.run()
    forward, backward = work.run()
    for_sure = max(1, min(50, round(LEAST_SECONDS / max(forward + backward, 1e-6))))
    runs = [(forward, backward), *(work.run() for _ in range(for_sure - 1))]
    work.taken["forward"].append(statistics.median(run[0] for run in runs))
    work.taken["backward"].append(statistics.median(run[1] for run in runs))


def _readings(graph: ModelGraph, work: _Timed, request: UnitsRequest) -> Iterator[UnitReading]:
    """The readings of the classes that `work` is of, its seconds shared out by what each is priced at."""
    device = load_device("cpu")
    phases: tuple[Phase, ...] = get_args(Phase)
    for phase in phases:
        prices = {
            name: phase_seconds(graph.source.facts(name, None, work.samples).phase(phase), device)
            for name in work.unit_classes
        }
        seconds = statistics.median(work.taken[phase])
        for name, price in prices.items():
            if price > 0 and seconds > 0:
                yield UnitReading(
                    unit=unit_key(graph, name),
                    dtype=request.precision,
                    phase=phase,
                    samples=work.samples,
                    seconds=seconds * price / sum(prices.values()),
                    spread=spread(work.taken[phase]),
                )


# ----------------------------------------------------------------------------------------------- what is run


def _works(graph: ModelGraph, facts: TracedFacts, request: UnitsRequest, device: torch.device) -> Iterator[_Timed]:
    known = {(reading.unit, reading.samples) for reading in request.known if reading.dtype == request.precision}
    blocks = [name for name, place in facts.places.items() if place.is_block]
    around = tuple(name for name, place in facts.places.items() if not place.is_block and place.opaque is None)
    for samples in request.samples:
        for name in blocks:
            if (unit_key(graph, name), samples) not in known:
                calls = [facts.run(samples).calls[i] for i in facts.places[name].calls]
                run = _block_run(facts.skeleton.model, calls, device)
                yield _Timed((name,), samples, run, {"forward": [], "backward": []})
        missing = tuple(name for name in around if (unit_key(graph, name), samples) not in known)
        if missing:
            yield _Timed(around, samples, _around_run(facts, samples, device), {"forward": [], "backward": []})


def _block_run(model: nn.Module, calls: list[BlockCall], device: torch.device) -> Callable[[], tuple[float, float]]:
    """Runs one block on the calls that it gets."""
    block = _materialized(model.get_submodule(calls[0].name), device)
    made = [(_real(call.args, device), _real(call.kwargs, device)) for call in calls]

    def run() -> tuple[float, float]:
        forward = backward = 0.0
        for args, kwargs in made:
            seconds = _forward_backward(lambda args=args, kwargs=kwargs: block(*args, **kwargs), device)  # type: ignore[misc]
            forward, backward = forward + seconds[0], backward + seconds[1]
        block.zero_grad(set_to_none=True)
        return forward, backward

    return run


def _around_run(facts: TracedFacts, samples: int, device: torch.device) -> Callable[[], tuple[float, float]]:
    """Runs the model with its blocks passed over: each gives back what it gets as activation."""
    model = _materialized(facts.skeleton.model, device, without=facts.skeleton.blocks)
    calls = {call.name: call for call in facts.run(samples).calls}
    inputs = _inputs(facts, samples, device)

    def run() -> tuple[float, float]:
        with _passed_over(model, calls):
            seconds = _forward_backward(lambda: model(**inputs), device)
        model.zero_grad(set_to_none=True)
        return seconds

    return run


def _inputs(facts: TracedFacts, samples: int, device: torch.device) -> dict[str, Tensor]:
    made = {}
    for name, tensor in facts.source.example(samples).items():
        if tensor.is_meta:
            made[name] = _real_tensor(tensor, device)
        elif tensor.is_floating_point():
            made[name] = tensor.to(device, facts.dtype)
        else:
            made[name] = tensor.to(device)
    return made


@contextmanager
def _passed_over(model: nn.Module, calls: Mapping[str, BlockCall]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, call in calls.items():
            block = model.get_submodule(name)

            def passed(*args: Any, activation: str | None = call.activation, **kwargs: Any) -> Any:
                held = {str(position): value for position, value in enumerate(args)} | kwargs
                return held[activation or "0"]

            block.forward = passed
            stack.callback(block.__dict__.pop, "forward", None)
        yield


def _forward_backward(forward: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    start = _now(device)
    made = forward()
    middle = _now(device)
    outputs = [x for x in tensors_in(made) if x.requires_grad]
    outputs = outputs[:1]  # the loss where there is one, what goes to the next block otherwise
    gradients = [torch.ones_like(output) for output in outputs]
    begin = _now(device)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return middle - start, _now(device) - begin


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ----------------------------------------------------------------------------------------------- real tensors


def _materialized(module: nn.Module, device: torch.device, without: Sequence[tuple[str, nn.Module]] = ()) -> nn.Module:
    """A copy of `module` with small random weights; the submodules in `without` stay on the meta device."""
    made = copy.deepcopy(module)
    skipped = {id(p) for name, _ in without for p in made.get_submodule(name).parameters()}
    done: dict[int, Tensor] = {}
    for part in made.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta or id(tensor) in skipped:
                    continue
                if id(tensor) not in done:
                    real = (
                        _real_tensor(tensor, device) * 0.02
                        if tensor.is_floating_point()
                        else _real_tensor(tensor, device)
                    )
                    done[id(tensor)] = (
                        nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
                    )
                held[name] = done[id(tensor)]  # type: ignore[assignment]
    return made.train()


def _real(values: Any, device: torch.device) -> Any:
    """`values` with every meta tensor made real; those that carry gradients are leaves."""
    return tree_map_only(Tensor, lambda tensor: _real_tensor(tensor, device), values)


def _real_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    made = torch.randn(shape, device=device).to(dtype)
    return made.requires_grad_() if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else made
