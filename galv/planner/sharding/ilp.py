"""The integer program that gives every value of a trace one layout.

Nodes i of the trace, each with choices K_i (`choices`): choice k takes input a as place in(k, a), leaves the node's
value as place out(k), and costs c(i, k) seconds, forward and backward together: work for operators, redistribution for
borders, storage for parameters. A value changes its place only in a border node, because the runtime can act only
there; every other choice is a rule by which an operator computes without communication.

    variables    x[i,k] in {0,1}        node i takes choice k                                          `_variables`
    minimize     sum x[i,k] (c(i,k) / C * 10^4 + rank(i,k) / 10^4)                                     `_objective`
                 where C is what it costs to cut nothing, and rank decides between equal costs
    subject to
    (1) one      for all i:                       sum_k x[i,k] = 1                                     `_one_choice`
    (2) flow     for all i, inputs a from j, places p:
                     sum_{k: out(k)=p} x[j,k] = sum_{k: in(k,a)=p} x[i,k]                              `_flow`
    (3) hooks    for borders i, i' of one module that runs several times, and changes q of layout:
                     sum_{k: change(k)=q} x[i,k] = sum_{k: change(k)=q} x[i',k]                        `_same_hooks`
    (4) storage  for reads i, i' of one parameter, and places p:
                     sum_{k: stored(k)=p} x[i,k] = sum_{k: stored(k)=p} x[i',k]                        `_same_storage`
    (5) use      the same by one module that runs several times, for used places                       `_same_storage`

After AutoParallel's and Alpa's intra-operator programs, with one decision a node instead of one an edge: what these
price on edges happens here in nodes of its own, the borders. Solved exactly by HiGHS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from galv.planner.highs import QuietHighs
from galv.planner.sharding.choices import Choice
from galv.planner.sharding.trace import Border, Node, OwnParameter

_SCALE = 1e4
_RANK = 1e-4


@dataclass
class _Program:
    """Columns and equality rows while they are collected."""

    cost: list[float] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def equal(self, plus: Iterable[int], minus: Iterable[int] = (), right: float = 0.0) -> None:
        """Adds sum of `plus` - sum of `minus` = `right`."""
        row: dict[int, float] = defaultdict(float)
        for column in plus:
            row[column] += 1.0
        for column in minus:
            row[column] -= 1.0
        self.rows.append(row)
        self.right.append(right)


def solve(nodes: Sequence[Node], choices: Sequence[Sequence[Choice]]) -> list[Choice] | None:
    """For each node the choice that it takes in the cheapest solution; None when there is no solution."""
    if not all(choices):
        return None
    columns, program = _variables(choices), _Program()
    _objective(program, choices)
    _one_choice(program, columns)
    _flow(program, nodes, choices, columns)
    _same_hooks(program, nodes, choices, columns)
    _same_storage(program, nodes, choices, columns)
    values = _run(program)
    if values is None:
        return None
    return [
        next(choice for choice, column in zip(options, own, strict=True) if values[column] > 0.5)
        for options, own in zip(choices, columns, strict=True)
    ]


def _variables(choices: Sequence[Sequence[Choice]]) -> list[list[int]]:
    """For each node the columns of its choices."""
    columns, count = [], 0
    for options in choices:
        columns.append(list(range(count, count + len(options))))
        count += len(options)
    return columns


def _objective(program: _Program, choices: Sequence[Sequence[Choice]]) -> None:
    scale = sum(max(choice.seconds for choice in options) for options in choices) or 1.0
    for options in choices:
        program.cost += [choice.seconds / scale * _SCALE + choice.rank * _RANK for choice in options]


def _one_choice(program: _Program, columns: list[list[int]]) -> None:
    for own in columns:
        program.equal(own, right=1.0)


def _flow(
    program: _Program, nodes: Sequence[Node], choices: Sequence[Sequence[Choice]], columns: list[list[int]]
) -> None:
    for node in nodes:
        for a, source in enumerate(node.inputs):
            made = _by(choices[source], columns[source], lambda choice: choice.output)
            taken = _by(choices[node.index], columns[node.index], _input_getter(a))
            for place in {**made, **taken}:
                program.equal(made.get(place, ()), taken.get(place, ()))


def _input_getter(a: int) -> Callable[[Choice], Hashable]:
    return lambda choice: choice.inputs[a]


def _same_hooks(
    program: _Program, nodes: Sequence[Node], choices: Sequence[Sequence[Choice]], columns: list[list[int]]
) -> None:
    for first, other in _pairs(nodes, lambda node: node.mark if isinstance(node.mark, Border) else None):
        _tie(program, choices, columns, first, other, lambda choice: choice.change)


def _same_storage(
    program: _Program, nodes: Sequence[Node], choices: Sequence[Sequence[Choice]], columns: list[list[int]]
) -> None:
    owned = [node for node in nodes if isinstance(node.mark, OwnParameter)]
    for first, other in _pairs(owned, lambda node: getattr(node.mark, "identity", None)):
        _tie(program, choices, columns, first, other, lambda choice: choice.stored)
    for first, other in _pairs(owned, lambda node: node.mark):
        _tie(program, choices, columns, first, other, lambda choice: choice.output)


def _tie(
    program: _Program,
    choices: Sequence[Sequence[Choice]],
    columns: list[list[int]],
    first: int,
    other: int,
    key: Callable[[Choice], Hashable],
) -> None:
    one, two = _by(choices[first], columns[first], key), _by(choices[other], columns[other], key)
    for value in {**one, **two}:
        if value is not None:
            program.equal(one.get(value, ()), two.get(value, ()))


def _by(options: Sequence[Choice], columns: list[int], key: Callable[[Choice], Hashable]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for choice, column in zip(options, columns, strict=True):
        groups.setdefault(key(choice), []).append(column)
    return groups


def _pairs(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> Iterator[tuple[int, int]]:
    """The first node of each group of equal keys with each other one of the group; key None is no group."""
    first: dict[Hashable, int] = {}
    for node in nodes:
        if key(node) is None:
            continue
        if first.setdefault(key(node), node.index) != node.index:
            yield first[key(node)], node.index


def _run(program: _Program) -> np.ndarray | None:
    lp, count = highspy.HighsLp(), len(program.cost)
    lp.num_col_, lp.num_row_ = count, len(program.rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(program.cost), np.zeros(count), np.ones(count)
    lp.row_lower_ = lp.row_upper_ = np.array(program.right)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * count
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row) for row in program.rows)])
    lp.a_matrix_.index_ = np.array([column for row in program.rows for column in row])
    lp.a_matrix_.value_ = np.array([value for row in program.rows for value in row.values()])
    solver = QuietHighs()
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.passModel(lp)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return np.array(solver.getSolution().col_value)
