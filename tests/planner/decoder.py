"""A made-up decoder as a ModelGraph with exact, simple facts: planner tests without tracing."""

from __future__ import annotations

from dataclasses import dataclass

from galv.planner.graph import Exclusion, ModelGraph, Operator, Parameter, Phase, UnitClass, UnitFacts, UnitRef
from galv.planner.plan import InputSpec, ModuleLayout, Redistribution, SequenceMode, TensorParallelLayout

VOCABULARY = 32000


@dataclass(frozen=True)
class DecoderFacts:
    """Facts of blocks with 12 h^2 weights, an embedding and a head, for any microbatch and tensor degree."""

    hidden: int
    seq_len: int
    num_heads: int

    def layout(self, unit_class: str, degree: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion:
        if self.num_heads % degree:
            return Exclusion(f"{self.num_heads} heads do not divide by {degree}")
        shard = Redistribution.model_validate({"source": "S0", "target": "S0"})
        modules = (ModuleLayout(module="", parameters={"weight": shard}),) if unit_class != "embedding" else ()
        return TensorParallelLayout(unit_class=unit_class, degree=degree, sequence=sequence, modules=modules)

    def facts(self, unit_class: str, layout: TensorParallelLayout | None, microbatch: int) -> UnitFacts:
        degree = layout.degree if layout else 1
        cut = degree if layout and layout.sequence == "megatron" else 1
        tokens = float(microbatch * self.seq_len)
        activation = tokens * self.hidden * 2
        if unit_class == "embedding":
            return self._facts((), activation, activation, 0.0)
        width = VOCABULARY if unit_class == "head" else 12 * self.hidden
        operators = [
            *self._product(tokens, width / degree, 1, "forward"),
            *self._product(tokens, width / degree, 2, "backward"),
        ]
        if degree > 1:
            operators += [self._gather(activation, phase) for phase in ("forward", "backward")]
        saved = 2 * tokens * VOCABULARY * 2 if unit_class == "head" else 17 * activation / cut
        return self._facts(tuple(operators), activation / cut, saved, activation / cut)

    def _product(self, tokens: float, width: float, times: int, phase: Phase) -> list[Operator]:
        shape = (1.0, tokens, width, float(self.hidden))
        product = Operator(
            "aten.mm.default",
            "matmul",
            phase,
            "",
            "bf16",
            2 * tokens * width * self.hidden,
            0.0,
            2 * tokens * width,
            shape,
        )
        return [product] * times

    def _gather(self, num_bytes: float, phase: Phase) -> Operator:
        return Operator("all_reduce", "collective", phase, "", "bf16", bytes_read=num_bytes, collective="all_reduce")

    def _facts(self, operators: tuple[Operator, ...], output: float, saved: float, given: float) -> UnitFacts:
        return UnitFacts(
            operators=operators,
            saved_bytes=saved,
            saved_selective_bytes=saved / 2,
            input_bytes=given,
            output_bytes=output,
            forward_peak_bytes=saved,
            backward_peak_bytes=2 * output,
        )


def decoder(
    *, num_layers: int = 8, hidden: int = 1024, seq_len: int = 1024, num_heads: int = 16, tied: bool = False
) -> ModelGraph:
    """A decoder with `num_layers` blocks, large or small by `hidden`."""
    table = (VOCABULARY, hidden)
    block = UnitClass("Block", (Parameter("weight", (12 * hidden, hidden)),))
    classes = {
        "embedding": UnitClass("embedding", (Parameter("weight", table),)),
        "Block": block,
        "head": UnitClass("head", (Parameter("weight", table),)),
    }
    blocks = tuple(UnitRef(f"layers.{i}", "Block", (f"layers.{i}",)) for i in range(num_layers))
    total = num_layers * 12 * hidden**2 + (1 if tied else 2) * VOCABULARY * hidden
    return ModelGraph(
        name="decoder",
        units=(UnitRef("embedding", "embedding", ("embed",)), *blocks, UnitRef("head", "head", ("head",))),
        classes=classes,
        inputs=(InputSpec(name="tokens", shape=(2, seq_len), dtype="int64", batch_dim=0, high=VOCABULARY),),
        num_samples=2,
        num_parameters=total,
        tied=(("embed.weight", "head.weight"),) if tied else (),
        fingerprint="made-up",
        source=DecoderFacts(hidden, seq_len, num_heads),
    )
