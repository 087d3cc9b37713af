"""galv finds the best way to parallelize a PyTorch model on a cluster, and runs that very plan.

The names below are imported when first used, so that `import galv` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from galv.api import (
        build_model,
        capture,
        check,
        estimate,
        explain,
        graph,
        parallelize,
        pareto,
        plan,
        plans,
        sweep,
    )
    from galv.errors import (
        ClusterError,
        Diverged,
        GalvError,
        ModelError,
        NoFeasiblePlan,
        PlanFileError,
        RunError,
        UnknownName,
        UsageError,
    )
    from galv.planner.plan import Plan
    from galv.planner.reporter import Reporter
    from galv.runtime.checkpoint import CheckpointFolder
    from galv.runtime.weights import open_weights, save_weights

__version__ = "0.1.0"

__all__ = [
    "CheckpointFolder",
    "ClusterError",
    "Diverged",
    "GalvError",
    "ModelError",
    "NoFeasiblePlan",
    "Plan",
    "PlanFileError",
    "Reporter",
    "RunError",
    "UnknownName",
    "UsageError",
    "__version__",
    "build_model",
    "capture",
    "check",
    "estimate",
    "explain",
    "graph",
    "open_weights",
    "parallelize",
    "pareto",
    "plan",
    "plans",
    "save_weights",
    "sweep",
]

_HOMES = {
    "galv.api": (
        "build_model",
        "capture",
        "check",
        "estimate",
        "explain",
        "graph",
        "parallelize",
        "pareto",
        "plan",
        "plans",
        "sweep",
    ),
    "galv.errors": (
        "ClusterError",
        "Diverged",
        "GalvError",
        "ModelError",
        "NoFeasiblePlan",
        "PlanFileError",
        "RunError",
        "UnknownName",
        "UsageError",
    ),
    "galv.planner.plan": ("Plan",),
    "galv.planner.reporter": ("Reporter",),
    "galv.runtime.checkpoint": ("CheckpointFolder",),
    "galv.runtime.weights": ("open_weights", "save_weights"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'galv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
