"""The methods that a search can run, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raydp import _validate
from raydp.methods.ada_dps import AdaDps
from raydp.methods.base import GradientHyperparameters, Hyperparameters, Method, Policy, PublicExamples, Setting
from raydp.methods.dp_deepsets import DpDeepSets
from raydp.methods.dp_ngd import DpNgd
from raydp.methods.dp_sgd import DpSgd
from raydp.methods.dp_sgd_pt import DpSgdPt
from raydp.methods.gep import Gep
from raydp.methods.online import Online, OnlineHyperparameters, OnlineTopKHyperparameters
from raydp.methods.pda_dpmd import PdaDpmd
from raydp.methods.two_phase import TwoPhase

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            DpSgd(),
            TwoPhase(
                name="tp_topk",
                summary="a dense private warm-up scores the coordinates, then only the best are noised and trained",
                ranking="scores",
            ),
            TwoPhase(
                name="tp_rand",
                summary="as tp_topk with a random support: the control that isolates the quality of the support",
                ranking="random",
            ),
            Online(
                name="on_topk",
                summary="one phase; the support is refreshed each epoch from scores gathered online",
                hyperparameters=OnlineTopKHyperparameters,
            ),
            Online(
                name="on_rand",
                summary="one phase; a fresh random support each epoch",
                hyperparameters=OnlineHyperparameters,
            ),
            DpNgd(),
            DpSgdPt(),
            AdaDps(),
            Gep(),
            PdaDpmd(),
            DpDeepSets(),
        )
    }
)


def method(name: str) -> Method:
    """The method of that name. Raises UnknownName with the near names."""
    return METHODS[_validate.one_of("method", name, METHODS)]


__all__ = [
    "METHODS",
    "GradientHyperparameters",
    "Hyperparameters",
    "Method",
    "Policy",
    "PublicExamples",
    "Setting",
    "method",
]
