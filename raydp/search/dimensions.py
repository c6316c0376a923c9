"""Single dimensions of a search space: Tune's domains as Optuna distributions, and what can be asked of those."""

from __future__ import annotations

import itertools
import math

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial

from raydp import _validate
from raydp.errors import InvalidValue

Scalar = str | int | float | bool


def from_domain(name: str, domain: object) -> BaseDistribution:
    """A Tune domain as an Optuna distribution, by the rules of Tune's own OptunaSearch where they lose nothing."""
    # Imported here: a define-by-run space needs no Ray, and importing Tune takes seconds.
    from ray.tune.search import sample
    from ray.tune.search.optuna import OptunaSearch

    where = f"space[{name!r}]"
    if isinstance(domain, sample.Categorical):
        if not isinstance(domain.get_sampler(), sample.Uniform):
            raise InvalidValue(where, domain, "must choose uniformly", "Write tune.choice([...]).")
        return CategoricalDistribution(choices_of(name, domain.categories))
    if not isinstance(domain, sample.Float | sample.Integer):
        raise InvalidValue(
            where,
            domain,
            "is not a domain that raydp can sample",
            "Use tune.uniform, loguniform, quniform, randint, lograndint, qrandint, choice or grid_search, a constant "
            "str, int, float or bool, or a define-by-run function for dependent values.",
        )
    sampler = domain.get_sampler()
    inner = sampler.sampler if isinstance(sampler, sample.Quantized) else sampler
    if not isinstance(inner, sample.Uniform | sample.LogUniform):
        raise InvalidValue(
            where,
            str(inner),
            "is a sampler without bounds or one that Optuna lacks",
            "Use tune.uniform(low, high) or tune.loguniform(low, high).",
        )
    whole = isinstance(domain, sample.Integer)  # a step of 1 is no step for integers
    if (
        isinstance(sampler, sample.Quantized)
        and isinstance(inner, sample.LogUniform)
        and not (whole and sampler.q == 1)
    ):
        raise InvalidValue(
            where,
            sampler.q,
            "Optuna has no quantised logarithmic range (Tune would drop the step)",
            "Use tune.loguniform, or tune.choice with the values that you want.",
        )
    for bound in (domain.lower, domain.upper):
        _validate.real(f"{where} bound", bound)
    try:
        return OptunaSearch.convert_search_space({name: domain})[name]
    except ValueError as error:
        raise InvalidValue(
            where,
            f"{type(domain).__name__}({domain.lower}, {domain.upper})",
            f"is not a range: {error}",
            "Write the lower bound first; the upper bound of tune.randint and tune.lograndint is exclusive.",
        ) from error


def scalar(where: str, value: object) -> Scalar:
    """``value`` as a plain str, int, float or bool (NumPy's scalars are unwrapped)."""
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, str | int | float):
        raise InvalidValue(
            where,
            value,
            "must be a str, int, float or bool",
            "Give each choice a name or a number, and translate it inside the method.",
        )
    if isinstance(value, float):
        return _validate.real(where, value)
    return value


def choices_of(name: str, values: object) -> list[Scalar]:
    """The choices of a categorical dimension, plain and all different, or InvalidValue."""
    where = f"space[{name!r}]"
    if not isinstance(values, list | tuple) or not values:
        raise InvalidValue(where, values, "must be a list of one or more choices", "Write tune.choice([...]).")
    choices = [scalar(where, value) for value in values]
    for first, second in itertools.combinations(choices, 2):
        if first == second:  # also True == 1: Optuna could not tell them apart
            raise InvalidValue(where, choices, f"holds {first!r} and {second!r}, which are equal", "Name each once.")
    return choices


def contains(distribution: BaseDistribution, value: object) -> bool:
    """Whether a distribution can propose ``value``, type included (a bool is no number, a float no integer)."""
    if isinstance(distribution, CategoricalDistribution):
        return any(type(choice) is type(value) and choice == value for choice in distribution.choices)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    if isinstance(distribution, IntDistribution):
        inside = distribution.low <= value <= distribution.high
        return isinstance(value, int) and inside and (value - distribution.low) % distribution.step == 0
    assert isinstance(distribution, FloatDistribution)
    if not distribution.low <= value <= distribution.high:
        return False
    steps = 0.0 if distribution.step is None else (value - distribution.low) / distribution.step
    return abs(steps - round(steps)) < 1e-8


def require_contained(where: str, value: object, distribution: BaseDistribution) -> None:
    """Raise InvalidValue unless the distribution can propose the value."""
    if not contains(distribution, value):
        raise InvalidValue(where, value, f"must be {describe(distribution)}", "Choose a value that the space can hold.")


def describe(distribution: BaseDistribution) -> str:
    """A distribution in words, for messages."""
    if isinstance(distribution, CategoricalDistribution):
        return f"one of {', '.join(map(repr, distribution.choices))}"
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    kind = "integers" if isinstance(distribution, IntDistribution) else "numbers"
    step = f" in steps of {distribution.step}" if distribution.step not in (None, 1) else ""
    return f"{kind} in [{distribution.low:g}, {distribution.high:g}]{step}{' (log)' if distribution.log else ''}"


def suggest(trial: BaseTrial, name: str, distribution: BaseDistribution) -> Scalar:
    """Ask a trial for a value of a distribution, by Optuna's public functions."""
    if isinstance(distribution, CategoricalDistribution):
        choice = trial.suggest_categorical(name, distribution.choices)
        assert choice is not None
        return choice
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(
            name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
        )
    assert isinstance(distribution, FloatDistribution)
    low, high = distribution.low, distribution.high
    return float(trial.suggest_float(name, low, high, step=distribution.step, log=distribution.log))


def is_numeric(distribution: BaseDistribution) -> bool:
    """Whether a dimension is a range with two different ends."""
    return not isinstance(distribution, CategoricalDistribution) and not distribution.single()


def middle(distribution: BaseDistribution) -> Scalar:
    """The middle of a distribution, on its own scale (geometric if logarithmic) and its own grid of steps."""
    if isinstance(distribution, CategoricalDistribution):
        return choice_at(distribution, len(distribution.choices) // 2)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    value = math.sqrt(low) * math.sqrt(high) if distribution.log else low + (high - low) / 2
    if step is not None:
        value = low + step * math.floor((value - low) / step)
    value = min(max(value, low), high)
    return int(value) if isinstance(distribution, IntDistribution) else float(value)


def choice_at(distribution: CategoricalDistribution, index: int) -> Scalar:
    """The choice at ``index``, counted round and round."""
    choice = distribution.choices[index % len(distribution.choices)]
    assert choice is not None  # refused when the space was read
    return choice


def candidates(name: str, distribution: BaseDistribution) -> list[Scalar]:
    """Every value of a finite dimension. Raises InvalidValue for a continuous one."""
    if isinstance(distribution, CategoricalDistribution):
        return [choice for choice in distribution.choices if choice is not None]
    if isinstance(distribution, IntDistribution):
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    assert isinstance(distribution, FloatDistribution)
    if distribution.single():
        return [distribution.low]
    if distribution.step is None:
        raise InvalidValue(
            f"space[{name!r}]",
            describe(distribution),
            "is continuous and has no grid",
            "Write tune.grid_search([...]), tune.choice([...]) or tune.quniform(low, high, step).",
        )
    count = round((distribution.high - distribution.low) / distribution.step)
    values = (distribution.low + i * distribution.step for i in range(count + 1))
    return [min(distribution.high, float(f"{value:.12g}")) for value in values]  # 0.3, not 0.30000000000000004
