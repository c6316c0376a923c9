"""A sampler sees a bounded past, the same one however the search was interrupted."""

from __future__ import annotations

import random
import time
from typing import Any

import optuna
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial
from ray import tune

from raydp.search.history import BEST, WINDOW, History, HistoryTpe
from raydp.search.records import TrialRecord, key_of
from raydp.search.sampling import Sampling
from raydp.search.spaces import Space

SPACE = {"x": FloatDistribution(0.0, 1.0), "y": FloatDistribution(0.1, 10.0, log=True)}


def finished(value: float, *, constraint: float = -1.0, state: TrialState = TrialState.COMPLETE) -> FrozenTrial:
    values = [value] if state == TrialState.COMPLETE else None
    params = {"x": value % 1.0, "y": 1.0}
    return create_trial(
        state=state, values=values, params=params, distributions=SPACE, constraints={"trainable": constraint}
    )


def study_of(history: History | None, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", storage=history, sampler=sampler or RandomSampler(seed=0))


def test_the_best_and_the_latest_are_shown_and_open_trials_always() -> None:
    study = study_of(History(window=40))
    still_open = study.ask()
    for number in range(1, 200):
        # The first hundred are the good ones, except those that broke a constraint.
        study.add_trial(finished(1000.0 - number if number < 100 else 0.5, constraint=1.0 if number % 2 else -1.0))
    shown = [trial.number for trial in study.get_trials(deepcopy=False)]
    best = list(range(2, 2 + 2 * BEST, 2))
    assert shown == [still_open.number, *best, *range(200 - (40 - BEST), 200)]
    assert [trial.number for trial in study.get_trials(states=(TrialState.RUNNING,))] == [still_open.number]
    study.tell(still_open, 2000.0)
    assert [trial.number for trial in study.get_trials(deepcopy=False)][: BEST + 1] == [0, *best[: BEST - 1], 185]


def test_a_short_past_proposes_what_optuna_proposes() -> None:
    generator = random.Random(0)
    values = [generator.random() for _ in range(120)]
    history = History()
    own, whole = study_of(history), study_of(None)
    for number, value in enumerate(values):
        own.sampler, whole.sampler = HistoryTpe(seed=number, history=history), TPESampler(seed=number)
        asked = []
        for study in (own, whole):
            trial = study.ask(SPACE)
            trial.set_constraint("trainable", -1.0)
            asked.append(trial.params)
            study.tell(trial, value)
        assert asked[0] == asked[1]


def test_what_the_past_has_in_common_does_not_depend_on_the_order() -> None:
    other = create_trial(
        state=TrialState.COMPLETE, values=[0.0], params={"x": 0.5}, distributions={"x": SPACE["x"]}, constraints={}
    )
    failed = create_trial(state=TrialState.FAIL, params={}, distributions={})
    for trials in ([finished(0.1), other, failed], [failed, other, finished(0.1)]):
        history = History()
        study = study_of(history)
        for trial in trials:
            study.add_trial(trial)
        assert dict(history.common_space) == {"x": SPACE["x"]}


def _sampling() -> Sampling:
    space = Space.from_definition({"learning_rate": tune.loguniform(0.1, 4.0), "epochs": tune.choice([1, 2, 3])})
    return Sampling(space=space, sampler="tpe", seed=3, directions=["max"])


def _score(config: Any) -> float:
    return -abs(config["learning_rate"] - 1.0) + 0.1 * config["epochs"]


def test_a_long_search_goes_on_as_if_it_had_not_been_interrupted() -> None:
    sampling, records = _sampling(), []
    for number in range(WINDOW + 60):
        proposal = sampling.ask()
        assert proposal is not None
        score = _score(proposal.config)
        sampling.complete(number, [score])
        records.append(
            TrialRecord(
                key=key_of(number),
                number=number,
                state="complete",
                config=proposal.config,
                metrics={"accuracy": (score,)},
            )
        )
    restored = _sampling()
    restored.restore(records, metrics=["accuracy"])
    for _ in range(5):
        one, other = sampling.ask(), restored.ask()
        assert one is not None and other is not None
        assert one.config == other.config
        for each in (sampling, restored):
            each.complete(one.number, [_score(one.config)])


def test_a_proposal_costs_the_same_after_many_trials() -> None:
    def seconds(past: int) -> float:
        sampling = _sampling()
        generator = random.Random(1)
        records = [
            TrialRecord(
                key=key_of(number),
                number=number,
                state="complete",
                config={"learning_rate": generator.uniform(0.1, 4.0), "epochs": generator.choice([1, 2, 3])},
                metrics={"accuracy": (generator.random(),)},
            )
            for number in range(past)
        ]
        sampling.restore(records, metrics=["accuracy"])
        best = float("inf")
        for number in range(past, past + 20):
            begun = time.process_time()
            assert sampling.ask() is not None
            best = min(best, time.process_time() - begun)
            sampling.complete(number, [0.5])
        return best

    assert seconds(8 * WINDOW) < 2 * seconds(WINDOW)  # with the whole past it is about eight times as much
