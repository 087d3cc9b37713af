"""Which random numbers (dropout) a parallel model draws: reproducible under a plan, independent across shards.

A model draws from a state of its own, so that whatever the training script draws stays alike on all ranks. Groups with
other samples and other stages have other seeds. On the tensor axis, ranks draw alike where they hold the same
activation and differently where each holds a part (Megatron-LM's two random states, arXiv 1909.08053). Units with
another data-parallel degree have a state of their own: other ranks share samples there. The state for a
part is seeded from the common one whenever such a region begins, hence recomputing a unit draws the same again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

States = tuple[Tensor, ...]
"""Of the CPU's generator and, where the model runs on a GPU, that one's."""


def seed_from(*parts: object) -> int:
    """A seed that depends on every part, a non-negative 63-bit integer."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Randomness:
    """The random state of one model on one rank."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        with _preserved(device):
            torch.manual_seed(seed)
            self._states = _states(device)

    @property
    def states(self) -> States:
        """What the next random numbers follow from; to be kept, and set again."""
        return self._states

    @states.setter
    def states(self, states: States) -> None:
        self._states = states

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it, random numbers come from the model's state."""
        outside = _states(self._device)
        _set_states(self._states, self._device)
        try:
            yield
        finally:
            self._states = _states(self._device)
            _set_states(outside, self._device)


class Streams:
    """The random states of one model on one rank: one for each data-parallel degree that its units have.

    Ranks of one data-parallel group draw alike, and which they are depends on the degree. `degree` is that of the
    model's own stream, from which everything is drawn that does not say otherwise.
    """

    def __init__(self, degree: int, streams: Mapping[int, Randomness]) -> None:
        self._degree, self._streams = degree, streams

    @property
    def main(self) -> Randomness:
        """The model's own."""
        return self._streams[self._degree]

    @property
    def states(self) -> States:
        """What the next random numbers of all streams follow from, by ascending degree; to be kept, and set again."""
        return tuple(state for degree in sorted(self._streams) for state in self._streams[degree].states)

    @states.setter
    def states(self, states: States) -> None:
        each = len(states) // len(self._streams)
        for i, degree in enumerate(sorted(self._streams)):
            self._streams[degree].states = states[i * each : (i + 1) * each]

    def drawing(self, function: Callable[..., Any], degree: int) -> Callable[..., Any]:
        """`function`, drawing for the samples of one of `degree` groups."""
        if degree == self._degree:
            return function
        stream = self._streams[degree]

        def draw(*args: Any, **kwargs: Any) -> Any:
            with stream.active():
                return function(*args, **kwargs)

        return draw

    def surround(self, module: nn.Module, degree: int) -> None:
        """Makes calls of `module` draw for the samples of one of `degree` groups. Put it around recomputation."""
        if degree == self._degree:
            return
        stream, active = self._streams[degree], contextlib.ExitStack()
        module.register_forward_pre_hook(lambda module, args: active.enter_context(stream.active()) and None)
        module.register_forward_hook(lambda module, args, output: active.close(), always_call=True)


class ShardRegions:
    """Switches random states where activations become parts of a tensor, and back where they are whole again."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._common: States | None = None

    def enter(self) -> None:
        """From here on, ranks of the tensor axis draw differently."""
        if self._common is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
            self._common = _states(self._device)
            torch.manual_seed(seed_from(seed, self._rank))

    def leave(self) -> None:
        """From here on, they draw alike."""
        if self._common is not None:
            _set_states(self._common, self._device)
            self._common = None

    def surround(self, module: nn.Module, *, is_sharded: bool) -> None:
        """Makes calls of `module` begin with a part of the activation, or all of it, and end outside of regions."""
        if is_sharded:
            module.register_forward_pre_hook(lambda module, args: self.enter())
        # Also when recomputing stops early, by an exception.
        module.register_forward_hook(lambda module, args, output: self.leave(), always_call=True)


def _states(device: torch.device) -> States:
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.cuda.get_rng_state(device)


def _set_states(states: States, device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.cuda.set_rng_state(states[1], device)


@contextlib.contextmanager
def _preserved(device: torch.device) -> Iterator[None]:
    states = _states(device)
    try:
        yield
    finally:
        _set_states(states, device)
