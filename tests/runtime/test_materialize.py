"""Where a parallel model's weights come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from galv.errors import ModelError
from galv.planner.plan import Plan
from galv.runtime.materialize import initialize
from galv.runtime.parallelize import parallelize
from tests.distributed_pool import Pool
from tests.plans import MODELS, hand_made_plan, random_batch, tiny_llama
from tests.runtime.test_parallelize import layouts_for, strategy
from tests.runtime.training import parallelize_tiny


def on_meta(name: str) -> nn.Module:
    """The tiny model without weights."""
    with torch.device("meta"):
        return MODELS[name]()


def weights_of(name: str, plan: Plan, seed: int) -> dict[str, Tensor]:
    """The full weights that a plan starts from, and that the loss can be computed."""
    module = parallelize_tiny(on_meta(name), plan, seed=seed)
    loss = module.train_step(module.shard_batch(random_batch(plan.training.global_batch, 0)))
    assert loss.isfinite()
    return module.full_state_dict(all_ranks=True)


PLANS: dict[str, dict[str, Any]] = {
    "one": {"strategies": strategy()},
    "ddp": {"strategies": strategy(dp=2)},
    "tp2 x zero3": {"strategies": strategy(tp=2, dp=2, zero=3)},
    "pp2": {"strategies": strategy(), "stages": (2, 3), "schedule": "1f1b"},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_plan_starts_from_one_devices_weights(pool: Pool, name: str, plan: str) -> None:
    """A meta model gets the weights of `initialize` with the same seed, bit for bit, on every rank."""
    arguments = PLANS[plan]
    made = hand_made_plan(MODELS[name](), layouts=layouts_for(name, arguments["strategies"]), **arguments)
    expected = initialize(on_meta(name), seed=3).state_dict()

    for weights in pool.run(weights_of, made.num_devices, name, made, 3):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_initial_weights_follow_the_models_rules() -> None:
    """Weights have the spread that the model asks for, tied ones stay tied, and the seed matters."""
    model = initialize(on_meta("gpt2"), seed=3)
    again, other = initialize(on_meta("gpt2"), seed=3), initialize(on_meta("gpt2"), seed=4)

    residual = model.get_parameter("transformer.h.0.mlp.c_proj.weight")
    assert float(residual.detach().std()) == pytest.approx(0.02 / (2 * 3) ** 0.5, rel=0.1)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    assert torch.equal(residual, again.get_parameter("transformer.h.0.mlp.c_proj.weight"))
    assert not torch.equal(residual, other.get_parameter("transformer.h.0.mlp.c_proj.weight"))


def test_buffers_are_derived_again() -> None:
    """Rotary tables of a meta model have the values that they have on a real device."""
    real, filled = MODELS["llama"](), initialize(on_meta("llama"))
    expected = dict(real.named_buffers())

    assert expected
    assert {name: torch.equal(b, expected[name]) for name, b in filled.named_buffers()} == dict.fromkeys(expected, True)


# ----------------------------------------------------------------------------------------------- plain modules


class Plain(nn.Module):
    """Submodules that know how to reset themselves, beside something that does not."""

    def __init__(self, extra: Callable[[nn.Module], None] = lambda module: None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        extra(self)


def _own_parameter(module: nn.Module) -> None:
    module.register_parameter("scale", nn.Parameter(torch.ones(4)))


def _float_buffer(module: nn.Module) -> None:
    module.register_buffer("table", torch.ones(4))


def _integer_buffer(module: nn.Module) -> None:
    module.register_buffer("positions", torch.arange(4))


def test_plain_modules_reset_themselves() -> None:
    """Linear layers and norms are drawn by their own `reset_parameters`, integer buffers included."""
    with torch.device("meta"):
        model = Plain()
    state = initialize(model).state_dict()

    assert all(tensor.device.type == "cpu" and tensor.isfinite().all() for tensor in state.values())
    assert state["norm.running_var"].eq(1).all()
    assert state["norm.num_batches_tracked"] == 0
    assert not torch.equal(state["blocks.0.weight"], state["blocks.1.weight"])


@pytest.mark.parametrize(
    ("extra", "name"), [(_own_parameter, "scale"), (_float_buffer, "table"), (_integer_buffer, "positions")]
)
def test_what_has_no_rule_is_named(extra: Callable[[nn.Module], None], name: str) -> None:
    """A tensor that nothing initializes is an error that names it, never garbage."""
    with torch.device("meta"):
        model = Plain(extra)
    with pytest.raises(ModelError, match=f"no rule that initializes '{name}'"):
        initialize(model)


def test_real_tensors_of_a_half_real_model_stay() -> None:
    """Only meta tensors are drawn."""
    with torch.device("meta"):
        model = Plain()
    model.register_buffer("table", torch.full((4,), 7.0))
    initialize(model)
    assert model.get_buffer("table").eq(7).all()


# ----------------------------------------------------------------------------------------------- given weights


def load(case: str) -> dict[str, Tensor] | str:
    """The full weights after parallelizing a meta Llama with weights given, or the error."""
    model = on_meta("llama")
    weights = {name: tensor + 1 for name, tensor in MODELS["llama"]().state_dict().items()}
    if case == "missing":
        del weights["lm_head.weight"]
    if case == "misshapen":
        weights["lm_head.weight"] = weights["lm_head.weight"][1:]
    plan = hand_made_plan(model, strategy(dp=2, zero=3))
    try:
        module = parallelize(model, plan, weights=weights.get if case == "function" else weights)
    except ModelError as error:
        return str(error)
    return module.full_state_dict()


@pytest.mark.parametrize("case", ["mapping", "function"])
def test_weights_are_loaded(pool: Pool, case: str) -> None:
    """Full tensors given by name end up in the shards."""
    expected = {name: tensor + 1 for name, tensor in MODELS["llama"]().state_dict().items()}
    torch.testing.assert_close(pool.run(load, 2, case)[0], expected)


@pytest.mark.parametrize(
    ("case", "message"), [("missing", "have no 'lm_head.weight'"), ("misshapen", r"shape \(63, 32\), not \(64, 32\)")]
)
def test_wrong_weights_are_named(pool: Pool, case: str, message: str) -> None:
    """A missing or misshapen tensor is an error that names it."""
    for error in pool.run(load, 2, case):
        with pytest.raises(ModelError, match=message):
            raise ModelError(error)


def diverged() -> dict[str, Tensor]:
    """The full weights when each rank brings other ones."""
    model = MODELS["llama"]()
    model.register_buffer("flags", torch.tensor([dist.get_rank() == 0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    module = parallelize(model, hand_made_plan(model, strategy(dp=2, zero=2)))
    return module.full_state_dict(all_ranks=True)


def test_rank_zeros_weights_count(pool: Pool) -> None:
    """Models that differ between ranks become rank 0's."""
    expected = {**MODELS["llama"]().state_dict(), "flags": torch.tensor([True])}
    for weights in pool.run(diverged, 2):
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def narrow() -> list[tuple[torch.dtype, float]]:
    """Type and loss of a bf16 model under a plan for fp32."""
    model = MODELS["llama"]().to(torch.bfloat16)
    module = parallelize(model, hand_made_plan(model, strategy(dp=2, zero=1)))
    loss = module.train_step(module.shard_batch(random_batch(8, 0)))
    return [(parameter.dtype, float(loss)) for parameter in module.parameters()]


