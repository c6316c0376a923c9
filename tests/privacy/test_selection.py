"""Rules of selection as data."""

from __future__ import annotations

import json

import pytest

from raydp.errors import RaydpError
from raydp.privacy import selection
from raydp.privacy.selection import Composition, Public, RandomStopping, Selection, Subsample
from raydp.privacy.stopping import NegativeBinomial, Poisson

RULES: list[Selection] = [
    Composition(),
    Public(data="fashion5k"),
    RandomStopping(runs=NegativeBinomial(eta=0.5, gamma=0.01), keep_losers=True),
    RandomStopping(runs=Poisson(mu=12)),
    Subsample(fraction=0.2, final="all"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
def test_json_round_trip(rule: Selection) -> None:
    assert selection.from_json(json.loads(json.dumps(rule.to_json()))) == rule
    assert rule.rule in selection.RULES and rule.theorem.endswith(".")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("composition", Composition()),
        ("public", Public()),
        ("public:digits", Public(data="digits")),
        ("geometric:10", RandomStopping(runs=NegativeBinomial.with_mean(eta=1, mean=10))),
        ("logarithmic:10", RandomStopping(runs=NegativeBinomial.with_mean(eta=0, mean=10))),
        ("negative_binomial:-0.5:5.5", RandomStopping(runs=NegativeBinomial.with_mean(eta=-0.5, mean=5.5))),
        ("poisson:8", RandomStopping(runs=Poisson(mu=8))),
        ("subsample:0.1", Subsample(fraction=0.1)),
        ("subsample:0.1:all", Subsample(fraction=0.1, final="all")),
    ],
)
def test_text_names_a_rule(text: str, rule: Selection) -> None:
    assert selection.parse(text) == rule


@pytest.mark.parametrize(
    "value",
    ["best", "geometric", "geometric:ten", "geometric:0.5", "subsample:1.5", "subsample:.1:some", 3, None, "public: "],
)
def test_what_names_no_rule_is_refused(value: object) -> None:
    with pytest.raises(RaydpError):
        selection.parse(value)
