"""The captured model as a person reads it: a table of unit classes, the chain, and the edges; also JSON and DOT."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from galv.planner.graph import ModelGraph
from galv.planner.plan import Precision
from galv.planner.plan_table import unit_names

_WIDTH = 120


@dataclass(frozen=True)
class ClassReport:
    """One unit class, for one microbatch on one device. FLOPs and bytes are of one unit."""

    name: str
    count: int
    num_parameters: int
    num_trainable: int
    forward_flops: float
    backward_flops: float
    saved_bytes: float
    """Kept from forward to backward, its input included where it keeps that."""
    input_bytes: float
    """What comes from the units before."""
    output_bytes: float
    """What goes to the units after."""
    num_operators: int
    """Forward and backward, views left out."""
    is_opaque: bool


@dataclass(frozen=True)
class EdgeReport:
    """A tensor that flows from one unit to later ones; bytes for one microbatch."""

    producer: str
    consumers: tuple[str, ...]
    num_bytes: float


@dataclass(frozen=True)
class GraphReport:
    """What galv knows of a model."""

    name: str
    micro_batch: int
    seq_len: int | None
    precision: Precision
    num_parameters: int
    """Tied parameters once."""
    classes: tuple[ClassReport, ...]
    chain: tuple[tuple[str, str], ...]
    """(unit, its class) in the order of execution."""
    edges: tuple[EdgeReport, ...]
    tied: tuple[tuple[str, ...], ...]
    no_pipeline: str | None
    """Why the model cannot be cut into pipeline stages; None when it can."""
    notes: tuple[str, ...]
    graph: ModelGraph

    @property
    def forward_flops(self) -> float:
        return sum(row.count * row.forward_flops for row in self.classes)

    @property
    def backward_flops(self) -> float:
        return sum(row.count * row.backward_flops for row in self.classes)

    @property
    def saved_bytes(self) -> float:
        return sum(row.count * row.saved_bytes for row in self.classes)

    def to_json(self) -> str:
        """One JSON object: the fields above and the totals."""
        fields = {name: value for name, value in vars(self).items() if name not in ("graph", "classes", "edges")}
        fields["classes"] = [asdict(row) for row in self.classes]
        fields["edges"] = [asdict(edge) for edge in self.edges]
        fields["chain"] = [{"unit": unit, "class": unit_class} for unit, unit_class in self.chain]
        totals = {"num_parameters": self.num_parameters, "forward_flops": self.forward_flops}
        totals |= {"backward_flops": self.backward_flops, "saved_bytes": self.saved_bytes}
        return json.dumps({**fields, "totals": totals}, indent=2) + "\n"

    def to_dot(self) -> str:
        """The units and edges in the language of Graphviz."""
        classes = {row.name: row for row in self.classes}
        lines = [f"digraph {json.dumps(self.name)} {{", "  node [shape=box];"]
        for unit, name in self.chain:
            row = classes[name]
            label = f"{unit}\\n{name}, {_count(row.num_parameters)} parameters"
            lines.append(f'  "{unit}" [label="{label}"];')
        for edge in self.edges:
            size = _size(edge.num_bytes)
            lines += [f'  "{edge.producer}" -> "{consumer}" [label="{size}"];' for consumer in edge.consumers]
        return "\n".join([*lines, "}"]) + "\n"

    def __str__(self) -> str:
        tokens = f" of {self.seq_len} tokens" if self.seq_len else ""
        samples = f"{self.micro_batch} sample{'s' if self.micro_batch > 1 else ''}{tokens}"
        parts = [f"{self.name}: {_count(self.num_parameters)} parameters, {samples}, {self.precision}", ""]
        parts += [_table(self), "", _chain(self)]
        if skips := _skips(self):
            parts += ["", "What flows further than to the next unit:", *(f"  {_edge(edge)}" for edge in skips)]
        remarks = [f"No pipeline: {self.no_pipeline}"] if self.no_pipeline else []
        remarks += [f"Note: {note}" for note in self.notes]
        parts += ["", *remarks] if remarks else []
        return "\n".join(parts).rstrip()


def report(graph: ModelGraph, *, micro_batch: int, seq_len: int | None, precision: Precision) -> GraphReport:
    """The report of `graph` for microbatches of `micro_batch` samples."""
    names = [unit.name for unit in graph.units]
    return GraphReport(
        name=graph.name,
        micro_batch=micro_batch,
        seq_len=seq_len,
        precision=precision,
        num_parameters=graph.num_parameters,
        classes=tuple(_class_report(graph, name, micro_batch) for name in graph.classes),
        chain=tuple((unit.name, unit.unit_class) for unit in graph.units),
        edges=tuple(
            EdgeReport(names[edge.producer], tuple(names[c] for c in edge.consumers), edge.num_bytes(micro_batch))
            for edge in graph.edges
        ),
        tied=graph.tied,
        no_pipeline=graph.no_pipeline,
        notes=graph.notes,
        graph=graph,
    )


def _class_report(graph: ModelGraph, name: str, micro_batch: int) -> ClassReport:
    facts, own = graph.source.facts(name, None, micro_batch), graph.classes[name]
    position = next(i for i, unit in enumerate(graph.units) if unit.unit_class == name)
    taken = sum(edge.num_bytes(micro_batch) for edge in graph.edges if position in edge.consumers)
    given = sum(edge.num_bytes(micro_batch) for edge in graph.edges if edge.producer == position)
    return ClassReport(
        name=name,
        count=graph.counts[name],
        num_parameters=own.num_parameters,
        num_trainable=sum(parameter.numel for parameter in own.parameters if parameter.trainable),
        forward_flops=facts.forward_flops,
        backward_flops=facts.backward_flops,
        saved_bytes=facts.saved_bytes + (facts.input_bytes if facts.input_is_saved else 0.0),
        input_bytes=taken if graph.edges else facts.input_bytes,
        output_bytes=given if graph.edges else facts.output_bytes,
        num_operators=sum(operator.kind != "view" for operator in facts.operators),
        is_opaque=own.is_opaque,
    )


# ----------------------------------------------------------------------------------------------- the printed face


def _table(found: GraphReport) -> str:
    table = Table(box=None, pad_edge=False, header_style="", show_footer=True)
    columns = ("units", "parameters", "forward", "backward", "saved", "in", "out")
    totals = (
        str(len(found.chain)),
        _count(found.num_parameters),
        _flops(found.forward_flops),
        _flops(found.backward_flops),
        _size(found.saved_bytes),
        "",
        "",
    )
    table.add_column("class", footer="all")
    for column, total in zip(columns, totals, strict=True):
        table.add_column(column, justify="right", footer=total)
    for row in found.classes:
        table.add_row(
            row.name,
            str(row.count),
            _count(row.num_parameters),
            _flops(row.forward_flops),
            _flops(row.backward_flops),
            _size(row.saved_bytes),
            _size(row.input_bytes),
            _size(row.output_bytes),
        )
    out = StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _chain(found: GraphReport) -> str:
    """Runs of units of one class, in the order of execution."""
    runs: list[tuple[str, list[str]]] = []
    for unit, name in found.chain:
        if runs and runs[-1][0] == name:
            runs[-1][1].append(unit)
        else:
            runs.append((name, [unit]))
    return "Chain: " + " → ".join(unit_names(units) for _, units in runs)


def _skips(found: GraphReport) -> list[EdgeReport]:
    """The edges that do not just lead from one unit to the next."""
    order = {unit: i for i, (unit, _) in enumerate(found.chain)}
    return [edge for edge in found.edges if order[edge.consumers[-1]] > order[edge.producer] + 1]


def _edge(edge: EdgeReport) -> str:
    return f"{edge.producer} → {unit_names(list(edge.consumers))}: {_size(edge.num_bytes)}"


def _count(number: float) -> str:
    return _scaled(number, 1000, ("", " k", " M", " B", " T"))


def _flops(number: float) -> str:
    return _scaled(number, 1000, ("", " K", " M", " G", " T", " P", " E"), "FLOP")


def _size(num_bytes: float) -> str:
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(number: float, step: int, words: tuple[str, ...], unit: str = "") -> str:
    power = 0
    while abs(number) >= step and power < len(words) - 1:
        number, power = number / step, power + 1
    digits = f"{number:.0f}" if power == 0 else f"{number:.3g}" if number < 1000 else f"{number:.0f}"
    return f"{digits}{words[power]}{unit if power else (' ' + unit if unit else '')}"
