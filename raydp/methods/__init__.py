"""The methods that a search can run, by name.

A method of one's own is a class in one file (:class:`Method` says what it must have) in an installed package that
announces it under the entry point ``raydp.methods``; every process of a search finds it there::

    [project.entry-points."raydp.methods"]
    dp_adamw = "dp_adamw:DpAdamW"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points

from raydp.errors import InvalidValue, UnknownName
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

GROUP = "raydp.methods"


class _Methods(Mapping[str, Method]):
    """The methods here, and those that installed packages announce, which are loaded when they are asked for."""

    def __init__(self, own: tuple[Method, ...]) -> None:
        self._known = {method.name: method for method in own}
        self._announced: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> Method:
        if name not in self._known:
            announced = self._entry_points()
            if name not in announced:
                raise UnknownName("method", str(name), tuple(self))
            self._known[name] = _loaded(announced[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._known, *self._entry_points()]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._entry_points()

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._announced is None:
            self._announced = {}
            for point in entry_points(group=GROUP):
                if point.name in self._known or point.name in self._announced:
                    raise InvalidValue(
                        f"entry point {GROUP}", point.name, "is the name of another method", f"Rename {point.value}."
                    )
                self._announced[point.name] = point
        return self._announced


def _loaded(point: EntryPoint) -> Method:
    """The method that an entry point names: an instance, or a class that is made one."""
    field = f"entry point {GROUP}: {point.name}"
    try:
        found = point.load()
        found = found() if isinstance(found, type) else found
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise InvalidValue(
            field, point.value, f"cannot be loaded: {type(error).__name__}: {said}", "Correct or uninstall its package."
        ) from error
    if not isinstance(found, Method):
        raise InvalidValue(field, point.value, "must be a raydp.methods.Method", "Derive the class from it.")
    if getattr(found, "name", None) != point.name:
        raise InvalidValue(
            field, getattr(found, "name", None), f"must have the name {point.name!r}", "Give both the same name."
        )
    return found


METHODS: Mapping[str, Method] = _Methods(
    (
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
)


def method(name: str) -> Method:
    """The method of that name. Raises UnknownName with the near names.

    >>> from raydp.methods import METHODS, method
    >>> "dp_ngd" in METHODS, method("dp_ngd").name
    (True, 'dp_ngd')
    >>> [phase.name for phase in method("tp_topk").phases(method("tp_topk").parse({"epochs": 5}), population=4000)]
    ['warmup', 'sparse']
    """
    return METHODS[name]


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
