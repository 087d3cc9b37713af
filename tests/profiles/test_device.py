"""Device profiles: what the library holds and what a profile must say."""

from __future__ import annotations

from typing import Any

import pytest

from galv.errors import ClusterError, UnknownName, UsageError
from galv.profiles.device import DeviceProfile, device_names, library_entry, load_device, read_figures, short_dtype

REQUIRED = {"cpu", "a100-sxm-40", "a100-sxm-80", "h100-sxm-80", "h200-sxm-141"}


def figures(**changes: Any) -> dict[str, Any]:
    """The A100 profile as plain data, with changes."""
    return {**library_entry("a100-sxm-80")["device"], **changes}


def test_the_library_holds_the_promised_devices() -> None:
    """The five devices that the README names are shipped."""
    assert set(device_names()) >= REQUIRED


@pytest.mark.parametrize("name", device_names())
def test_every_shipped_profile_is_valid_and_has_its_file_name(name: str) -> None:
    """Each file is a valid profile of its own name, with a source for every figure."""
    profile = load_device(name)

    assert profile.name == name
    assert all(len(source) > 3 for source in profile.sources.values())


@pytest.mark.parametrize("name", device_names())
def test_figures_have_plausible_sizes(name: str) -> None:
    """Units are right: GiB of memory, TFLOP/s on a GPU, at least GB/s of bandwidth, microseconds of launch."""
    profile = load_device(name)

    assert 2**31 < profile.memory_bytes < 2**39
    assert profile.peak_flops["fp32"] > (1e13 if profile.kind == "cuda" else 1e9)
    assert 1e9 < profile.memory_bytes_per_second < 1e13
    assert 1e-7 < profile.launch_seconds < 1e-4


def test_newer_devices_are_better_than_older_ones() -> None:
    """H200 has what H100 has and more memory; H100 beats A100 in every rate."""
    a100, h100, h200 = (load_device(name) for name in ("a100-sxm-80", "h100-sxm-80", "h200-sxm-141"))

    assert all(h100.best_flops(dtype) > a100.best_flops(dtype) for dtype in ("bf16", "fp16", "tf32", "fp32"))
    assert h100.achieved_bytes_per_second > a100.achieved_bytes_per_second
    assert h200.peak_flops == h100.peak_flops
    assert h200.memory_bytes > h100.memory_bytes


def test_an_unknown_device_is_answered_with_the_list() -> None:
    """The message names the valid devices and guesses the one that was meant."""
    with pytest.raises(UnknownName, match=r"unknown device 'h100-sxm-8'.*'h100-sxm-80'.*a100-sxm-40"):
        load_device("h100-sxm-8")


def test_a_figure_without_a_source_is_refused() -> None:
    """A profile must say where each figure comes from."""
    sources = dict(figures()["sources"])
    del sources["matmul_half_k"]

    with pytest.raises(ClusterError, match="x: no source given for matmul_half_k"):
        read_figures(DeviceProfile, figures(sources=sources), "x")


def test_a_source_for_no_figure_is_refused() -> None:
    """A misspelled source does not pass in silence."""
    sources = {**figures()["sources"], "memory_byte": "somewhere"}

    with pytest.raises(ClusterError, match="figures that do not exist: memory_byte"):
        read_figures(DeviceProfile, figures(sources=sources), "x")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"memory_efficiency": 1.5}, "memory_efficiency"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"context_bytes": 2**40}, "context_bytes leaves no memory"),
        ({"peak_flops": {"bf16": 1e12}}, "needs at least fp32"),
        ({"matmul_efficiency": {"fp32": 0.5}}, "same dtypes"),
        ({"color": "green"}, "color"),
    ],
)
def test_contradictory_figures_are_refused(changes: dict[str, Any], message: str) -> None:
    """A figure outside its range is named, as are figures that contradict each other."""
    with pytest.raises(ClusterError, match=message):
        read_figures(DeviceProfile, figures(**changes), "x")


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16"])
def test_dtypes_may_be_spelled_as_torch_does(spelling: str) -> None:
    """A rate is found under torch's name of the dtype too."""
    profile = load_device("h100-sxm-80")

    assert short_dtype(spelling) == "bf16"
    assert profile.peak(spelling) == profile.peak_flops["bf16"]
    assert profile.best_flops(spelling) == profile.peak_flops["bf16"] * profile.matmul_efficiency["bf16"]


def test_fp32_runs_at_true_fp32_rate() -> None:
    """torch multiplies fp32 matrices without TF32 unless told otherwise."""
    profile = load_device("a100-sxm-80")

    assert profile.best_flops("float32") <= 19.5e12


def test_a_dtype_without_a_unit_is_refused_as_a_precision_but_can_be_timed() -> None:
    """V100 has no bf16: its peak is an error that says what there is, a stray operator counts as fp32."""
    profile = load_device("v100-sxm-16")

    with pytest.raises(UsageError, match="v100-sxm-16 multiplies no bf16; it has fp16, fp32"):
        profile.peak("bf16")
    assert profile.best_flops("bf16") == profile.best_flops("int64") == profile.best_flops("fp32")


def test_profiles_are_values() -> None:
    """Equal profiles are equal and hash alike, different ones differ, and none can be changed."""
    profile, copy = load_device("cpu"), DeviceProfile.model_validate(load_device("cpu").model_dump())

    assert profile == copy
    assert hash(profile) == hash(copy)
    assert profile != load_device("a100-sxm-40")
    with pytest.raises(ValueError, match="frozen"):
        profile.memory_bytes = 1  # type: ignore[misc]
