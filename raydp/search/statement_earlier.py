"""What a privacy statement says of the earlier searches that a search goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydp.privacy import accountants
from raydp.privacy.plan import Interval
from raydp.search.display import upward
from raydp.search.earlier import Earlier
from raydp.search.holdout import NOISED
from raydp.search.records import NOT_STATED
from raydp.search.spending import Composition, compositions, is_family, largest, merged

MEANING = (
    " Earlier searches whose results this one was told (listed below) are composed with it where they spent on the "
    "same people: trials that had ended by their ledgers, others as their whole plans, each search once."
)

#: (composition, accountant) -> bounds at the statement's delta and adjacency.
IntervalOf = Callable[[Composition, str], Interval]


def entries(searches: Sequence[Earlier], interval: IntervalOf) -> list[dict[str, Any]]:
    """One entry an earlier search: where it was, whether it is added and why, and what it spent alone."""
    found = []
    for each in searches:
        spent = each.spent()
        whole = compositions(spent, family=is_family(each.definition))
        worst = max(whole, key=lambda one: interval(one, "pld").upper)
        released = merged(mechanism for run in each.released_of_holdout() for mechanism in run)
        found.append(
            {
                **each.to_json(),
                "data": each.definition.get("data"),
                "measured_on": _measured_on([each]),
                "runs": sum(bool(mechanisms) for _, mechanisms in spent),
                "mechanisms": [_mechanism(mechanism) for mechanism in worst],
                "epsilon": {
                    name: largest(interval(one, name) for one in whole).to_json() for name in accountants.ACCOUNTANTS
                },
                "holdout_mechanisms": [_mechanism(mechanism) for mechanism in released],
            }
        )
    return found


def lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The entries for a reader; none where there are none."""
    if not found:
        return []
    listed = ["", "Earlier searches, whose results this one was told (epsilon of each alone, at this budget's delta):"]
    for each in found:
        added = "added" if each["counted"] else "NOT added here, and stands for its own people"
        epsilons = ", ".join(f"{name} {upward(bounds['upper'], 6)}" for name, bounds in each["epsilon"].items())
        held = sum(mechanism["steps"] for mechanism in each["holdout_mechanisms"])
        noised = f" Releases of its private hold-out: {held}, {'' if each['holdout'] else 'not '}added." if held else ""
        listed.append(
            f"- {each['name']} ({each['id']}), {each['runs']} runs, {added}: {each['why']}. {epsilons}.{noised} "
            f"Journal taken over up to line {each['events']}, digest {each['head']}."
        )
    return listed


def not_covered(searches: Sequence[Earlier]) -> dict[str, str]:
    """What of earlier searches is not in the numbers."""
    found: dict[str, str] = {}
    if not searches:
        return found
    found["earlier searches afterwards"] = (
        "What they spend after their journals were taken over is not in these numbers. It did not steer this search."
    )
    if any(not each.counted for each in searches):
        found["people of other data"] = (
            "Earlier searches on other data are not added: no example stands in both, or they were declared public, "
            "and nothing else is checked. Whoever is in both pays for both. What they cost their own people is listed."
        )
    if any("public benchmark" not in place and NOISED not in place for place in _measured_on(searches)):
        found["metrics of earlier searches"] = (
            "Earlier trials were measured on private hold-out examples without noise, and steered this search. Those "
            "examples are not protected."
        )
    return found


def _measured_on(searches: Sequence[Earlier]) -> list[str]:
    records = (record for each in searches for record in each.directory.records().values())
    return sorted({record.measured_on for record in records if record.measured_on != NOT_STATED})


def _mechanism(mechanism: Any) -> dict[str, Any]:
    return {name: getattr(mechanism, name) for name in ("noise_multiplier", "sample_rate", "steps")}


__all__ = ["MEANING", "entries", "lines", "not_covered"]