def test_master_weights_are_single_precision(pool: Pool) -> None:
    """What the optimizer updates is float32, also when the model came in bf16."""
    for dtype, loss in pool.run(narrow, 2)[0]:
        assert dtype == torch.float32
        assert loss == pytest.approx(4.16, abs=0.1)


# ----------------------------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """Watches the bytes of real tensors made inside it that are alive, and the most that were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            # A DTensor has no storage of its own; what it wraps is seen by itself.
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result


def peak_bytes(num_blocks: int) -> tuple[int, int]:
    """The most bytes alive while a meta model is sharded over the world, and after."""
    with torch.device("meta"):
        model = tiny_llama(num_blocks)
    plan = hand_made_plan(model, strategy(dp=dist.get_world_size(), zero=3))
    with LiveBytes() as watched:
        module = parallelize(model, plan)
    assert not any(parameter.is_meta for parameter in module.parameters())
    return watched.peak, watched.live


def test_no_rank_holds_the_whole(pool: Pool) -> None:
    """While a model of 12 blocks is made, a rank never holds more than its shards and one unit at work."""
    model = tiny_llama(12)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    unit = max(sum(p.numel() * 4 for p in m.parameters()) for m in model.get_submodule("model.layers").children())

    for peak, after in pool.run(peak_bytes, 4, 12):
        assert whole / 4 <= after <= whole / 4 + unit
        assert peak <= after + 2.5 * unit
