"""A made-up decoder as a ModelGraph with exact, simple facts: planner tests without tracing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from galv.planner.graph import (
    Axis,
    CollectiveKind,
    Exclusion,
    ModelGraph,
    Operator,
    Parameter,
    Phase,
    UnitClass,
    UnitFacts,
    UnitRef,
)
from galv.planner.plan import (
    ContextMode,
    ExpertLayout,
    ExpertsModule,
    InputSpec,
    Layout,
    ModuleLayout,
    Redistribution,
    SequenceLayout,
    SequenceMode,
    TensorParallelLayout,
)

VOCABULARY = 32000


@dataclass(frozen=True)
class DecoderFacts:
    """Facts of blocks with 12 h^2 weights, an embedding and a head, for any microbatch and degrees.

    With `attention`, blocks have a fused attention kernel too; with `experts`, their weights are those of experts, of
    which each token takes one.
    """

    hidden: int
    seq_len: int
    num_heads: int
    attention: bool = False
    experts: int = 0

    def layout(self, unit_class: str, degree: int, sequence: SequenceMode) -> TensorParallelLayout | Exclusion:
        if self.num_heads % degree:
            return Exclusion(f"{self.num_heads} heads do not divide by {degree}")
        shard = Redistribution.model_validate({"source": "S0", "target": "S0"})
        modules = (ModuleLayout(module="", parameters={"weight": shard}),) if unit_class != "embedding" else ()
        return TensorParallelLayout(unit_class=unit_class, degree=degree, sequence=sequence, modules=modules)

    def sequence_layout(
        self, unit_class: str, mode: ContextMode, degree: int, *, tp: int = 1
    ) -> SequenceLayout | Exclusion:
        if unit_class != "Block" or self.seq_len % (2 * degree):
            return Exclusion(f"{self.seq_len} tokens do not divide by {degree}")
        if mode == "ulysses" and self.num_heads % (tp * degree):
            return Exclusion(f"{self.num_heads} heads do not divide by {tp * degree}")
        cut = {"0": (Layout(kind="S", dim=1),)}
        return SequenceLayout(
            unit_class=unit_class, mode=mode, degree=degree, arguments=cut, activation="0", output_dim=1
        )

    def expert_layout(self, unit_class: str) -> ExpertLayout | Exclusion:
        if unit_class != "Block" or not self.experts:
            return Exclusion(f"{unit_class} has no experts")
        module = ExpertsModule(module="", parameters=("weight",), tokens="0", choices="1", weights="2")
        return ExpertLayout(unit_class=unit_class, num_experts=self.experts, modules=(module,))

    def expert_exclusion(self, unit_class: str, degree: int, *, tp: int = 1) -> Exclusion | None:
        return Exclusion(f"{self.experts} experts") if self.experts % (degree * tp) else None

    def facts(
        self,
        unit_class: str,
        layout: TensorParallelLayout | None,
        microbatch: int,
        *,
        sequence: SequenceLayout | None = None,
        ep: int = 1,
    ) -> UnitFacts:
        degree = layout.degree if layout else 1
        cut = degree if layout and layout.sequence == "megatron" else 1
        cp = sequence.degree if sequence else 1
        tokens = float(microbatch * self.seq_len) / cp
        activation = tokens * self.hidden * 2
        if unit_class == "embedding":
            return self._facts((), activation, activation, 0.0)
        width = VOCABULARY if unit_class == "head" else 12 * self.hidden
        operators = [
            *self._product(tokens, width / degree, 1, "forward"),
            *self._product(tokens, width / degree, 2, "backward"),
        ]
        for phase in ("forward", "backward"):
            if self.attention and unit_class == "Block":
                operators.append(self._attention(microbatch, degree * cp, phase))
            if degree > 1:
                operators.append(self._collective("all_reduce", activation, phase, "tensor"))
            if sequence:
                operators += self._over_context(sequence, activation / degree, phase)
            if ep > 1:
                operators += [self._collective("all_to_all", activation, phase, "expert")] * 2
        saved = 2 * tokens * VOCABULARY * 2 if unit_class == "head" else 17 * activation / cut
        return self._facts(tuple(operators), activation / cut, saved, activation / cut)

    def _attention(self, microbatch: int, share: int, phase: Phase) -> Operator:
        shape = (float(microbatch), self.num_heads / share, float(self.seq_len), float(self.seq_len), 128.0, True)
        flops = (4 if phase == "forward" else 8) * microbatch * self.seq_len**2 / 2 * self.num_heads * 128 / share
        return Operator("aten.flash", "attention", phase, "", "bf16", flops, attention=shape)

    def _over_context(self, sequence: SequenceLayout, activation: float, phase: Phase) -> list[Operator]:
        if sequence.mode == "ulysses":
            return [self._collective("all_to_all", activation, phase, "context")] * 4
        return [self._collective("p2p", 2 * activation, phase, "context")] * (sequence.degree - 1)

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
        later = [replace(product, is_weight_gradient=True)] if phase == "backward" else []
        return [product] * (times - len(later)) + later

    def _collective(self, kind: CollectiveKind, num_bytes: float, phase: Phase, axis: Axis) -> Operator:
        return Operator(kind, "collective", phase, "", "bf16", bytes_read=num_bytes, collective=kind, axis=axis)

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
    *,
    num_layers: int = 8,
    hidden: int = 1024,
    seq_len: int = 1024,
    num_heads: int = 16,
    tied: bool = False,
    attention: bool = False,
    experts: int = 0,
) -> ModelGraph:
    """A decoder with `num_layers` blocks, large or small by `hidden`."""
    table = (VOCABULARY, hidden)
    block = Parameter("weight", (12 * hidden, hidden))
    if experts:
        block = Parameter("weight", (experts, 12 * hidden, hidden), is_expert=True)
    classes = {
        "embedding": UnitClass("embedding", (Parameter("weight", table),)),
        "Block": UnitClass("Block", (block,), experts=experts),
        "head": UnitClass("head", (Parameter("weight", table),)),
    }
    blocks = tuple(UnitRef(f"layers.{i}", "Block", (f"layers.{i}",)) for i in range(num_layers))
    total = num_layers * block.numel + (1 if tied else 2) * VOCABULARY * hidden
    return ModelGraph(
        name="decoder",
        units=(UnitRef("embedding", "embedding", ("embed",)), *blocks, UnitRef("head", "head", ("head",))),
        classes=classes,
        inputs=(InputSpec(name="tokens", shape=(2, seq_len), dtype="int64", batch_dim=0, high=VOCABULARY),),
        num_samples=2,
        num_parameters=total,
        tied=(("embed.weight", "head.weight"),) if tied else (),
        fingerprint="made-up",
        source=DecoderFacts(hidden, seq_len, num_heads, attention, experts),
    )
