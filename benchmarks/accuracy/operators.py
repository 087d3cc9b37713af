"""The profile of single operators of published machines, predicted by the device's rates and measured.

The rows are the operators of a Megatron GPT layer, each timed alone: matrix products, the two products of unfused
attention, and the memory-bound operators between them. Shapes follow from hidden size, tokens and heads. Under tensor
parallelism a product's time holds its collective in one direction; only the other direction is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from accuracy.profiles import DEVICES, Row, read_profile, summary
from galv.cost_models.compute import matmul_seconds
from galv.profiles.device import DeviceProfile, load_device

HALF = 2
"""Bytes of an element: the profile is of fp16."""

HEADS = {"gpt_1_3B": 32, "gpt_2_6B": 32, "gpt_6_7B": 32, "gpt_13B": 40, "gpt_20B": 64, "gpt_22B": 64, "gpt_40B": 64}
"""Of the models profiled, from the size of their score matrices."""

PRODUCTS = {
    "enc-attention-qkv": (1, True),
    "enc-attention-dense": (1, False),
    "enc-MLP-GEMM-1": (1, True),
    "enc-MLP-GEMM-2": (4, False),
}
"""Matrix products of a layer: the inner length in hidden sizes, and whether variant 0 keeps it whole on each rank."""

SCORES = {"enc-attention-softmax": (1.5, 2.0), "enc-attention-dropout": (2.5, 2.5)}
"""Element-wise over the scores: elements moved for one score, forward and backward. Megatron's causal softmax reads the
lower half and writes all; a dropout mask is half an element."""

TOKENS = {
    "enc-1st-layernorm": (2.0, 3.0),
    "enc-2nd-layernorm": (2.0, 3.0),
    "final-layernorm": (2.0, 3.0),
    "enc-post-attention-dropout": (7.5, 3.5),
    "enc-post-MLP-dropout": (7.5, 3.5),
}
"""Element-wise over the hidden state: elements moved for one of it, forward and backward. A bias, dropout and the
residual sum are kernels of their own (2, 2.5 and 3 elements); backward undoes dropout and sums the bias's gradient."""

GELU = (2.0, 3.0)
"""The same for the activation, of one element of the MLP's inner state."""

KINDS = dict.fromkeys(PRODUCTS, "matrix product")
KINDS |= dict.fromkeys(("enc-attention-score", "enc-attention-context"), "product over scores")
KINDS |= {
    "enc-attention-softmax": "softmax",
    "enc-attention-dropout": "dropout of scores",
    "enc-MLP-gelu": "activation",
}
KINDS |= {name: "norm" if "norm" in name else "dropout and residual sum" for name in TOKENS}


def operator_report(data: Path) -> Iterator[str]:
    """Lines: the error of every kind of operator by device and direction."""
    groups: dict[str, list[float]] = {}
    kinds: dict[str, list[float]] = {}
    left_out: dict[str, int] = {}
    for row in read_profile(data / "operators.csv"):
        try:
            error = operator_seconds(row) / float(row["seconds"]) - 1
        except LookupError as reason:
            left_out[str(reason)] = left_out.get(str(reason), 0) + 1
            continue
        kind = KINDS[row["operator"]]
        groups.setdefault(f"{kind}, {row['gpu']} {row['direction']}", []).append(error)
        kinds.setdefault(kind, []).append(error)
    everything = [error for errors in groups.values() for error in errors]
    yield f"operators: {summary(everything)}" if everything else "no operator could be priced"
    for kind, errors in sorted(kinds.items()):
        yield f"  {kind:45} {summary(errors)}"
        own = sorted(name for name in groups if name.startswith(f"{kind}, "))
        yield from (f"    {name.removeprefix(f'{kind}, '):43} {summary(groups[name])}" for name in own)
    yield from (f"  left out: {reason}: {count}" for reason, count in left_out.items())


def operator_seconds(row: Row) -> float:
    """The predicted seconds of one row: on the device, or as long as the host needs to issue it."""
    name = DEVICES.get(row["gpu"])
    if name is None:
        raise LookupError(f"no device profile for {row['gpu'] or 'an unnamed GPU'}")
    if row["operator"] not in KINDS:
        raise LookupError(f"several kernels in one: {row['operator']}")
    device = load_device(name)
    operator, backward = row["operator"], row["direction"] == "bwd"
    if operator in PRODUCTS:
        busy = _product(1, *_sides(row), device)
    elif operator in ("enc-attention-score", "enc-attention-context"):
        busy = _score_products(row, device)
    else:
        busy = device.kernel_seconds + HALF * _elements(row)[backward] / device.achieved_bytes_per_second
    return max(busy, device.launch_seconds)


def _tokens(row: Row) -> float:
    return float(row["micro_batch"]) * float(row["seq_len"])


def _product(batch: float, m: float, n: float, k: float, device: DeviceProfile) -> float:
    moved = HALF * batch * (m * k + k * n + m * n) / device.achieved_bytes_per_second
    return device.kernel_seconds + max(matmul_seconds(batch, m, n, k, "fp16", device), moved)


def _sides(row: Row) -> tuple[float, float, float]:
    """(m, n, k) of a product: from the tokens, the weight's bytes and the inner length."""
    (inner, whole), backward = PRODUCTS[row["operator"]], row["direction"] == "bwd"
    if int(row["tp"]) > 1 and (row["algorithm"] != "0" or whole == backward):
        raise LookupError("a product timed with its collective, or in another tensor-parallel variant")
    weight = float(row["weight_mib"]) * 2**20 / HALF
    k = inner * float(row["hidden"]) / (1 if whole else int(row["tp"]))
    n = round(weight / k)
    return (_tokens(row), k, n) if backward else (_tokens(row), n, k)


def _heads(row: Row) -> float:
    if row["model"] not in HEADS:
        raise LookupError(f"no number of heads known for {row['model']}")
    return HEADS[row["model"]] / int(row["tp"])


def _score_products(row: Row, device: DeviceProfile) -> float:
    """Queries by keys, or scores by values; backward does two products of each forward one."""
    length, batch = float(row["seq_len"]), float(row["micro_batch"]) * _heads(row)
    dim = float(row["hidden"]) / HEADS[row["model"]]
    shapes = {"score": (length, length, dim), "context": (length, dim, length)}
    forward = shapes["score" if row["operator"] == "enc-attention-score" else "context"]
    if row["direction"] == "fwd":
        return _product(batch, *forward, device)
    (m, n, k) = forward
    return _product(batch, m, k, n, device) + _product(batch, k, n, m, device)


def _elements(row: Row) -> tuple[float, float]:
    """Elements that an element-wise operator moves, forward and backward."""
    operator, tokens, hidden = row["operator"], _tokens(row), float(row["hidden"])
    if operator in SCORES:
        count, moved = _heads(row) * tokens * float(row["seq_len"]), SCORES[operator]
    elif operator in TOKENS:
        count, moved = tokens * hidden, TOKENS[operator]
    else:
        carried = tokens * hidden
        count, moved = float(row["input_mib"]) * 2**20 / HALF - carried, GELU
    return count * moved[0], count * moved[1]
