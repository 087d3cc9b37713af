"""What MODEL may be, what its inputs become, and what is said when either is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galv.errors import ModelError, UsageError
from galv.planner.capture.inputs import check_inputs, input_specs
from galv.planner.capture.source import resolve_model

Config = Callable[..., str]

FACTORY = """
import torch
from torch import nn

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.size = int(torch.ones(3).sum())

    def forward(self, x, scale=None):
        return self.layer(x)

def model():
    return nn.Linear(4, 4)

def reader():
    return Reader()

def broken():
    raise OSError("no weights here")

def number():
    return 3

def inputs(num_samples):
    return {"input": torch.zeros(num_samples, 4)}

CONSTANT = 1
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module of factories in the current folder."""
    name = f"factories_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


# ----------------------------------------------------------------------------------------------- configurations


def test_a_configuration_builds_a_model_for_training(config: Config) -> None:
    """From a file: on the meta device, float32 whatever the file says, fused attention, no cache, training mode."""
    source = resolve_model(config("llama", dtype="bfloat16"), seq_len=16)
    model = source.build()
    assert source.name == "llama" and source.seq_len == 16
    assert type(model).__name__ == "LlamaForCausalLM" and model.training
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    assert model.config._attn_implementation == "sdpa" and not model.config.use_cache  # type: ignore[union-attr]
    assert source.build() is not model


def test_a_tied_model_is_built_tied(config: Config) -> None:
    """Building keeps a tie between embedding and head."""
    model: Any = resolve_model(config("llama-tied"), seq_len=16).build()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_folder_is_named_after_itself(config: Config, tmp_path: Path) -> None:
    """A folder with a config.json is a model with the folder's name."""
    folder = tmp_path / "my-llama"
    folder.mkdir()
    Path(config("llama")).rename(folder / "config.json")
    for text in (str(folder), str(folder / "config.json")):
        assert resolve_model(text, seq_len=16).name == "my-llama"


def test_the_named_architecture_is_built(config: Config) -> None:
    """The configuration's `architectures` chooses the class."""
    path = config("llama", architectures=["LlamaForSequenceClassification"])
    assert type(resolve_model(path, seq_len=16).build()).__name__ == "LlamaForSequenceClassification"


def test_tokens_are_the_inputs_of_a_language_model(config: Config) -> None:
    """Inputs are token ids and labels, (samples, seq_len), on the meta device."""
    inputs = resolve_model(config("llama"), seq_len=16).inputs(3)
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in inputs.items()} == {
        "input_ids": ((3, 16), torch.int64, "meta"),
        "labels": ((3, 16), torch.int64, "meta"),
    }


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ("[]", "no Hugging Face configuration"),
        ('{"hidden_size": 3}', 'has no "model_type"'),
        ('{"model_type": "lama"}', "model_type 'lama' is none of the .* Did you mean .*'llama'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers rejects this llama configuration"),
        ('{"model_type": "encodec"}', "no model for 'encodec'"),
    ],
)
def test_bad_configurations_are_refused(tmp_path: Path, content: str, message: str) -> None:
    """A file that is no configuration, or of no known model, is an error that says so."""
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        resolve_model(str(path), seq_len=16)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    """A path that is not there, an empty folder, or a bare word is an error that says what MODEL may be."""
    with pytest.raises(ModelError, match="there is no file"):
        resolve_model(str(tmp_path / "absent.json"), seq_len=16)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), seq_len=16)
    with pytest.raises(ModelError, match=r"hf:NAME, or package\.module:factory"):
        resolve_model("llama", seq_len=16)


def test_the_hub_out_of_reach_is_explained() -> None:
    """Without a network, hf:NAME asks for a configuration file instead."""
    with pytest.raises(ModelError, match=r"cannot get the configuration of hf:nobody/nothing: .*its config\.json"):
        resolve_model("hf:nobody/nothing", seq_len=16)


