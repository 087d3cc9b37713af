"""`galv calibrate`: correct a profile by a training run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from galv.cli.files import check_writable, write_text
from galv.errors import UsageError

Run = Annotated[Path, typer.Argument(metavar="RUN.JSON", help="What `galv run --record` wrote.", show_default=False)]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="PROFILE.JSON", help="To be corrected; default: the one that the run was planned for."
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="PROFILE.JSON", help="Write the corrected profile to this file.")
]


def calibrate(run: Run, output: Output, profile: Profile = None) -> None:
    """Correct a profile by what a training run took, and say which term of its estimate was off."""
    check_writable(output, "the profile")
    from galv.planner.plan_table import gib, seconds, table
    from galv.profiles import calibration
    from galv.profiles.cluster import load_cluster
    from galv.profiles.measured import MeasuredProfile, read_measured, split_spec
    from galv.profiles.run_record import read_record

    record = read_record(run)
    split = split_spec(record.cluster)
    if not any(stage.busy_seconds for stage in record.stages):
        raise UsageError(f"{run} holds no profiled step; record a run of 3 steps or more")
    known: MeasuredProfile
    if profile is not None or split is not None:
        known = read_measured(str(profile or (split or ("", None))[0]))
    else:
        known = calibration.profile_of(load_cluster(record.cluster), torch="any", date="as shipped")
    terms = calibration.corrections(record, str(run))
    write_text(calibration.calibrated(known, record, str(run)).to_json(), output, "the profile")
    rows: list[tuple[str, ...]] = [("term", "estimated", "run", "")]
    for term in terms:
        said, real = (
            (f"{gib(value)} GiB" if term.term == "memory" else seconds(value))
            for value in (term.predicted, term.measured)
        )
        rows.append((term.term, said, real, _off(term.predicted, term.measured)))
    step = _off(record.predicted_step_seconds, record.step_seconds)
    rows.append(("step", seconds(record.predicted_step_seconds), seconds(record.step_seconds), step))
    sys.stdout.write(
        f"{table(rows, right=(1, 2, 3))}\n\nmost off: {calibration.told(terms)}\n"
        f"Profile written to {output}; plan with --cluster {output}:{record.devices_per_node}x{record.num_nodes}\n"
    )


def _off(said: float, real: float) -> str:
    return f"{100 * (real / said - 1):+.0f} %" if said > 0 else "-"
