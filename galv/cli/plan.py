"""`galv plan`: find the best plan for a model on a cluster."""

from __future__ import annotations

from galv.cli import options
from galv.cli.files import check_writable
from galv.cli.output import deliver
from galv.cli.progress import progress


def plan(
    model: options.Model,
    cluster: options.ClusterSpec,
    global_batch: options.GlobalBatch,
    seq_len: options.SeqLen = None,
    precision: options.PrecisionName = None,
    optimizer: options.OptimizerName = "adamw",
    memory: options.MemoryGib = None,
    inputs: options.Inputs = None,
    units: options.Units = None,
    opaque: options.Opaque = None,
    output: options.Output = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the fastest plan that fits, and print it."""
    check_writable(output)
    from galv import api

    with progress() as reporter:
        found = api.plan(
            model,
            inputs,
            cluster=cluster,
            seq_len=seq_len,
            global_batch=global_batch,
            precision=precision,
            optimizer=optimizer,
            memory=memory,
            units=units,
            opaque=opaque or (),
            reporter=reporter,
        )
    deliver(found, output=output, as_json=as_json)
