"""Ask and tell: what each end of a trial teaches the sampler, and that resuming changes no proposal."""

from __future__ import annotations

import logging
import math

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState
from ray import tune

from raydp.errors import InvalidValue, UnknownName
from raydp.search.records import TrialRecord, key_of
from raydp.search.sampling import SAMPLERS, Proposal, Sampling, check
from raydp.search.spaces import Space

CONTINUOUS = Space.from_definition({"lr": tune.loguniform(1e-3, 1e1), "share": tune.uniform(0.05, 0.95), "seed": 7})
GRID = Space.from_definition({"rho": tune.grid_search([0.1, 0.2, 0.5]), "warmup": tune.randint(1, 5)})


def branches(trial: optuna.Trial) -> dict:
    epochs = trial.suggest_int("epochs", 2, 20)
    trial.suggest_int("warmup", 1, epochs - 1)
    if trial.suggest_categorical("schedule", ["constant", "cosine"]) == "cosine":
        trial.suggest_float("floor", 0.0, 0.1)
    return {"twice": 2 * epochs}


def score(config: dict) -> float:
    return -((math.log10(config.get("lr", 1.0)) + 1) ** 2) - (config.get("share", 0.5) - 0.3) ** 2


def make(sampler: str, space: Space | None = None, **options) -> Sampling:
    space = space or (GRID if sampler == "grid" else CONTINUOUS)
    return Sampling(space=space, sampler=sampler, seed=3, directions=options.pop("directions", ["max"]), **options)


def run(sampling: Sampling, trials: int) -> list[Proposal]:
    """Every seventh point has no plan, every fifth diverges, every eleventh crashes; the rest score."""
    proposals = []
    for _ in range(trials):
        proposal = sampling.ask()
        if proposal is None:
            break
        proposals.append(proposal)
        if proposal.number % 7 == 6:
            sampling.infeasible(proposal.number, "no noise multiplier")
        elif proposal.number % 5 == 4:
            assert not sampling.complete(proposal.number, [math.nan])
        elif proposal.number % 11 == 10:
            sampling.fail(proposal.number, "the worker died")
        else:
            assert sampling.complete(proposal.number, [score(proposal.config)])
    return proposals


def records_of(proposals: list[Proposal], unfinished: int = 0) -> list[TrialRecord]:
    records = []
    for proposal in proposals:
        number, state, metrics = proposal.number, "complete", {"accuracy": (score(proposal.config),)}
        if number % 7 == 6:
            state, metrics = "infeasible", {}
        elif number % 5 == 4:
            state, metrics = "diverged", {"accuracy": (None,)}
        elif number % 11 == 10:
            state, metrics = "failed", {}
        if number >= len(proposals) - unfinished:
            state, metrics = "running", {}
        config = {**proposal.config, "held_fixed": 0.5}  # a search's fixed hyperparameters are in its configs
        records.append(TrialRecord(key=key_of(number), number=number, state=state, config=config, metrics=metrics))
    return records


def study_of(sampling: Sampling) -> optuna.Study:
    return sampling._study


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
def test_proposals_are_numbered_in_order_and_reproducible(sampler):
    first, second = run(make(sampler), 14), run(make(sampler), 14)
    assert [proposal.number for proposal in first] == list(range(14))
    assert first == second
    assert all(proposal.config["seed"] == 7 for proposal in first)
    assert first[:2] != run(Sampling(space=CONTINUOUS, sampler=sampler, seed=4, directions=["max"]), 2)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_resumed_search_proposes_what_the_uninterrupted_one_does(sampler):
    whole = run(make(sampler), 12)
    begun = run(make(sampler), 8)
    resumed = make(sampler)
    resumed.restore(list(reversed(records_of(begun))), metrics=["accuracy"])
    assert resumed.next_number == 8 and resumed.open == ()
    assert begun + run(resumed, 4) == whole


def test_resumed_define_by_run_search_proposes_what_the_uninterrupted_one_does():
    space = Space.from_definition(branches)
    whole = run(make("tpe", space), 24)
    resumed = make("tpe", space)
    resumed.restore(records_of(whole[:15]), metrics=["accuracy"])
    assert run(resumed, 9) == whole[15:]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_unfinished_trials_are_open_again_after_a_resume(sampler):
    begun = run(make(sampler), 6)
    resumed = make(sampler)
    resumed.restore(records_of(begun, unfinished=2), metrics=["accuracy"])
    assert resumed.open == (4, 5)
    running = study_of(resumed).get_trials(states=(TrialState.RUNNING,))
    assert [(trial.number, trial.params) for trial in running] == [
        (p.number, {name: p.config[name] for name in trial.params}) for p, trial in zip(begun[4:], running, strict=True)
    ]
    assert resumed.complete(4, [0.5])
    resumed.fail(5, "stopped")
    assert not study_of(resumed).get_trials(states=(TrialState.RUNNING, TrialState.WAITING))
    assert resumed.ask().number == 6


