"""Step times of galv plans beside hand-written torch on the same model: `python benchmarks/runtime.py [--pairs N]`.

Both train the same Llama in the same processes (gloo, one thread each). Steps take turns, the first of a pair
alternating, so that what else the machine does falls on both alike. A step is forward, backward, clipping by the
global norm and AdamW. Seconds are the slowest rank's; CPU seconds, all ranks' together, stay comparable on a loaded
machine. Then what materialization takes: the peak of resident memory above what was there, beside the plan's share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import galv  # noqa: E402  # the clone that this file lies in

SEQ_LEN = 128
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": SEQ_LEN,
    "use_cache": False,
}
LARGE = MODEL | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 8192}
GLOBAL_BATCH, WORLD_SIZE = 4, 2
CASES: dict[str, dict[str, Any]] = {
    "DDP": {"micro_batch": 2},
    "FSDP2": {"micro_batch": 2, "zero": 3},
    "TP": {"micro_batch": 4, "tp": 2, "sequence": "none"},
    "1F1B": {"micro_batch": 1, "pp": 2},
}
SHARES: dict[str, dict[str, Any]] = {"zero 3": {"zero": 3}, "tp 4": {"tp": 4}, "pp 4": {"pp": 4}}
Step = Callable[[dict[str, Tensor]], Any]


def main() -> None:
    """Prints a line for each comparison and for each materialization."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[*CASES, "memory"])
    options = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {options.pairs} pairs of steps; median (quartiles)"
    )
    print(f"{'':8}{'torch':>10}{'galv':>10}{'ratio of seconds':>26}{'ratio of CPU seconds':>26}")
    for name in [name for name in CASES if name in options.only]:
        samples = _in_ranks(_compare, WORLD_SIZE, name, options.pairs)
        times = [statistics.median(seconds) * 1e3 for seconds in (samples["torch"][0], samples["galv"][0])]
        ratios = [_spread(*(samples[side][kind] for side in ("galv", "torch"))) for kind in (0, 1)]
        print(f"{name:8}{times[0]:>7.0f} ms{times[1]:>7.0f} ms{ratios[0]:>26}{ratios[1]:>26}", flush=True)
    if "memory" in options.only:
        print(f"\n{'':8}{'share MiB':>12}{'largest unit':>14}{'peak above':>12}{'limit':>8}")
        for name in SHARES:
            rows = _in_ranks(_materialize, 4, name)
            share, unit, peak = max(rows, key=lambda row: row[2] - row[0])
            verdict = "kept" if peak <= share + unit else "EXCEEDED"
            print(f"{name:8}{share / 2**20:>12.0f}{unit / 2**20:>14.0f}{peak / 2**20:>12.0f}{verdict:>10}", flush=True)


def _spread(ours: list[float], theirs: list[float]) -> str:
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


# ----------------------------------------------------------------------------------------------- processes


def _in_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """What `function(folder, *arguments)` returns on rank 0 of `world_size` gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that torch is imported once; nothing has run here yet.
        mp.start_processes(_rank, (world_size, folder, function, arguments), world_size, start_method="fork")
        return json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))


def _rank(rank: int, world_size: int, folder: str, function: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = function(Path(folder), *arguments)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _plan(config: dict[str, Any], folder: Path, layout: dict[str, Any], *, seq_len: int = SEQ_LEN) -> galv.Plan:
    """The plan of a layout, made on rank 0."""
    text = [""]
    path = folder / f"config-{config['hidden_size']}.json"
    if dist.get_rank() == 0:
        path.write_text(json.dumps(config), encoding="utf-8")
        cluster = f"cpu:{dist.get_world_size()}x1"
        sizes = {"seq_len": seq_len, "global_batch": GLOBAL_BATCH, "precision": "fp32"}
        text[0] = galv.estimate(str(path), cluster=cluster, **sizes, **layout).to_json()
    dist.broadcast_object_list(text)
    return galv.Plan.from_json(text[0])


# ----------------------------------------------------------------------------------------------- step times


def _compare(folder: Path, case: str, pairs: int) -> dict[str, tuple[list[float], list[float]]]:
    """(seconds, CPU seconds) of each step, by side."""
    plan = _plan(MODEL, folder, CASES[case])
    steps: dict[str, Step] = {"torch": HANDWRITTEN[case](folder / "config-384.json"), "galv": _ours(plan)}
    generator = torch.Generator().manual_seed(0)
    samples: dict[str, tuple[list[float], list[float]]] = {side: ([], []) for side in steps}
    for pair in range(-3, pairs):
        tokens = torch.randint(MODEL["vocab_size"], (GLOBAL_BATCH, SEQ_LEN), generator=generator)
        for side in sorted(steps, reverse=pair % 2 == 0):
            measured = _timed(steps[side], {"input_ids": tokens, "labels": tokens})
            for kind, value in enumerate(measured):
                if pair >= 0:
                    samples[side][kind].append(value)
    return samples


def _timed(step: Step, batch: dict[str, Tensor]) -> tuple[float, float]:
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    step(batch)
    own = time.perf_counter() - start, time.process_time() - cpu_start
    every = _gathered(own)
    return max(seconds for seconds, _ in every), sum(cpu for _, cpu in every)


def _ours(plan: galv.Plan) -> Step:
    module = galv.parallelize(galv.build_model(plan), plan)
    optimizer = module.optimizer("adamw", lr=1e-4)

    def step(batch: dict[str, Tensor]) -> float:
        loss = module.train_step(module.shard_batch(batch))
        module.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _model(path: Path) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).train()


def _own_samples(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.chunk(dist.get_world_size())[dist.get_rank()] for name, value in batch.items()}


def _loop(model: nn.Module, parameters: list[nn.Parameter], own: Callable[[Any], Any]) -> Step:
    """The loop that everybody writes: one backward, clipping, update."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> float:
        loss = model(**own(batch)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _ddp(path: Path) -> Step:
    model = DistributedDataParallel(_model(path), gradient_as_bucket_view=True)
    return _loop(model, list(model.parameters()), _own_samples)


def _fsdp(path: Path) -> Step:
    model = _model(path)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in (model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head], model):
        fully_shard(group, mesh=mesh)
    return _loop(model, list(model.parameters()), _own_samples)


