"""Weights in Hugging Face's folders of safetensors: read tensor by tensor, written shard by shard.

A folder holds `model.safetensors`, or several files and `model.safetensors.index.json` that says which tensor is where.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from galv.errors import RunError, UsageError
from galv.runtime.module import ParallelModule

MAX_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def open_weights(folder: str | Path) -> Callable[[str], Tensor | None]:
    """A function that reads the tensor of a name from `folder`, None where there is none; for `parallelize`.

    A name is also found under one that has or lacks its first part, as checkpoints of a model without its head do
    (`transformer.h.0...` and `h.0...`). Raises UsageError when the folder holds no safetensors.
    """
    safe_open = _library().safe_open
    files = {name: Path(folder, file) for name, file in _files(Path(folder), safe_open).items()}
    by_tail = {name.partition(".")[2]: name for name in files}
    opened: dict[Path, Any] = {}

    def read(name: str) -> Tensor | None:
        candidates = (name, name.partition(".")[2], by_tail.get(name))
        found = next((known for known in candidates if known in files), None)
        if found is None:
            return None
        path = files[found]
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        tensor: Tensor = opened[path].get_tensor(found)
        return tensor

    return read


def save_weights(module: ParallelModule, folder: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes the model's weights to `folder` from rank 0, which holds one shard at a time; tied ones once.

    The model's own configuration is put beside them where the plan knows it, so that `from_pretrained` reads the
    folder. Every rank must call it. Raises RunError, on every rank, when it cannot be written.
    """
    aliases = {name for group in module.plan.model.tied for name in group[1:]}
    writer = _Writer(Path(folder), max_shard_bytes) if dist.get_rank() == 0 else None
    failure: list[str | None] = [None]
    for name, tensor in module.full_tensors():
        if writer is not None and name not in aliases and failure[0] is None:
            failure[0] = _tried(lambda n=name, t=tensor: writer.add(n, t))  # type: ignore[misc]
    if writer is not None and failure[0] is None:
        failure[0] = _tried(lambda: writer.finish(module.plan.model.source))
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise RunError(f"cannot save the weights to {folder}: {failure[0]}")


def check_can_save(folder: str | Path) -> None:
    """Nothing when rank 0 can write to `folder`, which it makes. Every rank must call it. Raises UsageError."""
    failure = [_tried(lambda: _probe(Path(folder))) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise UsageError(f"cannot save weights to {folder}: {failure[0]}")


def _probe(folder: Path) -> None:
    _library()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


class _Writer:
    """Collects tensors into shards; names them when their number is known."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder, self._most = folder, max_shard_bytes
        self._held: dict[str, Tensor] = {}
        self._num_bytes, self._total_bytes = 0, 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if self._held and self._num_bytes + num_bytes > self._most:
            self._write()
        self._held[name] = tensor.to("cpu", copy=True).contiguous()
        self._num_bytes += num_bytes
        self._total_bytes += num_bytes

    def finish(self, source: str | None) -> None:
        self._write()
        count = len(self._shards)
        if count == 1:
            self._partial(0).replace(self._folder / _WHOLE)
        else:
            where: dict[str, str] = {}
            for i, names in enumerate(self._shards):
                file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
                self._partial(i).replace(self._folder / file)
                where |= dict.fromkeys(names, file)
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": where}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        config = Path(source or "")
        config = config / "config.json" if config.is_dir() else config
        if source is not None and config.is_file():
            shutil.copyfile(config, self._folder / "config.json")

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _library().torch.save_file(self._held, self._partial(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._num_bytes = {}, 0

    def _partial(self, index: int) -> Path:
        return self._folder / f"model-{index}.partial"


def _tried(action: Callable[[], None]) -> str | None:
    """Why `action` failed, None when it did not."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # safetensors raises errors of its own for a full disk
        return str(error) or type(error).__name__
    return None


def _files(folder: Path, safe_open: Any) -> dict[str, str]:
    """The file that holds each tensor."""
    index = folder / _INDEX
    try:
        if index.is_file():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        found: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path.name)
    except Exception as error:
        raise UsageError(f"cannot read the weights in {folder}: {error}") from error
    if not found:
        raise UsageError(f"{folder} holds no weights: there is no {_WHOLE}, {_INDEX} or other .safetensors file in it")
    return found


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UsageError("weights in safetensors need the package: pip install 'galv[transformers]'") from error
    return safetensors
