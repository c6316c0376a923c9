"""The short version of the fuzzing: the same inputs in every run, and each fault that the long version ever found."""

from __future__ import annotations

import pytest

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_a_fault(name: str) -> None:
    tried, fault = fuzz(TARGETS[name], seconds=60, most=TARGETS[name].short)
    if fault is not None:
        raise fault
    assert tried >= min(TARGETS[name].short, 10)
