"""How long capture takes, and how much memory: run with `python benchmarks/capture.py`.

Each line is a process of its own: the graph of a model and the facts of all its unit classes for one sample, import of
torch and transformers left out of the time and counted in the memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LLAMA = "llama-3-405b.json"
TRUE_SIZES: dict[str, tuple[dict[str, Any], int | None]] = {
    "t5-large": (
        {"model_type": "t5", "d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "d_kv": 64}
        | {"decoder_start_token_id": 0},
        512,
    ),
    "whisper-large": (
        {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "num_mel_bins": 80}
        | {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120}
        | {"decoder_ffn_dim": 5120},
        None,
    ),
    "mixtral-8x7b": ({"model_type": "mixtral"}, 4096),
    "vit-huge": (
        {"model_type": "vit", "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16}
        | {"intermediate_size": 5120, "patch_size": 14},
        None,
    ),
    "swin-tiny": ({"model_type": "swin"}, None),
    "clip-base": ({"model_type": "clip"}, None),
    "resnet-50": ({"model_type": "resnet"}, None),
}


def measure(path: str, seq_len: int | None) -> dict[str, float]:
    """Seconds, GiB at the peak, and totals of one capture in this process."""
    import transformers

    from galv.planner.capture import capture
    from galv.planner.capture.source import resolve_model

    source = resolve_model(path, seq_len=seq_len)
    assert transformers.__version__
    _warm()
    start = time.perf_counter()
    graph = capture(source, precision="bf16", device_kind="cuda")
    facts = {name: graph.source.facts(name, None, 1) for name in graph.classes}
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    flops = sum(n * (facts[name].forward_flops + facts[name].backward_flops) for name, n in graph.counts.items())
    return {
        "seconds": seconds,
        "peak_gib": peak,
        "units": len(graph.units),
        "parameters": graph.num_parameters,
        "flops": flops,
    }


def _warm() -> None:
    """What the first operator of any kind imports is no part of a capture."""
    import torch
    from torch import nn

    from galv.planner.capture import capture
    from galv.planner.capture.source import resolve_model

    small = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    capture(resolve_model(small, torch.zeros(2, 4)), precision="fp32")


def in_own_process(config: dict[str, Any], seq_len: int | None) -> dict[str, float]:
    """`measure` of a configuration in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, __file__, str(path), json.dumps(seq_len)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _command_seconds(config: dict[str, Any]) -> float:
    """Wall seconds of `galv graph` for a Llama of sequence 8192, the least of three."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        for _ in range(3):
            start = time.perf_counter()
            command = [sys.executable, "-m", "galv", "graph", str(path), "--seq-len", "8192"]
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Prints a line for each model, and whether depth costs anything."""
    llama = json.loads((ROOT / "configs/models" / LLAMA).read_text(encoding="utf-8"))
    lines = {"llama-3-405b": (llama, 8192), "its first 8 layers": (llama | {"num_hidden_layers": 8}, 8192)} | TRUE_SIZES
    print(f"{'model':20}{'seconds':>9}{'peak GiB':>10}{'units':>7}{'parameters':>14}{'FLOPs of a sample':>20}")
    seconds = {}
    for name, (config, seq_len) in lines.items():
        found = in_own_process(config, seq_len)
        seconds[name] = found["seconds"]
        print(
            f"{name:20}{found['seconds']:9.2f}{found['peak_gib']:10.2f}{found['units']:7.0f}"
            f"{found['parameters']:14.4g}{found['flops']:20.4g}"
        )
    whole = {depth: _command_seconds(llama | {"num_hidden_layers": depth}) for depth in (8, 126)}
    print(f"galv graph from cold start: 8 layers {whole[8]:.2f} s, 126 layers {whole[126]:.2f} s")
    print(
        f"that is {whole[126] / whole[8]:.2f} x; of the capture alone, with the building of 126 Python modules,",
        end=" ",
    )
    print(f"126 layers take {seconds['llama-3-405b'] / seconds['its first 8 layers']:.2f} x the time of 8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
    else:
        main()
