"""Token datasets: windows of a long row of tokens, in an order that depends on nothing but the seed and the step.

So a run that is resumed, or goes on under another plan, sees the samples that it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from galv.errors import UsageError
from galv.planner.plan import InputSpec, Plan
from galv.runtime.train_config import Data


class TokenWindows:
    """A row of tokens cut into windows of `length` tokens, each with the token after it."""

    def __init__(self, tokens: Any, length: int, *, seed: int, shuffle: bool, source: str) -> None:
        """`tokens` is an integer array of one dim. Raises UsageError when it holds not one window."""
        self._tokens, self._length, self._seed, self._shuffle = tokens, length, seed, shuffle
        self.num_windows = (len(tokens) - 1) // length
        if self.num_windows < 1:
            raise UsageError(f"{source} has {len(tokens)} tokens; a sample of the plan takes {length} and one more")
        self._epoch: tuple[int, np.ndarray] | None = None

    def window(self, sample: int) -> np.ndarray:
        """The tokens of the sample of that number, int64 (length + 1,); after the last window they begin again."""
        epoch, position = divmod(sample, self.num_windows)
        start = int(self._order(epoch)[position]) * self._length
        return np.asarray(self._tokens[start : start + self._length + 1], dtype=np.int64)

    def _order(self, epoch: int) -> np.ndarray:
        """The windows in the order of an epoch; each epoch has its own."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.arange(self.num_windows)
            if self._shuffle:
                np.random.default_rng((self._seed, epoch)).shuffle(order)
            self._epoch = epoch, order
        return self._epoch[1]


def token_batches(
    windows: TokenWindows, plan: Plan, *, shifted: bool, first_step: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Global batches without end, from the step `first_step` (from 0) on, as tensors by input name on the CPU.

    `shifted` says that the model itself shifts labels by one, so that labels are the tokens; where not they are the
    tokens that come next. Raises UsageError for a token that the model has not, and for a plan whose inputs are not
    tokens.
    """
    token_input, label_input, ones = _roles(plan)
    size = plan.training.global_batch
    step = first_step
    while True:
        rows = torch.from_numpy(np.stack([windows.window(step * size + i) for i in range(size)]))
        _check_known(rows, token_input, plan)
        batch = {token_input.name: rows[:, :-1].contiguous()}
        if label_input is not None:
            batch[label_input.name] = (rows[:, :-1] if shifted else rows[:, 1:]).contiguous()
        for spec in ones:
            shape = plan.model.input_shape(spec, size)
            batch[spec.name] = torch.ones(shape, dtype=getattr(torch, spec.dtype))
        yield batch
        step += 1


def _check_known(rows: Tensor, tokens: InputSpec, plan: Plan) -> None:
    """Nothing for tokens that the model has; of a model planned from an object the plan knows only the examples."""
    highest = int(rows.max())
    if plan.model.source is not None and tokens.high is not None and highest >= tokens.high:
        raise UsageError(f"the data holds token {highest}; the model knows those below {tokens.high}")


def open_tokens(data: Data, length: int, seed: int) -> TokenWindows:
    """The windows of a dataset on disk, memory-mapped. Raises UsageError saying what is wrong with it."""
    if data.tokens is not None:
        return TokenWindows(
            _mapped(Path(data.tokens), data.dtype), length, seed=seed, shuffle=data.shuffle, source=data.tokens
        )
    assert data.dataset is not None, "synthetic data has no windows"
    return TokenWindows(_joined(data), length, seed=seed, shuffle=data.shuffle, source=data.dataset)


def _mapped(path: Path, dtype: str) -> Any:
    try:
        if path.suffix != ".npy":
            return np.memmap(path, dtype=dtype, mode="r")
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        raise UsageError(f"there is no token file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the token file {path}: {error}") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"{path} must be whole numbers in one dim, not {array.dtype} in {array.ndim}")
    return array


def _joined(data: Data) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise UsageError("a dataset needs the package datasets: pip install datasets; or give tokens") from error
    try:
        dataset = load_from_disk(data.dataset)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the dataset {data.dataset}: {error}") from error
    if data.column not in dataset.column_names:
        raise UsageError(f"{data.dataset} has no column {data.column!r}; it has {', '.join(dataset.column_names)}")
    return np.concatenate([np.asarray(row, dtype=np.int64) for row in dataset[data.column]])


def _roles(plan: Plan) -> tuple[InputSpec, InputSpec | None, list[InputSpec]]:
    """The inputs that are tokens and labels, and those that are all ones."""
    specs = {spec.name: spec for spec in plan.model.inputs}
    tokens = specs.pop("input_ids", None)
    labels = next((specs.pop(name) for name in ("labels", "targets", "target") if name in specs), None)
    masks = [specs.pop(name) for name in ("attention_mask",) if name in specs]
    length = plan.training.seq_len
    if tokens is None or specs or tokens.batch_dim != 0 or length is None or tokens.shape[1:] != (length,):
        names = ", ".join(spec.name for spec in plan.model.inputs)
        raise UsageError(
            f"token data feeds models that take input_ids (and labels, attention_mask); this plan's takes {names}: "
            "train it with a script of your own"
        )
    return tokens, labels, masks
