"""Tensor-parallel layouts of the tiny models, written by hand as Megatron-LM would lay them out."""

from __future__ import annotations

from galv.planner.plan import LocalArgument, ModuleLayout, Redistribution, SequenceMode, TensorParallelLayout


def _changes(**pairs: str) -> dict[str, Redistribution]:
    """From `name="S1>R"` to redistributions; a leading underscore in a name is dropped ("_0")."""
    return {
        name.lstrip("_"): Redistribution.model_validate(dict(zip(("source", "target"), text.split(">"), strict=True)))
        for name, text in pairs.items()
    }


def _norm(module: str, sequence: SequenceMode, names: tuple[str, ...]) -> ModuleLayout:
    """A norm in front of a tensor-parallel region: it opens the region."""
    if sequence == "none":
        return ModuleLayout(module=module, outputs=_changes(_0="R>R+"))
    return ModuleLayout(
        module=module, parameters=_changes(**dict.fromkeys(names, "R>R+")), outputs=_changes(_0="S1>R+")
    )


def llama_layouts(degree: int, sequence: SequenceMode) -> tuple[TensorParallelLayout, ...]:
    """Heads and the hidden layer are cut; the head's vocabulary is cut and gathered for the loss."""
    closing = "P>S1" if sequence == "megatron" else "P>R"
    block = [_norm(name, sequence, ("weight",)) for name in ("input_layernorm", "post_attention_layernorm")]
    block += [
        ModuleLayout(module=name, parameters=_changes(weight="S0>S0"))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    ]
    block += [
        ModuleLayout(module=name, parameters=_changes(weight="S1>S1"), outputs=_changes(_0=closing))
        for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    embedding = ModuleLayout(module="", parameters=_changes(weight="S1>S1"), outputs=_changes(_0="S2>R"))
    head = ModuleLayout(
        module="1", parameters=_changes(weight="S0>S0"), inputs=_changes(_0="R>R+"), outputs=_changes(_0="S2>R")
    )
    return _layouts(degree, sequence, embedding=(embedding,), block=tuple(block), head=(head,))


def gpt2_layouts(degree: int, sequence: SequenceMode, width: int = 32) -> tuple[TensorParallelLayout, ...]:
    """The fused projection is cut chunk by chunk; the tied embedding is cut along the hidden dim."""
    closing = "P>S1" if sequence == "megatron" else "P>R"
    block = [_norm(name, sequence, ("weight", "bias")) for name in ("ln_1", "ln_2")]
    block += [
        ModuleLayout(module="attn.c_attn", parameters=_changes(weight="S1x3>S1x3", bias="S0x3>S0x3")),
        ModuleLayout(module="mlp.c_fc", parameters=_changes(weight="S1>S1", bias="S0>S0")),
    ]
    block += [
        ModuleLayout(module=name, parameters=_changes(weight="S0>S0", bias="R>P"), outputs=_changes(_0=closing))
        for name in ("attn.c_proj", "mlp.c_proj")
    ]
    constants = (
        LocalArgument(module="attn", function="split", occurrence=0, arguments={0: width // degree}),
        LocalArgument(module="attn.c_attn", function="view", occurrence=1, arguments={2: 3 * width // degree}),
        LocalArgument(module="mlp.c_fc", function="view", occurrence=1, arguments={2: 4 * width // degree}),
    )
    embedding = ModuleLayout(module="0", parameters=_changes(weight="S1>S1"), outputs=_changes(_0="S2>R"))
    head = ModuleLayout(
        module="1", parameters=_changes(weight="S1>S1"), inputs=_changes(_0="R>S2"), outputs=_changes(_0="P>R")
    )
    layouts = _layouts(degree, sequence, embedding=(embedding,), block=tuple(block), head=(head,))
    return tuple(
        layout.model_copy(update={"local_arguments": constants}) if layout.unit_class == "block" else layout
        for layout in layouts
    )


def _layouts(
    degree: int, sequence: SequenceMode, **classes: tuple[ModuleLayout, ...]
) -> tuple[TensorParallelLayout, ...]:
    return tuple(
        TensorParallelLayout(unit_class=name, degree=degree, sequence=sequence, modules=modules)
        for name, modules in classes.items()
    )