def _tp(path: Path) -> Step:
    """As in PyTorch's tutorial on tensor parallelism, without sequence parallelism."""
    model = _model(path)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
    columns |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    rows = dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer, mesh, columns | rows)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(hasattr(parameter, "device_mesh"), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> float:
        loss = model(**batch).loss
        loss.backward()
        norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups.values()]
        norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        total = torch.stack(norms).norm()
        for group in groups.values():
            nn.utils.clip_grads_with_norm_(group, 1.0, total)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class _Part(nn.Module):
    """Half of the Llama: its modules are the model's own."""

    def __init__(self, model: Any, rank: int, world_size: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(list(model.model.layers)).__getitem__(
            _slice(len(model.model.layers), rank, world_size)
        )
        self.head = nn.Sequential(model.model.norm, model.lm_head) if rank == world_size - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=positions)
            x = x[0] if isinstance(x, tuple) else x
        return x if self.head is None else self.head(x)


def _slice(count: int, rank: int, world_size: int) -> slice:
    return slice(rank * count // world_size, (rank + 1) * count // world_size)


def _shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _pipeline(path: Path) -> Step:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = _Part(_model(path), rank, world_size)
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=GLOBAL_BATCH, loss_fn=_shifted_loss)
    parameters = list(part.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor]) -> float:
        losses: list[Tensor] = []
        ends = {"target": batch["labels"], "losses": losses} if rank == world_size - 1 else {}
        schedule.step(*([batch["input_ids"]] if rank == 0 else []), **ends)
        total = nn.utils.get_total_norm([p.grad for p in parameters]).square()
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, total.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return sum(float(loss.detach()) for loss in losses)

    return step


HANDWRITTEN: dict[str, Callable[[Path], Step]] = {"DDP": _ddp, "FSDP2": _fsdp, "TP": _tp, "1F1B": _pipeline}


# ----------------------------------------------------------------------------------------------- memory


def _materialize(folder: Path, name: str) -> list[tuple[int, int, int]]:
    """(share, largest unit whole, peak above what was there before) in bytes, of each rank."""
    layout = SHARES[name] | {"micro_batch": 1}
    # What the first model of this form imports and opens is no part of the second's memory.
    warm = galv.parallelize(galv.build_model(plan := _plan(MODEL, folder, layout, seq_len=32)), plan)
    warm.train_step(warm.shard_batch({name: torch.zeros(4, 32, dtype=torch.int64) for name in ("input_ids", "labels")}))
    plan = _plan(LARGE, folder, layout, seq_len=32)
    model = galv.build_model(plan)
    sizes: dict[str, int] = {}
    for unit in plan.units():
        modules = [model.get_submodule(module) for module in unit.modules]
        sizes[unit.name] = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _status_bytes("VmRSS")
    module = galv.parallelize(model, plan)
    peak = _status_bytes("VmHWM") - before
    share = sum(_local_bytes(parameter) for parameter in module.parameters())
    return _gathered((share, max(sizes.values()), peak))


def _local_bytes(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() * local.element_size()


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


if __name__ == "__main__":
    main()
