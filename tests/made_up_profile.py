"""A profile made of made-up samples: a machine whose every figure a test knows."""

from __future__ import annotations

from galv.profiles.measure import fit
from galv.profiles.measure.grid import Question
from galv.profiles.measured import PROFILE_VERSION, MeasuredProfile, Provenance

FLOPS_PER_SECOND = 20e9
BYTES_PER_SECOND = 4e9
LAUNCH_SECONDS = 5e-6
LINK_BYTES_PER_SECOND = 1e9
LINK_SECONDS = 2e-4


def samples_of(question: Question, *, slower: float = 1.0) -> list[float]:
    """Three samples of a machine with the rates above, the middle one exact and the others 10 % off."""
    if question.kind == "launch":
        seconds = LAUNCH_SECONDS
    elif question.kind == "collective":
        seconds = LINK_SECONDS + question.num_bytes / LINK_BYTES_PER_SECOND
    elif question.kind == "overlap":
        seconds = {"compute": 0.1, "communication": 0.04, "together": 0.12, "": 0.0}[question.part]
    else:
        seconds = LAUNCH_SECONDS + question.flops / FLOPS_PER_SECOND + question.num_bytes / BYTES_PER_SECOND
    return [seconds * slower * factor for factor in (0.9, 1.0, 1.1)]


def questions_of(processes: int) -> list[Question]:
    """A small grid."""
    found = [Question("reference", shape=(1, 512, 512, 512)), Question("launch")]
    found += [Question("matmul", shape=(1, m, n, k)) for m in (64, 1024) for n in (64, 1024) for k in (64, 1024)]
    found += [Question("traffic", num_bytes=4 * 1024 * 16**i) for i in range(4)]
    found += [Question("attention", shape=(2, 4, length, 64)) for length in (64, 512)]
    if processes > 1:
        sizes = (1024, 2**20)
        found += [Question("collective", num_bytes=n, collective="all_reduce", size=processes) for n in sizes]
        found += [Question("overlap", size=processes, part=part) for part in ("compute", "communication", "together")]
    return found


def made_up_profile(name: str = "made-up", counts: tuple[int, ...] = (1, 2), unsteady: float = 0.0) -> MeasuredProfile:
    """The profile of that machine for each count of processes; with more of them each is as slow as they are many."""
    settings = tuple(
        fit.measurement(
            [(q, samples_of(q, slower=count)) for q in questions_of(count)],
            name="cpu",
            base="cpu",
            processes=count,
            num_nodes=1,
            memory_bytes=2**32,
            context_bytes=2**28,
        )
        for count in counts
    )
    made = Provenance(
        device="made up", driver="none", torch="2.13.0", date="2026-11-30 12:00 UTC", num_cores=2, unsteady=unsteady
    )
    return MeasuredProfile(schema_version=PROFILE_VERSION, name=name, provenance=made, settings=settings)
