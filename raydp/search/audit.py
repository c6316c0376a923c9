"""`raydp audit`: which trial of a search is audited, and where the report and its figure lie."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from raydp.errors import InvalidValue
from raydp.privacy.budget import Budget
from raydp.search.definition import Search
from raydp.search.run_directory import RunDirectory, atomic_file
from raydp.training.audit import AuditReport, AuditSpec, audit

#: Where the budget lies above, this is what is audited instead: beyond it the attacks have little reach.
LARGEST_EPSILON = 3.0


def audit_search(
    search: Search,
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    epsilon: float | None = None,
    canaries: int = 1000,
    runs: int = 200,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> AuditReport:
    """Audit the method of a search under its budget, and write ``audit.json`` and ``audit.png``.

    Args:
        search: whose method, budget and adjacency are audited.
        directory: where the two files go; made if it is not there.
        config: of the trial; None for the centre of the space.
        epsilon: None for the budget's, or 3 where that is larger: an attack with this many canaries cannot refute much
            larger claims.
        canaries, runs, seed: as in :class:`raydp.training.audit.AuditSpec`.
        progress: is told a line now and then.

    Raises:
        InvalidValue: the method cannot be audited on canaries; see :func:`raydp.training.audit.audit`.
    """
    chosen, hyperparameters, _ = search.point(search.point_space.centre() if config is None else config)
    given = min(search.budget.epsilon, LARGEST_EPSILON) if epsilon is None else epsilon
    spec = AuditSpec(
        method=chosen.name,
        config=dataclasses.asdict(hyperparameters),
        budget=Budget(epsilon=given, delta=search.budget.delta, adjacency=search.budget.adjacency),
        canaries=canaries,
        runs=runs,
        seed=seed,
        public=search.public_source,
        public_limit=search.public_limit,
    )
    with tempfile.TemporaryDirectory(prefix="raydp-audit-") as scratch:
        report = audit(spec, Path(scratch), progress=progress)
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_file(directory / "audit.json") as file:
        file.write_text(json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    plot_audit(report).savefig(directory / "audit.png", dpi=120)
    return report


def trial_config(directory: RunDirectory) -> dict[str, Any]:
    """The config of the first trial that has a plan.

    Raises:
        InvalidValue: there is none.
    """
    for key in sorted(records := directory.records()):
        if records[key].plan is not None:
            return dict(records[key].config)
    raise InvalidValue("DIR", str(directory.path), "holds no trial with a plan", "Give the search's file instead.")


def plot_audit(report: AuditReport) -> Figure:
    """Claim and lower bounds side by side, and the scores that the one-run attack told the canaries apart by."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    bounds = {"one run": report.one_run.epsilon_lower, "repeated runs": report.repeated.epsilon_lower}
    claims = (report.one_run_claim, report.repeated_claim)
    for place, (bound, claim) in enumerate(zip(bounds.values(), claims, strict=True)):
        left.bar(place, bound, width=0.5, color="tab:blue" if bound <= claim else "tab:red")
        left.hlines(claim, place - 0.4, place + 0.4, color="black")
        left.annotate(f"{bound:.3g}", (place, bound), ha="center", va="bottom")
        left.annotate(f"claim {claim:.3g}", (place, claim), ha="center", va="bottom")
    left.set_xticks([0, 1], list(bounds))
    left.set_ylim(0, 1.2 * max(*claims, *bounds.values()))
    left.set_ylabel(f"ε at δ = {report.spec.budget.delta:g}")
    left.set_title(f"lower bounds ({100 * report.spec.confidence:g} % each)")
    edges = np.histogram_bin_edges(report.one_run_scores, bins=40)  # the same for both, so that heights compare
    for inside, label in ((True, "took part"), (False, "did not")):
        right.hist(report.one_run_scores[report.included == inside], bins=edges, alpha=0.6, label=label)
    right.set_xlabel("how far the weights moved along a canary's gradient")
    right.set_ylabel("canaries")
    right.legend()
    return figure
