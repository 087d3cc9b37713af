"""`galv estimate`: price one layout given by hand."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from galv.cli import options
from galv.cli.files import check_writable
from galv.cli.output import deliver

MicroBatch = Annotated[
    int, typer.Option("--micro-batch", min=1, metavar="N", help="Samples that one data-parallel group takes at once.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel degree.")]
Pp = Annotated[int, typer.Option("--pp", min=1, metavar="N", help="Pipeline degree; data parallel takes the rest.")]
Zero = Annotated[int, typer.Option("--zero", min=0, max=3, help="ZeRO level.")]
SequenceParallel = Annotated[
    bool | None,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="Shard the activations between tensor-parallel regions along the sequence; default: where --tp is above 1 "
        "and the model allows it.",
    ),
]
RecomputeName = Annotated[options.Recompute, typer.Option("--recompute")]
ScheduleName = Annotated[
    options.Schedule | None, typer.Option("--schedule", help="Of a pipeline (--pp above 1); 1f1b by default.")
]

Sequence = Annotated[
    Literal["none", "megatron", "ulysses", "ring"] | None,
    typer.Option("--sequence", help="How activations are cut along the sequence; ulysses and ring need --cp above 1."),
]
Cp = Annotated[int, typer.Option("--cp", min=1, metavar="N", help="Context-parallel degree of the blocks.")]
Ep = Annotated[int, typer.Option("--ep", min=1, metavar="N", help="Data-parallel ranks that share out the experts.")]
DpShard = Annotated[
    int | None, typer.Option("--dp-shard", min=1, metavar="N", help="Ranks that shard states; default: all.")
]
DpReplicate = Annotated[
    int | None, typer.Option("--dp-replicate", min=1, metavar="N", help="Replicas of sharded states; default: 1.")
]
Offload = Annotated[
    list[str] | None,
    typer.Option(
        "--offload",
        metavar="WHAT",
        help="What lies in the host's memory while it is not used: activations, optimizer, parameters; repeatable.",
    ),
]
VirtualStages = Annotated[
    int, typer.Option("--virtual-stages", min=1, metavar="N", help="Model chunks of a pipeline rank.")
]

_SEQUENCE: dict[bool | None, Literal["none", "megatron"] | None] = {None: None, True: "megatron", False: "none"}


def estimate(
    model: options.Model,
    cluster: options.ClusterSpec,
    global_batch: options.GlobalBatch,
    seq_len: options.SeqLen = None,
    micro_batch: MicroBatch = 1,
    tp: Tp = 1,
    pp: Pp = 1,
    zero: Zero = 0,
    sequence_parallel: SequenceParallel = None,
    sequence: Sequence = None,
    cp: Cp = 1,
    ep: Ep = 1,
    dp_shard: DpShard = None,
    dp_replicate: DpReplicate = None,
    offload: Offload = None,
    virtual_stages: VirtualStages = 1,
    recompute: RecomputeName = "none",
    schedule: ScheduleName = None,
    precision: options.PrecisionName = None,
    optimizer: options.OptimizerName = "adamw",
    memory: options.MemoryGib = None,
    inputs: options.Inputs = None,
    units: options.Units = None,
    opaque: options.Opaque = None,
    output: options.Output = None,
    as_json: options.AsJson = False,
) -> None:
    """Price one layout given by hand."""
    check_writable(output)
    from galv import api

    priced = api.estimate(
        model,
        inputs,
        cluster=cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        tp=tp,
        pp=pp,
        zero=zero,
        sequence=sequence or _SEQUENCE[sequence_parallel],
        cp=cp,
        ep=ep,
        dp_shard=dp_shard,
        dp_replicate=dp_replicate,
        offload=offload or (),
        virtual_stages=virtual_stages,
        recompute=recompute,
        schedule=schedule,
        precision=precision,
        optimizer=optimizer,
        memory=options.memory(memory),
        units=units,
        opaque=opaque or (),
    )
    deliver(priced, output=output, as_json=as_json)