def test_numbers_are_not_used_again_when_a_record_was_lost():
    begun = run(make("random"), 6)
    resumed = make("random")
    resumed.restore([record for record in records_of(begun) if record.number != 2], metrics=["accuracy"])
    assert resumed.ask().number == 6


def test_restore_comes_first_and_notices_a_changed_space():
    begun = run(make("random"), 3)
    asked = make("random")
    asked.ask()
    with pytest.raises(InvalidValue, match="before the first ask"):
        asked.restore(records_of(begun), metrics=["accuracy"])
    other = make("random", Space.from_definition({"lr": tune.uniform(100, 200)}))
    with pytest.raises(InvalidValue, match="any more"):
        other.restore(records_of(begun), metrics=["accuracy"])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.9", True])
def test_optuna_136_values_that_are_no_numbers_neither_complete_nor_stop_the_search(sampler, value):
    sampling = make(sampler)
    for _ in range(3):
        assert not sampling.complete(sampling.ask().number, [value])
    good = sampling.ask()
    assert sampling.complete(good.number, [0.1])
    study = study_of(sampling)
    assert study.best_trial.number == good.number
    assert not study.get_trials(states=(TrialState.RUNNING,))
    told = study.get_trials(states=(TrialState.COMPLETE,))
    assert all(math.isfinite(trial.value) for trial in told)
    assert sampling.ask() is not None


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
@pytest.mark.parametrize("directions", [["max"], ["min"], ["max", "min"]])
def test_an_infeasible_point_is_never_the_best(sampler, directions):
    sampling = make(sampler, directions=directions)
    for number in range(14):
        proposal = sampling.ask()
        if number % 2:
            sampling.infeasible(proposal.number, "nothing left for phase train")
        else:
            sampling.complete(proposal.number, [float(number), 1.0][: len(directions)])
    assert {trial.number % 2 for trial in study_of(sampling).best_trials} == {0}


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_sampler_learns_where_no_plan_exists(sampler):
    """Only the lower third of share has a plan: later proposals should find their way there."""
    space = Space.from_definition({"share": tune.uniform(0.0, 1.0), "lr": tune.loguniform(1e-2, 1.0)})
    feasible = []
    sampling = Sampling(space=space, sampler=sampler, seed=0, directions=["max"])
    for _ in range(36):
        proposal = sampling.ask()
        feasible.append(proposal.config["share"] < 1 / 3)
        if feasible[-1]:
            sampling.complete(proposal.number, [proposal.config["share"]])  # the best lies at the border
        else:
            sampling.infeasible(proposal.number, "nothing left")
    assert sum(feasible[:12]) < 8 and sum(feasible[-12:]) >= 8


def test_gaussian_process_leaves_a_point_that_diverged():
    """Failed trials are invisible to Optuna's Gaussian process: it would ask for the same point, and charge, again."""
    sampling = make("gp", Space.from_definition({"lr": tune.loguniform(1e-3, 1e1)}))
    logs = []
    for _ in range(20):
        proposal = sampling.ask()
        log = math.log10(proposal.config["lr"])
        logs.append(log)
        sampling.complete(proposal.number, [log if log < 0 else math.nan])  # better and better, up to where it breaks
    broken = [log for log in logs[10:] if log >= 0]
    assert len(broken) <= 6 and max(log for log in logs if log < 0) > -0.5


def test_tpe_beats_random_on_a_smooth_objective():
    best = {
        sampler: [
            max(
                score(proposal.config)
                for proposal in run(Sampling(space=CONTINUOUS, sampler=sampler, seed=seed, directions=["max"]), 40)
            )
            for seed in range(3)
        ]
        for sampler in ("tpe", "random")
    }
    assert sum(best["tpe"]) > sum(best["random"])


