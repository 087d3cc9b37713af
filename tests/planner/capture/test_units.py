"""Which modules are repeated blocks, which are alike, and who owns what lies around them."""

from __future__ import annotations

import pytest
from torch import nn

from galv.planner.capture.units import block_lists, distinguishing, owners, settings, stray_parameters, structure


def names(model: nn.Module) -> list[list[str]]:
    """The names in each list of blocks."""
    return [[name for name, _ in blocks] for blocks in block_lists(model)]


class Block(nn.Module):
    """Two layers and settings."""

    def __init__(self, index: int, width: int = 8, mode: str = "plain") -> None:
        super().__init__()
        self.index, self.mode = index, mode
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)


def tower(*blocks: nn.Module) -> nn.ModuleDict:
    """Blocks between a first and a last layer."""
    return nn.ModuleDict({"first": nn.Linear(4, 8), "blocks": nn.ModuleList(blocks), "last": nn.Linear(8, 4)})


def test_the_children_of_a_list_are_blocks() -> None:
    """A ModuleList of like modules is a list of blocks; what they are made of is not looked into."""
    assert names(tower(*map(Block, range(3)))) == [["blocks.0", "blocks.1", "blocks.2"]]


def test_a_list_may_have_a_few_kinds_of_blocks() -> None:
    """Blocks of one type are taken together though some are wider; one that is of no other's kind stays among them."""
    assert names(tower(Block(0, 16), Block(1), Block(2))) == [["blocks.0", "blocks.1", "blocks.2"]]


def test_layers_without_parameters_are_no_blocks() -> None:
    """Activations between the layers of an nn.Sequential are passed over."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())]
    assert names(nn.Sequential(*layers)) == [["0", "2", "4"]]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 8),
        nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)),
        nn.ModuleList([nn.Linear(8, 8)]),
        nn.ModuleList(),
    ],
    ids=["layer", "unlike layers", "one layer", "empty"],
)
def test_nothing_repeats(model: nn.Module) -> None:
    """Modules without two like children have no blocks."""
    assert names(model) == []


def test_stages_of_unlike_blocks_are_lists_of_their_own() -> None:
    """An outer list whose stages are unlike is no list of blocks; the lists inside it are."""
    stages = nn.Sequential(
        nn.Sequential(*(Block(i, 8) for i in range(2))), nn.Sequential(*(Block(i, 32) for i in range(3)))
    )
    assert names(stages) == [["0.0", "0.1"], ["1.0", "1.1", "1.2"]]


def test_a_small_list_beside_a_large_one_is_no_list_of_blocks() -> None:
    """A head of two like layers is not a second list of blocks."""
    model = tower(*(Block(i, 256) for i in range(4)))
    model["last"] = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert names(model) == [["blocks.0", "blocks.1", "blocks.2", "blocks.3"]]


def test_structure_sees_shapes_and_frozen_parameters() -> None:
    """Blocks of equal shapes have equal structure; a width or a frozen parameter makes another."""
    frozen = Block(0)
    frozen.up.requires_grad_(False)
    assert structure(Block(0)) == structure(Block(1))
    assert len({structure(Block(0)), structure(Block(0, 16)), structure(frozen)}) == 3


def test_settings_tell_blocks_apart_but_an_index_does_not() -> None:
    """A setting that some blocks share tells; one that is different in each, or equal in all, does not."""
    blocks = [Block(0, mode="local"), Block(1, mode="global"), Block(2, mode="local")]
    first, second, third = settings(blocks)
    assert first == third != second
    assert set(settings([Block(0), Block(1), Block(2)])) == {()}


def test_two_blocks_that_differ_in_a_word_or_a_step_are_unlike() -> None:
    """Of two blocks, a kind by name or a shift of 0 and 3 tells them apart; consecutive numbers and rates do not."""
    assert len(set(settings([Block(0, mode="local"), Block(1, mode="global")]))) == 2
    assert len(set(settings([Block(0), Block(3)]))) == 2
    assert len(set(settings([Block(0, mode="layer.0"), Block(1, mode="layer.1")]))) == 1


def test_distinguishing_columns() -> None:
    """Only columns with at least two values, one of them twice, tell rows apart."""
    assert distinguishing([[1, 1, 1], [1, 2, 3], ["a", "b", "a"]], 3) == [("a",), ("b",), ("a",)]


def test_owners_are_the_smallest_modules_around_the_blocks() -> None:
    """A module with parameters of its own owns all in it; containers are looked into."""

    class Gate(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.inner = nn.Linear(8, 8)

    model = tower(*map(Block, range(2)))
    model["last"] = nn.Sequential(nn.Linear(8, 8), Gate())
    blocks = block_lists(model)[0]
    assert [name for name, _ in owners(model, blocks)] == ["first", "last.0", "last.1"]
    assert stray_parameters(model, ["first", "last.0", "blocks.0", "blocks.1"]) == [
        "last.1.weight",
        "last.1.bias",
        "last.1.inner.weight",
        "last.1.inner.bias",
    ]
    assert stray_parameters(model, [""]) == []
