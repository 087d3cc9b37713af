"""Fixtures of the tests of tensor-parallel layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def single_threaded() -> Iterator[None]:
    """The tensors here are tiny and ranks are threads already: more of them would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
