"""Selection: how the best trial is chosen, and what that costs in privacy.

Four rules, each a frozen description. What a search's ``budget`` means depends on the rule:

==================  ==========================================================================================
rule                budget, and what the released result costs
==================  ==========================================================================================
composition         of each trial. The search costs the composition of everything that ever started, however the
                    best was chosen and whoever sees the rest.
random_stopping     of the released result. The number of trials K is random and secret, proposals are drawn
                    independently from one distribution, only the best trial is released; the budget of a trial is
                    solved (:func:`trial_budget`) so that the result satisfies the search's budget.
subsample           of each trial and of the final run; trials see only a secret Poisson subsample of the private
                    examples, and one final run takes the best config to the rest or to all. What both together cost is
                    stated (:mod:`raydp.privacy.selection_subsample`), not solved for.
public              of each trial. The objective and the data that it is measured on in the search are public, so that
                    choosing costs nothing. The result costs what its own run costs.
==================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from raydp import _validate
from raydp.errors import InvalidValue
from raydp.privacy import stopping
from raydp.privacy.stopping import NegativeBinomial, Poisson, Runs

FINALS = ("rest", "all")
SCALINGS = ("all", "sizes", "none")


@dataclass(frozen=True, kw_only=True)
class Public:
    """Nothing in the search touches private data.

    Attributes:
        data: the name of the public (or synthetic) data that trials train and are compared on, which every result
            repeats; None: the search's own data set.

    >>> from raydp.privacy.selection import Public
    >>> Public(data="mnist5k").theorem
    'No private data in the search: choosing is post-processing of public information.'
    """

    data: str | None = None

    rule: ClassVar[str] = "public"
    theorem: ClassVar[str] = "No private data in the search: choosing is post-processing of public information."

    def __post_init__(self) -> None:
        if self.data is not None and (not isinstance(self.data, str) or not self.data.strip()):
            raise InvalidValue(
                "selection.data", self.data, "must name the public data", "Say what trials are compared on."
            )

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"rule": self.rule, "data": self.data}


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Everything that ever started is composed. The default: it holds for every sampler and every onlooker.

    >>> from raydp.privacy.selection import Composition
    >>> Composition().to_json()
    {'rule': 'composition'}
    """

    rule: ClassVar[str] = "composition"
    theorem: ClassVar[str] = (
        "Adaptive composition of all runs that started (Dwork, Rothblum & Vadhan 2010; numerically tight by "
        "privacy-loss distributions, Zhu, Dong & Wang 2022)."
    )

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"rule": self.rule}


@dataclass(frozen=True, kw_only=True)
class RandomStopping:
    """A random, secret number of independent trials, of which only the best is released.

    Attributes:
        runs: the distribution of the number of trials.
        keep_losers: keep the private store (mode 0700) of all trials after the release; False destroys it. Whoever
            sees it voids the guarantee.

    >>> from raydp.privacy.selection import RandomStopping
    >>> from raydp.privacy.stopping import NegativeBinomial
    >>> rule = RandomStopping(runs=NegativeBinomial.with_mean(eta=1, mean=10))
    >>> rule.rule, rule.keep_losers
    ('random_stopping', False)
    """

    runs: Runs
    keep_losers: bool = False

    rule: ClassVar[str] = "random_stopping"
    theorem: ClassVar[str] = (
        "Privacy-profile bound of private selection with a random number of repetitions (Koskela, Redberg & Wang 2024, "
        "arXiv 2402.06701; the algorithm and its Renyi bound: Papernot & Steinke 2022, arXiv 2110.03620)."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.runs, NegativeBinomial | Poisson):
            raise InvalidValue(
                "selection.runs",
                self.runs,
                "must be a distribution of the number of trials",
                "Write NegativeBinomial.with_mean(eta=1, mean=10) or Poisson(mu=10).",
            )
        if not isinstance(self.keep_losers, bool):
            raise InvalidValue(
                "selection.keep_losers", self.keep_losers, "must be true or false", "Write True or False."
            )

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"rule": self.rule, "runs": self.runs.to_json(), "keep_losers": self.keep_losers}