def test_grid_visits_every_point_once_and_ends():
    sampling = make("grid")
    assert sampling.size == GRID.grid_size() == 12
    proposals = run(sampling, 100)
    assert len(proposals) == 12 and sampling.ask() is None
    points = {(proposal.config["rho"], proposal.config["warmup"]) for proposal in proposals}
    assert points == {(rho, warmup) for rho in (0.1, 0.2, 0.5) for warmup in (1, 2, 3, 4)}
    assert all(proposal.repeats is None for proposal in proposals)


def test_grid_search_needs_the_grid_and_the_grid_needs_a_finite_space():
    with pytest.raises(InvalidValue, match="sampler='grid'"):
        make("tpe", GRID)
    with pytest.raises(InvalidValue, match="lr"):
        make("grid", CONTINUOUS)
    with pytest.raises(InvalidValue, match="visits every point"):
        check(space=GRID, sampler="grid", warm_start=[{"rho": 0.1}])
    with pytest.raises(UnknownName, match="tpe"):
        make("tpee")
    with pytest.raises(UnknownName, match="direction"):
        make("tpe", directions=["up"])
    with pytest.raises(InvalidValue, match="directions"):
        make("tpe", directions=[])


def test_warm_starts_come_first_whole_or_in_part():
    warm = [{"lr": 0.5, "share": 0.25}, {"share": 0.75}]
    proposals = run(make("tpe", warm_start=warm), 4)
    assert proposals[0].config == {"lr": 0.5, "share": 0.25, "seed": 7}
    assert proposals[1].config["share"] == 0.75
    resumed = make("tpe", warm_start=warm)
    resumed.restore(records_of(proposals[:1]), metrics=["accuracy"])
    assert run(resumed, 3) == proposals[1:]


def test_ray_35319_warm_starts_with_unknown_names_are_refused():
    with pytest.raises(UnknownName, match=r"warm_start\[1\]"):
        make("tpe", warm_start=[{"lr": 0.5}, {"learning_rate": 0.5}])


def test_optuna_2915_repeats_are_proposed_and_flagged():
    sampling = make("random", Space.from_definition({"k": tune.choice([1, 2]), "batch": 64}))
    proposals = run(sampling, 8)
    first: dict[int, int] = {}
    for proposal in proposals:
        assert proposal.repeats == first.get(proposal.config["k"])
        first.setdefault(proposal.config["k"], proposal.number)
    assert sum(proposal.repeats is not None for proposal in proposals) == 6
    resumed = make("random", Space.from_definition({"k": tune.choice([1, 2]), "batch": 64}))
    resumed.restore(records_of(proposals), metrics=["accuracy"])
    again = resumed.ask()
    assert again.repeats == first[again.config["k"]]


def test_each_proposal_is_told_once():
    sampling = make("random")
    number = sampling.ask().number
    sampling.complete(number, [1.0])
    for tell in (lambda: sampling.complete(number, [1.0]), lambda: sampling.fail(9, "x")):
        with pytest.raises(InvalidValue, match="open proposal"):
            tell()
    with pytest.raises(InvalidValue, match="one an objective"):
        sampling.complete(sampling.ask().number, [1.0, 2.0])


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
def test_several_objectives(sampler):
    sampling = make(sampler, directions=["max", "min"])
    for _ in range(13):
        proposal = sampling.ask()
        sampling.complete(proposal.number, [proposal.config["lr"], proposal.config["share"]])
    assert all(len(trial.values) == 2 for trial in study_of(sampling).best_trials)


def test_nothing_is_written_to_the_terminal(capfd):
    optuna.logging.enable_propagation()
    before = logging.getLogger("optuna").level
    run(make("tpe", Space.from_definition(branches)), 14)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
    assert logging.getLogger("optuna").level == before
    optuna.logging.disable_propagation()


@given(ends=st.lists(st.sampled_from(["complete", "nan", "infeasible", "fail", "open"]), min_size=1, max_size=14))
@settings(max_examples=40, deadline=None)
def test_every_order_of_ends_leaves_a_search_that_goes_on(ends):
    sampling = make("tpe")
    still_open = []
    for end in ends:
        proposal = sampling.ask()
        if end == "complete":
            sampling.complete(proposal.number, [score(proposal.config)])
        elif end == "nan":
            sampling.complete(proposal.number, [math.nan])
        elif end == "infeasible":
            sampling.infeasible(proposal.number, "none")
        elif end == "fail":
            sampling.fail(proposal.number, "died")
        else:
            still_open.append(proposal.number)
    assert sampling.open == tuple(still_open)
    assert sampling.ask().number == len(ends)
