"""The search of low-rank updates: every method at the same budgets, on the same members."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydp.search.files import load_searches

FILE = Path(__file__).parents[2] / "searches" / "deepsets_lora.py"


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_methods_are_compared_at_equal_budgets_on_the_same_members(scale: str) -> None:
    found = [search.scaled(scale) for search in load_searches(FILE).values()]
    by_budget: dict[float, list[str]] = {}
    for search in found:
        by_budget.setdefault(search.budget.epsilon, []).extend(method.name for method in search.methods)
    assert sorted(by_budget) == [0.5, 1, 2, 4, 8, 16, 32]
    for methods in by_budget.values():
        assert sorted(methods) == ["dp_deepsets", "dp_sgd", "dp_sgd_pt", "pda_dpmd"]
    for shared in ("data", "model", "public", "seeds", "task_name", "metrics"):
        assert len({str(getattr(search, shared)) for search in found}) == 1
    assert {search.budget.adjacency for search in found} == {"add_remove"}
