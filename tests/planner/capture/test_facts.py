"""Facts of units against torch's own FLOP counter and against real runs on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from galv.planner.capture import capture
from galv.planner.capture.attention import fused_attention
from galv.planner.capture.facts import extended
from galv.planner.capture.known_values import KnownValues
from galv.planner.capture.source import resolve_model
from galv.planner.capture.traced import Layouts
from galv.planner.graph import ModelGraph, UnitFacts

SEQ_LEN, MICROBATCH = 32, 2
Config = Callable[..., str]


def total(graph: ModelGraph, value: Callable[[UnitFacts], float]) -> float:
    """The sum of a fact over all units."""
    return sum(n * value(graph.source.facts(name, None, MICROBATCH)) for name, n in graph.counts.items())


# ----------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "opt"])
def test_flops_equal_those_of_torchs_counter(config: Config, name: str) -> None:
    """Forward and backward FLOPs of all units together are what FlopCounterMode counts in one run of the model."""
    source = resolve_model(config(name), seq_len=SEQ_LEN)
    graph = capture(source, precision="bf16", device_kind="cuda")
    model = source.build().to(torch.bfloat16)
    with KnownValues(), fused_attention("cuda"):
        with FlopCounterMode(display=False) as forward:
            loss = model(**source.inputs(MICROBATCH)).loss
        with FlopCounterMode(display=False) as backward:
            loss.backward()

    assert total(graph, lambda facts: facts.forward_flops) == forward.get_total_flops()
    assert total(graph, lambda facts: facts.backward_flops) == backward.get_total_flops()


# ----------------------------------------------------------------------------------------------- real runs


def real_model(path: str) -> nn.Module:
    """The model of a configuration file with weights, on the CPU."""
    model = resolve_model(path, seq_len=SEQ_LEN).build()
    inverse = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]  # a method of transformers' models
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(model.get_buffer(name) for name in inverse)):
            tensor.normal_(0, 0.02, generator=generator)
    return model


def batch() -> dict[str, Tensor]:
    """Token ids and labels with values."""
    tokens = torch.randint(0, 96, (MICROBATCH, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


@dataclass
class UnitWatch:
    """Which unit of a chain is running, by hooks on its blocks, and what autograd saves in it."""

    blocks: list[nn.Module]
    unit: str = "embedding"
    inputs: set[int] = field(default_factory=set)
    saved: dict[str, dict[int, int]] = field(default_factory=dict)

    def key(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        parameters = {self.key(parameter) for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if self.key(tensor) not in parameters | self.inputs:
                self.saved.setdefault(self.unit, {})[self.key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with ExitStack() as stack:
            for i, block in enumerate(self.blocks):
                enter = block.register_forward_pre_hook(self._enter(f"block{i}"), with_kwargs=True)
                leave = block.register_forward_hook(self._leave)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
            yield

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.unit, self.inputs = name, {self.key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.unit, self.inputs = "head", {self.key(output)}


@pytest.mark.parametrize("name, blocks", [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_saved_bytes_are_those_of_a_real_run(config: Config, name: str, blocks: str) -> None:
    """What each unit keeps for backward is, within 2 %, what autograd saves in a run with real tensors."""
    path = config(name)
    graph = capture(resolve_model(path, seq_len=SEQ_LEN), precision="fp32", device_kind="cpu")
    model = real_model(path)
    watch = UnitWatch(list(model.get_submodule(blocks).children()))
    with watch.watching(model):
        loss = model(**batch()).loss
    saved = {unit: sum(storages.values()) for unit, storages in watch.saved.items()}
    del loss

    block, head = (graph.source.facts(graph.units[i].unit_class, None, MICROBATCH) for i in (1, -1))
    assert saved["block0"] == pytest.approx(block.saved_bytes, rel=0.02)
    assert saved["block2"] == pytest.approx(block.saved_bytes, rel=0.02)
    assert saved["head"] == pytest.approx(head.saved_bytes, rel=0.02)


class Calls(TorchDispatchMode):
    """Counts the aten calls made within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_operators_are_those_of_a_real_run(config: Config, name: str) -> None:
    """Tracing on the meta device sees the same aten calls, as often, as training with real tensors makes."""
    path = config(name)
    graph = capture(resolve_model(path, seq_len=SEQ_LEN), precision="fp32", device_kind="cpu")
    model, inputs = real_model(path), batch()
    with Calls() as forward:
        loss = model(**inputs).loss
    one = torch.ones_like(loss)
    with Calls() as backward:
        torch.autograd.grad(loss, list(model.parameters()), one)

    for phase, real in (("forward", forward), ("backward", backward)):
        traced: Counter[str] = Counter()
        views = {"aten.detach.default"}
        for unit, count in graph.counts.items():
            for op in graph.source.facts(unit, None, MICROBATCH).phase(phase):  # type: ignore[arg-type]
                traced[op.name] += count
                views |= {op.name} if op.kind == "view" else set()
        moved = {name: count for name, count in real.names.items() if name not in views}
        assert {name: count for name, count in traced.items() if name not in views} == moved


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """(most bytes alive at once beyond those at the start, bytes left at the end, result) of `run` on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most, alive, result


@pytest.mark.parametrize("name, blocks", [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_peaks_are_those_of_the_allocator(config: Config, name: str, blocks: str) -> None:
    """The most bytes alive in a block's forward and backward are, within 5 %, what the CPU allocator hands out."""
    path = config(name)
    graph = capture(resolve_model(path, seq_len=SEQ_LEN), precision="fp32", device_kind="cpu")
    facts = graph.source.facts(graph.units[1].unit_class, None, MICROBATCH)
    model = real_model(path)
    block, calls = model.get_submodule(f"{blocks}.0"), []
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    model(**batch())
    hook.remove()
    (args, kwargs) = calls[0]
    activation = args[0].detach().requires_grad_()
    forward, kept, output = allocated(lambda: block(activation, *args[1:], **kwargs))
    gradient, holder = torch.ones_like(output), [output]
    del output
    weights = list(block.parameters())

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(holder.pop(), [activation, *weights], gradient)

    most, _, _ = allocated(backward)
    own = sum(weight.numel() * weight.element_size() for weight in weights)
    assert forward == pytest.approx(facts.forward_peak_bytes, rel=0.05)
    assert kept == pytest.approx(facts.saved_bytes + facts.output_bytes, rel=0.05)
    assert most <= facts.backward_peak_bytes + own


# ----------------------------------------------------------------------------------------------- microbatches


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_facts_extend_to_any_microbatch(config: Config, name: str) -> None:
    """Facts extended from traces at 2 and 4 samples equal a trace at 7 samples."""
    source = resolve_model(config(name), seq_len=SEQ_LEN)
    graph = capture(source, precision="bf16", device_kind="cuda")
    for unit_class, place in graph.source.places.items():  # type: ignore[attr-defined]
        traced = graph.source._trace(place, Layouts(None, None), 7)  # type: ignore[attr-defined]
        assert graph.source.facts(unit_class, None, 7) == traced


def test_unlike_traces_are_not_extended(config: Config) -> None:
    """Two traces with different operators give no rule for other sizes."""
    graph = capture(resolve_model(config("llama"), seq_len=SEQ_LEN), precision="bf16", device_kind="cuda")
    block, head = (graph.source.facts(graph.units[i].unit_class, None, 2) for i in (1, -1))
    assert extended((2, block), (4, head), 3) is None
