"""Clusters: how CLUSTER is spelled, in short and as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from galv.errors import ClusterError, UnknownName
from galv.profiles.cluster import MAX_DEVICES, default_link, load_cluster
from galv.profiles.device import device_names, load_device
from galv.profiles.link import LinkProfile

INLINE = """
device:
  name: mine
  like: h100-sxm-80
  memory_gib: 24
  tflops: {bf16: 100, fp32: 10}
  memory_gigabytes_per_second: 500
devices_per_node: 2
num_nodes: 3
links:
  intra_node: {gigabytes_per_second: 31, latency_microseconds: 8, base_microseconds: 50}
  inter_node: {gigabytes_per_second: 12.5, devices_per_link: 2, efficiency: 0.425}
"""


def written(folder: Path, text: str) -> str:
    """The path of a cluster file holding `text`."""
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("device", device_names())
def test_every_device_comes_in_a_node(device: str) -> None:
    """The short form works for each shipped device, with sourced links."""
    cluster = load_cluster(f"{device}:8x4")

    assert cluster.spec == f"{device}:8x4"
    assert (cluster.device.name, cluster.devices_per_node, cluster.num_nodes) == (device, 8, 4)
    assert cluster.num_devices == 32
    assert 1e8 < cluster.inter_node.bytes_per_second <= cluster.intra_node.bytes_per_second < 1e12


@pytest.mark.parametrize(
    "spec", ["", "h100-sxm-80", "h100-sxm-80:8", "h100-sxm-80:8x", "h100-sxm-80:8x-1", "a:b:8x1x2"]
)
def test_a_malformed_spec_is_told_the_form(spec: str) -> None:
    """Anything else than the two forms is answered with the forms."""
    with pytest.raises(ClusterError, match="DEVICE:DEVICES_PER_NODExNODES"):
        load_cluster(spec)


@pytest.mark.parametrize("spec", ["h100-sxm-80:0x4", "h100-sxm-80:8x0"])
def test_an_empty_cluster_is_refused(spec: str) -> None:
    """A cluster has at least one device."""
    with pytest.raises(ClusterError, match="at least 1 device per node and 1 node"):
        load_cluster(spec)


@pytest.mark.parametrize("spec", ["cpu:1048577x1", "cpu:1024x1025", "cpu:99999999999999999x1", f"cpu:1x{'9' * 400}"])
def test_a_cluster_beyond_the_bound_is_refused(spec: str) -> None:
    """More devices than any cluster has are named with the bound, at once."""
    with pytest.raises(ClusterError, match="at most 1048576 devices"):
        load_cluster(spec)


def test_the_largest_cluster_is_one() -> None:
    """The bound itself can be meant."""
    assert load_cluster("cpu:1024x1024").num_devices == MAX_DEVICES


def test_an_unknown_device_lists_the_known_ones() -> None:
    """The message of an unknown device names those that exist."""
    with pytest.raises(UnknownName, match="a100-sxm-40, a100-sxm-80"):
        load_cluster("a100:8x4")


def test_a_file_without_links_is_the_short_form(tmp_path: Path) -> None:
    """A file that says no more than the short form describes the same cluster."""
    cluster = load_cluster(written(tmp_path, "{device: a100-sxm-40, devices_per_node: 8, num_nodes: 2}"))
    short = load_cluster("a100-sxm-40:8x2")

    assert cluster.model_copy(update={"spec": short.spec}) == short


def test_an_inline_device_takes_the_rest_from_its_model(tmp_path: Path) -> None:
    """Given figures are used in their units, and all others are those of `like`."""
    cluster = load_cluster(written(tmp_path, INLINE))
    device, like = cluster.device, load_device("h100-sxm-80")

    assert device.name == "mine"
    assert device.memory_bytes == 24 * 2**30
    assert device.peak_flops == {"bf16": 100e12, "fp32": 10e12}
    assert device.matmul_efficiency == {dtype: like.matmul_efficiency[dtype] for dtype in ("bf16", "fp32")}
    assert device.memory_bytes_per_second == 500e9
    assert device.launch_seconds == like.launch_seconds
    assert device.sources["launch_seconds"] == "as h100-sxm-80"
    assert device.sources["peak_flops"].startswith("given in")


def test_links_of_a_file_override_the_usual_ones(tmp_path: Path) -> None:
    """Each figure of a link that a file gives is taken, in bytes and seconds; the rest stays."""
    cluster = load_cluster(written(tmp_path, INLINE))
    usual = default_link("h100-sxm-80", "intra_node")

    assert cluster.intra_node.bytes_per_second == 31e9
    assert cluster.intra_node.latency_seconds == pytest.approx(8e-6)
    assert cluster.intra_node.base_seconds == pytest.approx(50e-6)
    assert cluster.intra_node.efficiency == usual.efficiency
    assert cluster.intra_node.sources["bytes_per_second"].startswith("given in")
    assert cluster.intra_node.sources["efficiency"] == usual.sources["efficiency"]


def test_an_efficiency_given_alone_moves_the_gathers_too(tmp_path: Path) -> None:
    """Halving the efficiency halves what all-gathers reach; two devices share one card."""
    cluster = load_cluster(written(tmp_path, INLINE))
    usual = default_link("h100-sxm-80", "inter_node")

    assert cluster.inter_node.gather_efficiency == pytest.approx(0.425 * usual.gather_efficiency / usual.efficiency)
    assert cluster.links_per_node == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a cluster file has the keys"),
        ("[1, 2]", "a cluster file has the keys"),
        ("device: [", "is not YAML"),
        ("{device: a100-sxm-40, devices_per_node: 8}", "num_nodes: Field required"),
        ("{device: a100-sxm-40, devices_per_node: 0, num_nodes: 1}", "devices_per_node: .*greater than or equal to 1"),
        ("{device: a100-sxm-40, devices_per_node: 8, num_nodes: 1, nodes: 2}", "nodes: Extra inputs"),
        ("{device: [x], devices_per_node: 8, num_nodes: 1}", "device: Input should be a valid string"),
        ("{device: {name: x}, devices_per_node: 8, num_nodes: 1}", "device: memory_gib: Field required"),
        (INLINE.replace("bf16: 100", "int7: 1"), "device: tflops.int7"),
        (INLINE.replace(", fp32: 10", ""), "tflops needs at least fp32; it has bf16"),
        (INLINE.replace("devices_per_link: 2", "devices_per_link: 0"), "links.inter_node.devices_per_link"),
        (INLINE.replace("24", "0.001"), "device.memory_gib: 0.001 leaves nothing: h100-sxm-80 needs 2.00 GiB"),
        (INLINE.replace("24", ".inf"), "device: memory_gib: .*finite"),
        (INLINE.replace("24", ".nan"), "device: memory_gib: .*finite"),
        (INLINE.replace("24", "1" + "0" * 400), "device: memory_gib: "),
        (INLINE.replace("24", "1" + "0" * 5000), "is not YAML: .*digits"),
        (INLINE.replace("500", ".inf"), "device: memory_gigabytes_per_second: .*finite"),
        (INLINE.replace("bf16: 100", "bf16: 1.0e+300"), "device: tflops.bf16: .*less than or equal to"),
        (INLINE.replace("bf16: 100", "bf16: 1.0e-300"), "device: tflops.bf16: .*greater than or equal to"),
        (INLINE.replace("{bf16: 100, fp32: 10}", ""), "device: tflops: Input should be keys with values"),
        (INLINE.replace("31", ".inf"), "links.intra_node.gigabytes_per_second: .*finite"),
        (INLINE.replace("31", "1.0e-300"), "links.intra_node.gigabytes_per_second: .*greater than or equal to"),
        (INLINE.replace("microseconds: 8", "microseconds: .inf"), "links.intra_node.latency_microseconds: .*finite"),
        (INLINE.replace("0.425", "1.0e-300"), "links.inter_node.efficiency: .*greater than or equal to"),
        (INLINE.split("links")[0] + "links:", r"links: Input should be keys with values$"),
        (INLINE.split("links")[0] + "links: {inter_node: }", r"links.inter_node: Input should be keys with values$"),
        (INLINE.replace("num_nodes: 3", "num_nodes: 1048576"), "at most 1048576 devices"),
        (INLINE.replace("num_nodes: 3", "num_nodes: 2024-99-99"), "is not YAML"),
    ],
)
def test_a_wrong_file_is_named_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    """The error says which file, which key and what is wrong with it."""
    path = written(tmp_path, text)

    with pytest.raises(ClusterError, match=message) as caught:
        load_cluster(path)
    assert path in str(caught.value)


def test_unknown_devices_in_a_file_are_answered_with_the_list(tmp_path: Path) -> None:
    """A file's device, or the one it is like, must be shipped."""
    with pytest.raises(UnknownName, match="Known: a10, a100-pcie-80, a100-sxm-40"):
        load_cluster(written(tmp_path, "{device: h1, devices_per_node: 8, num_nodes: 2}"))
    with pytest.raises(UnknownName, match="Known: a10, a100-pcie-80, a100-sxm-40"):
        load_cluster(written(tmp_path, INLINE.replace("like: h100-sxm-80", "like: nothing")))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A path that cannot be read is an error of the cluster, not a traceback."""
    with pytest.raises(ClusterError, match=r"nowhere\.yaml: No such file"):
        load_cluster(str(tmp_path / "nowhere.yaml"))


def test_a_link_needs_sources() -> None:
    """A link profile says where its figures come from, as devices do."""
    figures = default_link("cpu", "intra_node").model_dump() | {"sources": {}}

    with pytest.raises(ValueError, match="no source given for base_seconds"):
        LinkProfile.model_validate(figures)


def test_a_number_of_cards_is_rounded_up() -> None:
    """A node always has a network card."""
    assert load_cluster("cpu:6x2").links_per_node == 2
    assert load_cluster("cpu:1x2").links_per_node == 1