def test_transformers_missing_says_how_to_install_it(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers, a configuration file asks for the extra."""
    path = config("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'galv\[transformers\]'"):
        resolve_model(path, seq_len=16)


@pytest.mark.parametrize("seq_len, message", [(None, r"at most 64"), (65, "65 is beyond the model's 64 positions")])
def test_the_sequence_must_fit_the_model(config: Config, seq_len: int | None, message: str) -> None:
    """A language model needs a sequence length, and none beyond its positions."""
    with pytest.raises(UsageError, match=message):
        resolve_model(config("gpt2"), seq_len=seq_len)


# ----------------------------------------------------------------------------------------------- factories, objects


def test_a_factory_is_imported_from_the_current_folder(factories: str) -> None:
    """`module:factory` with `module:function` for its inputs gives a model on the meta device and its inputs."""
    source = resolve_model(f"{factories}:model", f"{factories}:inputs")
    assert source.source == f"{factories}:model" and source.inputs_source == f"{factories}:inputs"
    assert {p.device.type for p in source.build().parameters()} == {"meta"}
    assert source.inputs(5)["input"].shape == (5, 4)


def test_a_factory_that_reads_values_is_built_off_the_meta_device(factories: str) -> None:
    """A factory that cannot run on the meta device runs where it would by itself."""
    model: Any = resolve_model(f"{factories}:reader", torch.zeros(2, 4)).build()
    assert model.size == 3


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent", "has no absent"),
        ("CONSTANT", "is int, not a function"),
        ("broken", "failed: OSError: no weights here"),
        ("number", "returned int, not an nn.Module"),
    ],
)
def test_bad_factories_are_refused(factories: str, name: str, message: str) -> None:
    """A factory that is not there, is none, fails or makes no module is an error that says so."""
    with pytest.raises(ModelError, match=message):
        resolve_model(f"{factories}:{name}", torch.zeros(2, 4)).build()


def test_a_module_that_is_not_there_is_named() -> None:
    """An unimportable package is named, with where it was looked for."""
    with pytest.raises(ModelError, match=r"cannot import no_such_package: .*looked in"):
        resolve_model("no_such_package:model")


def test_objects_and_functions_are_models_too() -> None:
    """A module is given back as it is; a function builds a new one each time."""
    model = nn.Linear(4, 4)
    assert resolve_model(model, torch.zeros(2, 4)).build() is model
    source = resolve_model(lambda: nn.Linear(4, 4), torch.zeros(2, 4))
    assert source.build() is not source.build()
    with pytest.raises(ModelError, match="not int"):
        resolve_model(3)  # type: ignore[arg-type]


def test_a_transformers_model_needs_no_inputs(config: Config) -> None:
    """A language model built by its owner takes tokens like one from a file."""
    model = resolve_model(config("gpt2"), seq_len=16).build()
    assert list(resolve_model(model, seq_len=8).inputs(1)) == ["input_ids", "labels"]


def test_other_models_need_inputs() -> None:
    """A plain module without example inputs is refused, with what may be given."""
    with pytest.raises(UsageError, match=r"example inputs are needed for Linear.*--inputs"):
        resolve_model(nn.Linear(4, 4))


# ----------------------------------------------------------------------------------------------- inputs


class Two(nn.Module):
    """Takes two tensors and an option."""

    def forward(self, x: Tensor, y: Tensor, flag: bool = False) -> Tensor:
        return x + y


@pytest.mark.parametrize(
    "example",
    [
        (torch.zeros(6, 3), torch.ones(6, 3)),
        {"x": torch.zeros(6, 3), "y": torch.ones(6, 3)},
        lambda n: (torch.zeros(n, 3), torch.ones(n, 3)),
        lambda n: {"x": torch.zeros(n, 3), "y": torch.ones(n, 3)},
    ],
    ids=["tuple", "dict", "tuple function", "dict function"],
)
def test_examples_become_inputs_by_name(example: Any) -> None:
    """However an example is given, it gives tensors by keyword for more and for fewer samples than it has."""
    source = resolve_model(Two(), example)
    for num_samples in (2, 9):
        assert {k: tuple(t.shape) for k, t in source.inputs(num_samples).items()} == {
            "x": (num_samples, 3),
            "y": (num_samples, 3),
        }


def test_inputs_are_described_as_data() -> None:
    """The dim that counts samples is found, the rest is constant; integers are bounded by their largest value."""

    def make(num_samples: int) -> dict[str, Tensor]:
        tokens = torch.arange(5 * num_samples).reshape(5, num_samples) % 7
        return {"tokens": tokens, "table": torch.zeros(3, 2), "mask": torch.ones(num_samples, 5, dtype=torch.bool)}

    specs = {spec.name: (spec.shape, spec.dtype, spec.batch_dim, spec.high) for spec in input_specs(make, 2)}
    assert specs == {
        "tokens": ((5, 2), "int64", 1, 7),
        "table": ((3, 2), "float32", None, None),
        "mask": ((2, 5), "bool", 0, None),
    }


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda n: {"x": torch.zeros(3)}, "same shape for 2 and 4 samples"),
        (lambda n: {"x": torch.zeros(n, n)}, "exactly one dim should double"),
        (lambda n: {"x": torch.zeros(n + 1)}, "exactly one dim should double"),
    ],
    ids=["constant", "two dims", "no doubling"],
)
def test_inputs_that_do_not_scale_are_refused(make: Any, message: str) -> None:
    """Inputs in which no dim, or not just one, counts the samples are an error."""
    with pytest.raises(ModelError, match=message):
        input_specs(make, 2)


@pytest.mark.parametrize(
    "example, message",
    [
        (3, "not int"),
        ({"x": 3}, "x is int"),
        ({}, "there are none"),
        ((torch.zeros(2),) * 4, r"4 example inputs for Two, whose forward takes 3 by name \(x, y, flag\)"),
        (torch.tensor(1.0), "is a scalar"),
    ],
)
def test_bad_examples_are_refused(example: Any, message: str) -> None:
    """Examples that are no tensors, or too many, are an error that says what was given."""
    with pytest.raises(ModelError, match=message):
        resolve_model(Two(), example).inputs(2)


def test_a_forward_that_needs_other_arguments_is_explained() -> None:
    """Inputs that the forward does not take, or that it lacks, are named beside its arguments."""
    with pytest.raises(ModelError, match=r"does not take z and needs y: .*arguments are x, y, flag"):
        check_inputs(Two(), {"x": torch.zeros(2), "z": torch.zeros(2)})


def test_labels_of_the_configuration_stay_text(config: Config) -> None:
    """A source made from text remembers that text, for a plan that is run elsewhere."""
    path = config("llama")
    assert resolve_model(path, seq_len=16).source == path
    assert json.loads(Path(path).read_text(encoding="utf-8"))["model_type"] == "llama"
