"""Accountants: certified bounds of the epsilon of any composition of mechanisms, behind one protocol.

``pld`` (dp-accounting) is the default, both tighter and faster; ``prv`` (prv-accountant) is the independent
cross-check; ``rdp`` (Opacus) a looser bound that rests on other mathematics. There is no Gaussian-DP approximation: it
reports less than the proven lower bound (5.711 < 5.764 at q = 4096/50000, sigma = 3, T = 2000, delta = 1e-5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from raydp import _validate
from raydp.privacy.accountants.pld import PldAccountant
from raydp.privacy.accountants.prv import PrvAccountant
from raydp.privacy.accountants.rdp import RdpAccountant
from raydp.privacy.accountants.refusal import Refused
from raydp.privacy.budget import ADJACENCIES, Adjacency
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.plan import Interval

ACCOUNTANTS: tuple[str, ...] = ("pld", "prv", "rdp")


class Accountant(Protocol):
    """Composes mechanisms into certified bounds of epsilon at a delta. Bounded in time and memory."""

    name: str

    def epsilon(self, mechanisms: Sequence[Mechanism], *, delta: float, adjacency: Adjacency) -> Interval: ...


_BY_NAME: Mapping[str, Accountant] = {
    "pld": PldAccountant(),
    "prv": PrvAccountant(),
    "rdp": RdpAccountant(),
}


# Calibration by prv pays its error bound in noise, so it asks for a smaller one than a cross-check.
_PRECISE: Mapping[str, Accountant] = {**_BY_NAME, "prv": PrvAccountant(relative_error=0.001)}


def accountant_for(name: str, *, precise: bool = False) -> Accountant:
    """The back end of that name; ``precise`` costs more time where bounds and time are traded. Raises UnknownName."""
    _validate.one_of("accountant", name, ACCOUNTANTS)
    return (_PRECISE if precise else _BY_NAME)[name]


def epsilon(
    mechanisms: Sequence[Mechanism],
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    accountant: str = "pld",
) -> Interval:
    """Certified bounds of epsilon of the composition.

    Args:
        mechanisms: any number, each with its own sigma, q and T; their order does not matter. None spent nothing: 0.
        delta: in (0, 1).
        adjacency: ``add_remove`` or ``replace_one``.
        accountant: ``pld``, ``prv`` or ``rdp``. Where prv cannot answer within bounded memory, pld does, and
            ``Interval.fallback`` says why.

    Raises:
        InvalidValue: delta out of range, or the epsilon is not finite (sigma too small to bound).
        UnknownName: no such accountant or adjacency.

    >>> from raydp.privacy import Mechanism, epsilon
    >>> bounds = epsilon([Mechanism(noise_multiplier=1.0, sample_rate=0.01, steps=1000)], delta=1e-5)
    >>> bounds.lower <= bounds.estimate <= bounds.upper, round(bounds.upper, 2)
    (True, 1.83)
    """
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    _validate.one_of("adjacency", adjacency, ADJACENCIES)
    delta = _validate.between("delta", delta, 0, 1, low_open=True, high_open=True)
    if not mechanisms:
        return Interval(lower=0.0, estimate=0.0, upper=0.0, accountant=accountant)
    return evaluate(_BY_NAME[accountant], mechanisms, delta=delta, adjacency=adjacency)


def evaluate(
    accountant: Accountant, mechanisms: Sequence[Mechanism], *, delta: float, adjacency: Adjacency
) -> Interval:
    """``accountant.epsilon`` with the fallback to pld on refusal, recorded in the interval.

    Raises:
        Refused: pld itself has no finite bound.
    """
    try:
        return accountant.epsilon(mechanisms, delta=delta, adjacency=adjacency)
    except Refused as refusal:
        if accountant.name == "pld":
            raise
        answer = _BY_NAME["pld"].epsilon(mechanisms, delta=delta, adjacency=adjacency)
        return dataclasses.replace(answer, fallback=f"{accountant.name} refused, pld answered: {refusal}")


__all__ = ["ACCOUNTANTS", "Accountant", "accountant_for", "epsilon", "evaluate"]
