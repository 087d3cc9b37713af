"""Attention of a block whose sequence is cut over a context axis: what a `SequenceLayout` means when the block runs.

Two callers give it different ranks: the runtime's talk to one another, the capture's only record what would be said.
`parts` brings tensors to it, `calls` puts itself in the place of torch's attention, `ulysses` and `ring` compute that
with what other ranks hold, `kernels` are the fused kernels by which a ring attends to one part at a time.
"""

from galv.context_parallel.calls import exchanging_attention, replaced_attention
from galv.context_parallel.parts import local_arguments, to_part, to_whole
from galv.context_parallel.ranks import DeviceKind, Ranks

__all__ = [
    "DeviceKind",
    "Ranks",
    "exchanging_attention",
    "local_arguments",
    "replaced_attention",
    "to_part",
    "to_whole",
]
