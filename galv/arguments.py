"""What the arguments of the Python front door may be: each is read or refused with what would work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from galv.errors import UnknownName, UsageError
from galv.planner.constraints import Constraints, read_constraints
from galv.planner.plan import MAX_GLOBAL_BATCH, MAX_SEQ_LEN, Offload, OptimizerName, Precision
from galv.profiles.cluster import ClusterProfile, load_cluster
from galv.profiles.device import DeviceProfile

if TYPE_CHECKING:
    from galv.planner.planner import Objective
    from galv.planner.reporter import Reporter
    from galv.planner.space import Request

GIB = 2**30
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


class PlanOptions(TypedDict, total=False):
    """The keywords of `galv.plan`, which says what they mean; `cluster` and `global_batch` have to be there."""

    cluster: str | ClusterProfile
    global_batch: int
    seq_len: int | None
    precision: Precision | None
    optimizer: OptimizerName
    memory: float | str | None
    require: Sequence[str]
    forbid: Sequence[str]
    objective: Objective
    time_limit: float | None
    units: Sequence[str] | None
    opaque: Sequence[str]
    reporter: Reporter | None


def cluster_profile(cluster: str | ClusterProfile) -> ClusterProfile:
    """The cluster that text describes."""
    if isinstance(cluster, ClusterProfile):
        return cluster
    if not isinstance(cluster, str):
        raise UsageError(f"cluster must be text such as 'h100-sxm-80:8x4' or a ClusterProfile, not {cluster!r}")
    return load_cluster(cluster)


def check_name(kind: str, name: str, valid: Any) -> None:
    """Nothing for one of the words of a Literal. Raises UsageError or UnknownName for anything else."""
    if not isinstance(name, str):
        raise UsageError(f"the {kind} must be one of {', '.join(get_args(valid))}, not {name!r}")
    if name not in get_args(valid):
        raise UnknownName(kind, name, get_args(valid))


def whole_number(argument: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """`value` as an int, also when it is one of numpy's. Raises UsageError naming the argument."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise UsageError(f"{argument} must be a whole number, not {value!r}")
    if number < least:
        raise UsageError(f"{argument} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise UsageError(f"{argument} can be at most {most}, not {number}")
    return number


def training_request(
    cluster: ClusterProfile,
    global_batch: int,
    seq_len: int | None,
    precision: Precision | None,
    optimizer: OptimizerName,
    memory: float | str | None,
) -> Request:
    """The training request, checked against the device."""
    from galv.planner.space import Request  # brings numpy

    global_batch = whole_number("global_batch", global_batch, most=MAX_GLOBAL_BATCH)
    seq_len = None if seq_len is None else whole_number("seq_len", seq_len, most=MAX_SEQ_LEN)
    check_name("optimizer", optimizer, OptimizerName)
    check_name("precision", precision or "bf16", Precision)
    device = cluster.device
    chosen: Precision = precision or ("bf16" if device.kind == "cuda" and "bf16" in device.dtypes else "fp32")
    device.peak(chosen)
    budget = device.memory_bytes if memory is None else round(_gib(memory, device) * GIB)
    return Request(
        global_batch=global_batch, seq_len=seq_len, precision=chosen, optimizer=optimizer, budget_bytes=budget
    )


def check_patterns(argument: str, value: Any) -> None:
    """Nothing for a collection of texts. Raises UsageError for one text, which would be read letter by letter."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(pattern, str) for pattern in value):
        raise UsageError(f"{argument} must be a list of patterns such as ['encoder.stages.*'], not {value!r}")


def offload_of(value: Sequence[str]) -> tuple[Offload, ...]:
    """What is offloaded, sorted. Raises UsageError for a single text, UnknownName for what cannot be."""
    if isinstance(value, str):
        raise UsageError(f"offload must be a list such as ['activations'], not {value!r}")
    for what in value:
        check_name("offload", what, Offload)
    return tuple(what for what in get_args(Offload) if what in value)  # in the order of the alphabet


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _gib(memory: float | str, device: DeviceProfile) -> float:
    """A memory budget, a number of GiB or a share such as `90%`, in GiB. Raises UsageError for what is neither."""
    most = device.memory_bytes / GIB
    if isinstance(memory, str) and (share := _PERCENT.fullmatch(memory.strip())):
        percent = float(share[1])
        if not 0 < percent <= 100:
            raise UsageError(f"memory is a share of the device's, above 0% and at most 100%, not {memory}")
        return most * percent / 100
    if isinstance(memory, str) or not _is_number(memory):
        raise UsageError(f"memory must be a number of GiB, not {memory!r}, or a share such as '90%'")
    if not 0 < memory <= most * (1 + 1e-9):
        raise UsageError(f"memory is per device, in GiB: {device.name} has {most:.1f}, {memory:g} was asked for")
    return memory


def constraints_of(require: Sequence[str], forbid: Sequence[str]) -> Constraints:
    """What is demanded. Raises UsageError for a single text, which would be read letter by letter, and for nonsense."""
    for argument, value in (("require", require), ("forbid", forbid)):
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            raise UsageError(f"{argument} must be a list of demands such as ['tp=8'], not {value!r}")
    return read_constraints(require, forbid)


def seconds_limit(value: float | None) -> float | None:
    """A time limit. Raises UsageError for what is no positive number."""
    if value is not None and (not _is_number(value) or not value > 0):
        raise UsageError(f"time_limit must be a positive number of seconds, not {value!r}")
    return value
