"""Whether weights are finite is asked after each step."""

from __future__ import annotations

import math

import pytest
import torch

from raydp.training.optimizer import all_finite


def test_finite_tensors_are_finite() -> None:
    assert all_finite([torch.zeros(3), torch.zeros(0), torch.full((2, 2), 3e38)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_entry_that_is_not_finite_is_found(bad: float) -> None:
    entries = torch.zeros(4, 5)
    entries[2, 3] = bad
    assert not all_finite([torch.ones(2), entries])
