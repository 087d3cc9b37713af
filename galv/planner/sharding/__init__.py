"""Tensor-parallel placements of one unit, and the cut of its sequence, found on its graph by an exact integer program.

`trace` follows the unit's forward, `factors` (with `shapes` and `operators`) says how each operator's dims correspond,
`rules` which placements follow, `choices` what they cost, `ilp` picks the cheapest combination, `rehearse` runs it on
the meta device, and `layout` writes it down. `sequence` asks the same machinery where the sequence is.
"""

from galv.planner.sharding.choices import Rates
from galv.planner.sharding.layout import find_layout
from galv.planner.sharding.sequence import find_sequence_layout

__all__ = ["Rates", "find_layout", "find_sequence_layout"]