@dataclass(frozen=True, kw_only=True)
class Subsample:
    """Trials train on a secret Poisson subsample of the private examples; one final run takes the best config.

    Attributes:
        fraction: in (0, 1), the probability with which each private example is used for tuning.
        final: ``rest`` (the final run trains on the examples that were not used for tuning) or ``all``.
        scaling: how the config of the best trial is carried over to the final run, which expects r times as many
            examples. ``all``: batch sizes, and the learning rate of ``sgd``, are multiplied by r, so that sample rate,
            steps and noise multiplier stay about as they were tuned (Koskela & Kulkarni 2023); ``sizes``: batch sizes
            alone; ``none``: it is kept as it is.

    >>> from raydp.privacy.selection import Subsample
    >>> Subsample(fraction=0.1).to_json()
    {'rule': 'subsample', 'fraction': 0.1, 'final': 'rest', 'scaling': 'all'}
    """

    fraction: float
    final: str = "rest"
    scaling: str = "all"

    rule: ClassVar[str] = "subsample"
    theorem: ClassVar[str] = (
        "Tuning on a secret Poisson subsample, where trials compose, then one final run (Koskela & Kulkarni 2023, "
        "arXiv 2301.11989; amplification: Balle, Barthe & Gaboardi 2018, arXiv 1807.01647)."
    )

    def __post_init__(self) -> None:
        fraction = _validate.between("selection.fraction", self.fraction, 0, 1, low_open=True, high_open=True)
        object.__setattr__(self, "fraction", fraction)
        _validate.one_of("selection.final", self.final, FINALS)
        _validate.one_of("selection.scaling", self.scaling, SCALINGS)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"rule": self.rule, "fraction": self.fraction, "final": self.final, "scaling": self.scaling}


Selection = Public | Composition | RandomStopping | Subsample
RULES: tuple[str, ...] = tuple(kind.rule for kind in (Composition, RandomStopping, Subsample, Public))


def from_json(record: Mapping[str, Any]) -> Selection:
    """Inverse of ``to_json``. Raises InvalidValue, UnknownName."""
    rule = _validate.one_of("selection", record.get("rule"), RULES)
    values = {name: value for name, value in record.items() if name != "rule"}
    if rule == RandomStopping.rule:
        return RandomStopping(runs=stopping.from_json(values.pop("runs")), **values)
    return {kind.rule: kind for kind in (Composition, Subsample, Public)}[rule](**values)  # type: ignore[return-value]


def parse(value: object) -> Selection:
    """A rule as it is, or read from text: what ``--set selection=…`` takes.

    ``composition`` · ``public`` or ``public:NAME`` · ``geometric:MEAN`` · ``logarithmic:MEAN`` ·
    ``negative_binomial:ETA:MEAN`` · ``poisson:MEAN`` · ``subsample:FRACTION`` or ``subsample:FRACTION:all``.

    Raises:
        InvalidValue, UnknownName: the text names no rule, or has the wrong numbers.

    >>> from raydp.privacy import selection
    >>> selection.parse("composition")
    Composition()
    >>> selection.parse("subsample:0.1:all")
    Subsample(fraction=0.1, final='all', scaling='all')
    >>> round(selection.parse("geometric:10").runs.mean, 6)
    10.0
    """
    if isinstance(value, Public | Composition | RandomStopping | Subsample):
        return value
    if not isinstance(value, str):
        raise InvalidValue("selection", value, "must be a rule", f"Write one of: {', '.join(_FORMS)}.")
    name, *given = value.split(":")
    _validate.one_of("selection", name, _FORMS)
    if len(given) not in _FORMS[name]:
        counts = " or ".join(map(str, _FORMS[name]))
        raise InvalidValue("selection", value, f"takes {counts} values after {name!r}", "For example: geometric:10.")
    if name == "composition":
        return Composition()
    if name == "public":
        return Public(data=given[0]) if given else Public()
    if name == "subsample":
        return Subsample(fraction=_number(value, given[0]), final=given[1] if len(given) > 1 else "rest")
    numbers = [_number(value, text) for text in given]
    if name == "poisson":
        return RandomStopping(runs=Poisson(mu=numbers[0]))
    eta = {"geometric": 1.0, "logarithmic": 0.0}.get(name, numbers[0])
    return RandomStopping(runs=NegativeBinomial.with_mean(eta=eta, mean=numbers[-1]))


#: Forms of :func:`parse`, and how many values each takes.
_FORMS: Mapping[str, tuple[int, ...]] = {
    "composition": (0,),
    "public": (0, 1),
    "geometric": (1,),
    "logarithmic": (1,),
    "negative_binomial": (2,),
    "poisson": (1,),
    "subsample": (1, 2),
}


def _number(whole: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidValue("selection", whole, f"{text!r} must be a number", "For example: geometric:10.") from error


__all__ = [
    "FINALS",
    "RULES",
    "SCALINGS",
    "Composition",
    "Public",
    "RandomStopping",
    "Selection",
    "Subsample",
    "from_json",
    "parse",
]
