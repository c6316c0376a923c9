"""Metrics of a private hold-out, released through noise.

The people of the hold-out are others than those who are trained on. Two neighbouring data sets differ in one example,
which lies in one of the two parts, so the hold-out has a budget of its own, beside that of the training and not added
to it (parallel composition; McSherry, SIGMOD 2009, Theorem 4). A report is one Gaussian release on the whole hold-out
(q = 1): of the sum of what each example contributes to the metric, clipped to the bound that the task states.

The released number is (sum + noise)/N, cut off to [0, bound], where N is the public size of the hold-out. Clipping
rounds towards zero and takes up to some 1e-5 of a contribution. What an example contributes follows from it and from
the model alone, up to the rounding of the model's outputs.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from raydp.data import Dataset
from raydp.errors import InvalidValue
from raydp.geometry.identity import Identity
from raydp.privacy.ledger import LedgerWriter
from raydp.privacy.mechanism import PhaseSpec
from raydp.privacy.noise import NoiseKey
from raydp.tasks import HeldOut, Task
from raydp.training.discretion import discreet
from raydp.training.step import private_gradient

PHASE = "holdout"


def phase_of(task: Task, metric: str, *, reports: int, population: int) -> PhaseSpec:
    """The one phase of a hold-out's plan: ``reports`` releases of the metric on all ``population`` examples.

    Its clip norm is the most that one example contributes to the sum.

    Raises:
        InvalidValue: the task states no bound for the metric.
    """
    if metric not in task.bounds:
        bounded = ", ".join(task.bounds) or "none of this task's metrics"
        raise InvalidValue(
            "metric",
            metric,
            "cannot be released through noise: no bound is known for what one example contributes to it, and without "
            f"one no noise is enough (bounded: {bounded})",
            "Choose a bounded metric, or leave out holdout_budget: metrics are then measured without noise, and "
            "labelled non-private.",
        )
    return PhaseSpec(
        name=PHASE, steps=reports, batch_size=population, population=population, clip_norm=task.bounds[metric]
    )


def reports_of(reports: int, steps: int) -> int:
    """How often a run of so many logical steps reports: as often as asked, and at most once a step."""
    return min(reports, steps)


class HoldoutQuery:
    """The hold-out of one run, behind its ledger: the only way from its examples to a number.

    Args:
        ledger: of the hold-out's plan, whose only phase is :data:`PHASE`.
        metric: one with a bound.
        examples: the hold-out.
        key: secret, of this run alone: two runs that shared noise would release the difference of two sums without it.

    Raises:
        InvalidValue: the plan is of another metric or of a hold-out of another size.
    """

    def __init__(self, ledger: LedgerWriter, *, task: Task, metric: str, examples: HeldOut, key: NoiseKey) -> None:
        self._ledger, self._task, self._metric, self._examples = ledger, task, metric, examples
        self._key = key.derive(PHASE)  # apart from the addresses of the training's draws
        self._phase = ledger.plan.phase(PHASE)
        wanted = phase_of(task, metric, reports=self._phase.steps, population=len(examples))
        if self._phase.spec != wanted or len(ledger.plan.phases) != 1:
            raise InvalidValue(
                "holdout plan",
                ledger.plan.digest,
                f"must be the one of {metric!r} on the {len(examples)} examples of the hold-out",
                "Restore the data and the plan, or start a new trial.",
            )

    def release(self, model: nn.Module, report: int) -> dict[str, float]:
        """The noised metric of a report (counted from 0). The ledger has it, durably, before an example is read.

        The same report of the same model gives the same number: the noise is a function of key and report.

        Raises:
            LedgerRefusal: the plan has no room for the report; nothing was read.
            RaydpError: measuring failed; the message says nothing about the examples.
        """
        self._ledger.record(PHASE, report)
        self._ledger.commit()
        with discreet("measuring on the private hold-out"):
            (released,) = private_gradient(
                [[self._contributions(model)]],
                geometry=Identity(sizes=(1,)),
                phase=self._phase,
                step=report,
                key=self._key,
            )
        return {self._metric: min(max(float(released), 0.0), self._phase.clip_norm)}

    def _contributions(self, model: nn.Module) -> Tensor:
        """A vector of one entry for each example, (N, 1)."""
        return self._task.contributions(self._metric, model, self._examples).to(torch.float32).unsqueeze(1)


def fingerprint(private: str, dataset: Dataset) -> str:
    """Digest of the private examples (given as theirs) and of the hold-out's: reports are not repeated on others."""
    held = dataset.holdout
    digest = hashlib.sha256(repr((private, tuple(held.inputs.shape))).encode())
    digest.update(held.inputs.contiguous().numpy().data)
    digest.update(held.targets.contiguous().numpy().data)
    return digest.hexdigest()


__all__ = ["PHASE", "HoldoutQuery", "fingerprint", "phase_of", "reports_of"]
