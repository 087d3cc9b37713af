"""How tensors lie on the tensor and context axes: the layouts of a plan, and what changes them at module borders.

Data only; `galv.localize` says what it means when a module runs.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

SequenceMode = Literal["none", "megatron", "ulysses", "ring"]
ContextMode = Literal["ulysses", "ring"]
"""The sequence modes that have an axis of their own."""


class Frozen(BaseModel):
    """A value: immutable, comparable, closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


_LAYOUT = re.compile(r"R\+?|P|S(\d+)(x[1-9]\d*)?")


class Layout(Frozen):
    """How one tensor lies on the tensor axis, in a plan's short spelling.

    `R`    the same on every rank, and so is its gradient
    `R+`   the same on every rank, while each rank holds only a *summand* of its gradient (inside a tensor-parallel
           region, where every rank uses the value for its own share of the work)
    `S1`   cut along tensor dim 1, the parts in rank order
    `S1x3` cut along dim 1 chunk by chunk: the dim is made of 3 equal chunks (a fused q|k|v projection) and each rank
           holds its part of every chunk
    `P`    each rank holds a summand; the gradient is the same on every rank
    """

    kind: Literal["R", "R+", "S", "P"]
    dim: int | None = Field(None, ge=0, lt=64)
    chunks: int = Field(1, ge=1, le=2**20)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout spelled by `text`. Raises ValueError for any other text."""
        match = _LAYOUT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no layout; spell it R, R+, P, S<dim> or S<dim>x<chunks>")
        if not text.startswith("S"):
            return cls(kind=text)
        return cls(kind="S", dim=int(match[1]), chunks=int((match[2] or "x1")[1:]))

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" + (f"x{self.chunks}" if self.chunks > 1 else "")


def _read_layout(value: Any) -> Any:
    return Layout.parse(value) if isinstance(value, str) else value


TextLayout = Annotated[Layout, BeforeValidator(_read_layout), PlainSerializer(str, return_type=str)]


class Redistribution(Frozen):
    """A change of layout at the border of a module: `source` as the value arrives, `target` as it leaves.

    The pair fixes the collectives of both directions: S→R+ gathers forward and reduce-scatters backward, R→R+ does
    nothing forward and all-reduces backward, P→R all-reduces forward, P→S reduce-scatters forward and gathers
    backward, S→R gathers forward and cuts backward, R→S cuts forward and gathers backward.
    """

    source: TextLayout
    target: TextLayout


class ModuleLayout(Frozen):
    """What the runtime applies to one module of a unit on the tensor axis."""

    module: str
    """Name within the unit, see `absolute_name`."""
    parameters: dict[str, Redistribution] = {}
    """Own parameters (no dots): `source` as stored (R or S), `target` as used: S→S a shard, R→R+ a replicated weight
    of which each rank sees its share of the gradient, R→P a bias that is added to a partial sum."""
    inputs: dict[str, Redistribution] = {}
    """By position ("0") or keyword name."""
    outputs: dict[str, Redistribution] = {}
    """By position in a tuple; "0" also for a single tensor. `source` is how the local computation leaves it."""


def absolute_name(modules: tuple[str, ...], relative: str) -> str:
    """The fully qualified name of `relative`, a module or parameter named within a unit that owns `modules`.

    A unit with one module names things relative to it ("self_attn.q_proj", "" for the module itself); a unit with
    several puts the module's position first ("1.weight", "0" for the first module itself). "/x" is x, absolute already.
    """
    if relative.startswith("/"):
        return relative[1:]
    if len(modules) == 1:
        return ".".join(part for part in (modules[0], relative) if part)
    index, _, rest = relative.partition(".")
    return ".".join(part for part in (modules[int(index)], rest) if part)


class LocalArgument(Frozen):
    """A size written as a constant in the user's forward that must shrink on a shard (`x.split(768)` → `x.split(384)`).

    `function` is the tensor function's name (`split`, `view`, `reshape`), `occurrence` counts its calls within one
    forward of `module` (calls inside submodules not counted) from 0, and `arguments` maps positions among the call's
    integer arguments (positional, then keyword, sequences and slices flattened, the tensors left out) to their local
    values.
    """

    module: str
    function: str
    occurrence: int = Field(ge=0)
    arguments: dict[int, int]


class TensorParallelLayout(Frozen):
    """The placements of one unit class at one tensor-parallel degree and sequence mode.

    Every module computes on local tensors; tensors change layout only at module borders. A unit takes and gives its
    activations as R, or as S1 when it is a repeated block and `sequence` is `megatron`; where neighbours differ, the
    runtime redistributes between them. Inputs other than the activation (masks, position embeddings) arrive as R.
    """

    unit_class: str
    degree: int = Field(ge=1, le=2**20)
    sequence: SequenceMode
    modules: tuple[ModuleLayout, ...]
    local_arguments: tuple[LocalArgument, ...] = ()

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """How each parameter is stored, by its name within the unit."""
        return {
            f"{module.module}.{name}".lstrip("."): change.source
            for module in self.modules
            for name, change in module.parameters.items()
        }


class SequenceCut(Frozen):
    """How a tensor lies on a context axis of `degree` ranks: cut along `dim`, see `SequenceLayout.balanced`."""

    degree: int
    dim: int
    balanced: bool


class SequenceLayout(Frozen):
    """How one class of repeated blocks is cut along the sequence over a context axis of `degree` ranks.

    In front of a block its arguments are brought to these layouts, on the context axis; within, every rank computes on
    its part of the sequence with whole parameters, of whose gradients it sees a summand. Only attention communicates.
    """

    unit_class: str
    mode: ContextMode
    """`ulysses`: attention gets its heads cut in place of the sequence, by all-to-all (arXiv 2309.14509). `ring`: keys
    and values go round the ranks (arXiv 2310.01889)."""
    degree: int = Field(ge=2, le=2**20)
    balanced: bool = False
    """Whether rank i of n holds the chunks i and 2n-1-i of 2n, so that all have the same share of causal attention
    (arXiv 2311.09431); else it holds chunk i of n."""
    arguments: dict[str, tuple[TextLayout, ...]]
    """For each argument of the block that holds tensors, by position or keyword, the layouts of these in reading order:
    S<dim>, R, or R+ for one that is whole while its gradient is a summand."""
    activation: str
    """The argument, one of these, that is the output of the unit before, or is made of it."""
    output_dim: int = Field(ge=0, lt=64)
    """The dim of the block's activation, the first tensor that it returns, that is the sequence."""
    attention: tuple[Literal["exchanged", "local"], ...] = ()
    """The block's calls of `scaled_dot_product_attention`, in order: those whose keys are the sequence itself, and
    those whose keys every rank has whole, which need nothing."""

    @model_validator(mode="after")
    def _consistent(self) -> SequenceLayout:
        layouts = self.arguments.get(self.activation, ())
        if layouts != (Layout(kind="S", dim=self.output_dim),):
            raise ValueError(f"the activation {self.activation!r} must be S{self.output_dim}, as the block returns it")
        return self

    def cut_along(self, dim: int) -> SequenceCut:
        """How a tensor lies whose dim `dim` is the sequence."""
        return SequenceCut(degree=self.degree, dim=dim, balanced=self.balanced)

    @property
    def activation_cut(self) -> SequenceCut:
        """How the block takes and gives its activation."""
        return self.cut_along(self.output_dim)


class ExpertsModule(Frozen):
    """One module that holds experts and computes them: called with tokens, the experts chosen for each, and weights.

    Tokens are (tokens, width), the other two (tokens, choices); what it returns is like the tokens: for each of them
    the sum over its choices. So any part of the (token, choice) pairs can be computed elsewhere.
    """

    module: str
    """Name within the unit, see `absolute_name`."""
    parameters: tuple[str, ...]
    """Names within the module; the first dim of each counts experts."""
    tokens: str
    """The argument's position ("0") or keyword; so `choices` and `weights`."""
    choices: str
    weights: str
    counts: tuple[str, ...] = ()
    """Attributes of the module that hold the number of experts; on a part of the experts, the part's number."""


class ExpertLayout(Frozen):
    """Where the experts of one unit class are, and how many: all that it takes to share them out over ranks."""

    unit_class: str
    num_experts: int = Field(ge=2, le=2**20)
    """Of each of the modules."""
    modules: tuple[ExpertsModule, ...] = Field(min_length=1)
