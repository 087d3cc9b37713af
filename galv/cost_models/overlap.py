"""How long computation, collectives and copies take that run at the same time.

Works that run together slow each other down: by pairs, each as `OverlapSlowdown` says of the two resources. With
several others the losses add up: beside two that each cost half its speed a work runs at 1 / (1 + 1 + 1). The form is
that of Mist's interference model (Zhu et al., EuroSys 2025), with one figure a pair instead of one a combination.
"""

from __future__ import annotations

from collections.abc import Iterable

from galv.cost_models.communication import Group
from galv.profiles.device import OverlapSlowdown, Resource

_FINISHED = 1e-12
"""Share of a work that rounding may leave over."""


def exposed_seconds(compute_seconds: float, communication_seconds: float, slowdown: float) -> float:
    """Seconds that communication beside computation adds to it, both `slowdown` times slower while they overlap.

    The shorter of the two lies wholly in the overlap, which stretches it; the rest of the longer one is not slowed.
    `slowdown` is that of the pair, `device.overlap.between("compute", resource_of(group))`.
    """
    shorter = min(compute_seconds, communication_seconds)
    together = max(compute_seconds, communication_seconds) + (slowdown - 1) * shorter
    return together - compute_seconds


def together_seconds(works: Iterable[tuple[Resource, float]], slowdown: OverlapSlowdown) -> float:
    """Seconds until all `works`, started at once, are done. Each is a resource and its seconds alone.

    Two works of `host` are copies in the two directions. Works that queue for one resource are to be given as one.
    """
    left = [(resource, seconds, seconds * _FINISHED) for resource, seconds in works if seconds > 0]
    passed = 0.0
    while left:
        paces = [
            1.0 + sum(slowdown.between(one, other) - 1.0 for j, (other, _, _) in enumerate(left) if j != i)
            for i, (one, _, _) in enumerate(left)
        ]
        step = min(seconds * pace for (_, seconds, _), pace in zip(left, paces, strict=True))
        passed += step
        rest = [(r, s - step / pace, least) for (r, s, least), pace in zip(left, paces, strict=True)]
        left = [work for work in rest if work[1] > work[2]]
    return passed


def resource_of(group: Group) -> Resource:
    """What the collectives of `group` occupy: `link` in one node, `network` across nodes."""
    return "link" if group.num_nodes == 1 else "network"
