"""Going on from earlier searches: what they spent is carried, once each, durably; what they found is learned."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from ray import tune

from raydp import cli
from raydp.errors import CorruptFile, InvalidValue
from raydp.privacy import accountants
from raydp.privacy.budget import Budget
from raydp.privacy.mechanism import Mechanism
from raydp.privacy.selection import Subsample
from raydp.privacy.selection_subsample import subsample_bound
from raydp.search import carrying, statement
from raydp.search.copies import pack, unpack
from raydp.search.definition import Search
from raydp.search.earlier import earlier_of
from raydp.search.preview import preview
from raydp.search.results import Result
from raydp.search.run_directory import EARLIER, RunDirectory
from raydp.search.runner import _numbers, stored_search
from raydp.search.sampling import Sampling
from raydp.search.spaces import Space
from raydp.search.spending import compositions
from raydp.search.verify import verify
from tests.search.helpers import drive, session_in, small_search
from tests.search.private_data import HOLDOUT_BUDGET, write_private
from tests.search.test_statement import checked, recomputed
from tests.search.test_verify import add, good_plan

BUDGET = Budget(epsilon=1.0, delta=1e-5)


def search_for(**changes: Any) -> Search:
    """A search to whose plans :func:`good_plan` belongs."""
    return small_search(**{"budget": BUDGET, "seeds": 2, **changes})


def made(path: Path, **changes: Any) -> RunDirectory:
    """A run directory that has taken over what its search goes on from; no trial yet."""
    return session_in(path, search_for(**changes)).directory


def composed(runs: int, *, further: tuple[Mechanism, ...] = ()) -> float:
    return accountants.epsilon([*good_plan().mechanisms * runs, *further], delta=1e-5).upper


def test_what_earlier_searches_spent_is_composed_with_what_this_one_spends(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    add(first, 1, good_plan(), state="failed", seeds=1, steps=8)
    short = (
        good_plan().mechanisms[0],
        Mechanism(noise_multiplier=good_plan().mechanisms[1].noise_multiplier, sample_rate=0.05, steps=3),
    )
    second = made(tmp_path / "second", after=str(first.path))
    assert Result.load(second).epsilon_search.upper == pytest.approx(composed(2, further=short), rel=1e-4)
    add(second, 0, good_plan())
    found = Result.load(second)
    assert found.runs == 2
    assert found.epsilon_search.upper == pytest.approx(composed(4, further=short), rel=1e-4)
    assert found.epsilon_carried is not None
    assert found.epsilon_carried.upper == pytest.approx(composed(2, further=short), rel=1e-4)
    assert found.epsilon_released == found.epsilon_search
    assert "goes on from earlier searches: with small" in found.summary().splitlines()[-1]
    assert found.to_json()["earlier"][0]["counted"] is True
    numbers = _numbers(found)
    assert numbers["epsilon_search"] == found.epsilon_search.upper and numbers["after"].startswith("small (")
    assert numbers["epsilon_carried"] == found.epsilon_carried.upper

    report = verify(second.path)
    assert report["ok"], (report["problems"], report["earlier"])
    assert report["search"]["epsilon"]["pld"]["upper"] == found.epsilon_search.upper
    assert [entry["original"] for entry in report["earlier"]] == ["rechecked"]

    said = checked(second)
    assert said["everything"]["epsilon"]["pld"]["upper"] == found.epsilon_search.upper
    assert recomputed(said["everything"]["mechanisms"], said) == pytest.approx(found.epsilon_search.upper, rel=1e-2)
    assert said["selection"]["released"]["epsilon"] == found.epsilon_search.upper
    (entry,) = said["earlier"]
    assert (entry["counted"], entry["runs"], entry["id"]) == (True, 3, first.header["id"])
    assert "added: it ran on the same data" in " ".join(statement.text(said).split())
    assert "2 runs, and 3 of earlier searches" in statement.text(said)


def test_a_trial_that_has_not_ended_counts_as_its_whole_plan_for_every_seed(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan(), state="running", seeds=1, steps=3)
    second = made(tmp_path / "second", after=(str(first.path),))
    assert Result.load(second).epsilon_search.upper == pytest.approx(composed(2), rel=1e-4)
    assert verify(second.path)["ok"]


def test_each_search_counts_once_over_however_many_ways_it_is_reached(tmp_path: Path) -> None:
    root = made(tmp_path / "root")
    add(root, 0, good_plan())
    left, right = made(tmp_path / "left", after=str(root.path)), made(tmp_path / "right", after=str(root.path))
    add(left, 0, good_plan())
    add(root, 1, good_plan())  # right has not seen it, left neither; the end sees the latest state of root
    add(right, 0, good_plan())
    for paths, runs in (((left, right), 6), ((left, right, root), 8), ((root, left, right), 8)):
        end = made(
            tmp_path / f"end-{'-'.join(one.path.name for one in paths)}", after=tuple(str(p.path) for p in paths)
        )
        found = Result.load(end)
        assert len(found.earlier) == 3
        assert found.epsilon_search.upper == pytest.approx(composed(runs), rel=1e-4)
        assert verify(end.path)["ok"]


def test_two_copies_that_went_different_ways_are_not_taken_for_one(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    shutil.copytree(first.path, tmp_path / "copy")
    copy = RunDirectory.open(tmp_path / "copy")
    add(first, 1, good_plan())
    add(copy, 1, good_plan(), state="failed", steps=3)
    with pytest.raises(InvalidValue, match="went different ways"):
        made(tmp_path / "second", after=(str(first.path), str(copy.path)))


def test_the_spending_stands_when_the_earlier_directory_is_gone(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    second = made(tmp_path / "second", after=str(first.path))
    add(second, 0, good_plan())
    before = Result.load(second).epsilon_search
    shutil.rmtree(first.path)
    report = verify(second.path)
    assert report["ok"] and report["earlier"][0]["original"] == "gone"
    assert Result.load(second).epsilon_search == before
    third = made(tmp_path / "third", after=str(second.path))
    assert [each.direct for each in Result.load(third).earlier] == [True, False]
    assert Result.load(third).epsilon_search.upper == pytest.approx(before.upper, rel=1e-6)


def test_an_original_that_went_on_is_no_problem_and_one_that_was_edited_is(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    second = made(tmp_path / "second", after=str(first.path))
    add(first, 1, good_plan())
    report = verify(second.path)
    assert report["ok"] and "went on by 3 lines" in report["earlier"][0]["original"]
    shutil.rmtree(first.path)
    rewritten = RunDirectory.create(first.path, search_for().to_json())
    assert "another search" in verify(second.path)["earlier"][0]["original"]
    rewritten.header["id"] = first.header["id"]
    rewritten.write_json("raydp.json", rewritten.header)
    report = verify(second.path)
    assert not report["ok"] and report["earlier"][0]["original"] == "differs"


def _edit_ledger(copy: Path) -> None:
    path = copy / "trials/t0000/seed-0/ledger.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:-3]) + b"\n")


def _edit_plan(copy: Path) -> None:
    path = copy / "trials/t0000/plan.json"
    path.write_text(path.read_text().replace('"noise_multiplier": 1', '"noise_multiplier": 9').replace("0.05", "0.04"))


def _cut_journal(copy: Path) -> None:
    path = copy / "journal.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:-2]) + b"\n")


TAMPERING = {
    "a ledger cut": _edit_ledger,
    "a ledger gone": lambda copy: (copy / "trials/t0000/seed-1/ledger.jsonl").unlink(),
    "a plan edited": _edit_plan,
    "a plan gone": lambda copy: (copy / "trials/t0000/plan.json").unlink(),
    "a journal cut": _cut_journal,
    "a definition edited": lambda copy: (copy / "raydp.json").write_text(
        (copy / "raydp.json").read_text().replace('"tp_topk"', '"dp_sgd"')
    ),
    "everything gone": shutil.rmtree,
}


@pytest.mark.parametrize("what", TAMPERING)
def test_tampering_with_carried_records_is_found(tmp_path: Path, what: str) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    second = made(tmp_path / "second", after=str(first.path))
    add(second, 0, good_plan())
    assert verify(second.path)["ok"]
    TAMPERING[what](second.path / EARLIER / first.header["id"])
    report = verify(second.path)
    assert not report["ok"]
    assert report["problems"] or report["earlier"][0]["problems"]
    with_ledger = what.startswith("a ledger")
    if with_ledger:  # what ran is unknown then, and was at most the plan
        assert report["search"]["epsilon"]["pld"]["upper"] == pytest.approx(composed(4), rel=1e-4)


def test_a_journal_that_does_not_say_what_is_carried_is_found_and_cannot_go_on(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    second = RunDirectory.create(tmp_path / "second", search_for(after=str(first.path)).to_json())
    add(second, 0, good_plan())
    report = verify(second.path)
    assert not report["ok"] and "does not say what that spent" in " ".join(report["problems"])
    with pytest.raises(CorruptFile, match="does not say"):
        session_in(second.path, stored_search(second))


def test_a_statement_that_says_less_is_found(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    second = made(tmp_path / "second", after=str(first.path))
    add(second, 0, good_plan())
    path, _ = statement.write(second)
    assert verify(second.path)["ok"]
    said = json.loads(path.read_text())
    said["everything"]["epsilon"]["pld"]["upper"] = composed(2)
    path.write_text(json.dumps(said))
    assert "everything costs" in " ".join(verify(second.path)["problems"])
    path.write_text(json.dumps({**said, "earlier": []}))
    assert "leaves out small" in " ".join(verify(second.path)["problems"])


def test_a_crash_while_copying_is_made_good_before_anything_is_proposed(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    search = search_for(after=str(first.path))
    second = RunDirectory.create(tmp_path / "second", search.to_json())
    half = second.path / EARLIER / first.header["id"]
    half.mkdir(parents=True)
    (half / "journal.jsonl").write_bytes(b"{")
    assert session_in(second.path, search).directory.events()[0]["event"] == "carried"
    assert Result.load(second).epsilon_search.upper == pytest.approx(composed(2), rel=1e-4)
    events = second.events()
    session_in(second.path, search)
    assert second.events() == events


# Whose people.


def test_other_peoples_spending_is_named_and_not_added(tmp_path: Path) -> None:
    mine, theirs = write_private(tmp_path / "mine", train=300), write_private(tmp_path / "theirs", train=300)
    _shift(Path(theirs))
    first = made(tmp_path / "first", data=theirs)
    add(first, 0, good_plan())
    second = made(tmp_path / "second", data=mine, after=str(first.path))
    add(second, 0, good_plan())
    found = Result.load(second)
    assert found.epsilon_search.upper == pytest.approx(composed(2), rel=1e-4) and found.epsilon_carried is None
    said = checked(second)
    (entry,) = said["earlier"]
    assert not entry["counted"] and "share no example" in entry["why"] and entry["data"] == theirs
    assert entry["epsilon"]["pld"]["upper"] == pytest.approx(composed(2), rel=1e-4)
    assert "people of other data" in {item["what"] for item in said["not_covered"]}
    assert "NOT added here" in statement.text(said) and "without small" in found.summary()
    report = verify(second.path)
    assert report["ok"] and report["earlier"][0]["people"] == "compared"
    _shift(Path(theirs), back=True)
    assert not verify(second.path)["ok"]


def _shift(directory: Path, *, back: bool = False) -> None:
    """Make every image another one, or undo that."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory / "train.parquet"
    table = pq.read_table(path)
    pixels = np.asarray(table.column("image").to_pylist(), dtype=np.uint8) + np.uint8(255 if back else 1)
    images = pa.array(pixels.tolist(), pa.list_(pa.uint8(), 64))
    pq.write_table(table.set_column(0, "image", images), path)


def test_one_shared_example_is_enough_and_so_is_data_that_cannot_be_read(tmp_path: Path) -> None:
    """A file with some rows more has another fingerprint, and the same people."""
    mine, theirs = write_private(tmp_path / "mine", train=300), write_private(tmp_path / "theirs", train=310)
    first = made(tmp_path / "first", data=theirs)
    add(first, 0, good_plan())
    for path, why in ((tmp_path / "second", "share examples"), (tmp_path / "third", "cannot be read")):
        second = made(path, data=mine, after=str(first.path))
        (each,) = earlier_of(second)
        assert each.counted and why in each.why
        assert Result.load(second).epsilon_search.upper == pytest.approx(composed(2), rel=1e-4)
        shutil.rmtree(theirs, ignore_errors=True)


def test_contents_that_cannot_be_compared_count_unless_they_were_declared_public(tmp_path: Path) -> None:
    for selection, counted in (("composition", True), ("public", False)):
        first = made(tmp_path / f"first-{selection}", data="mnist5k", data_limit=200, model=None, selection=selection)
        add(first, 0, good_plan())
        second = made(tmp_path / f"second-{selection}", after=str(first.path))
        (each,) = earlier_of(second)
        assert each.counted is counted, each.why


def test_members_of_one_family_pay_for_their_own_runs(tmp_path: Path) -> None:
    family = {"data": "regression", "data_limit": 64, "metric": "parameter_error"}
    first = made(tmp_path / "first", **family)
    add(first, 0, good_plan())
    second = made(tmp_path / "second", **family, after=str(first.path))
    add(second, 0, good_plan())
    assert Result.load(second).epsilon_search.upper == pytest.approx(composed(2), rel=1e-4)  # of each member: 1 + 1
    assert verify(second.path)["search"]["epsilon"]["pld"]["upper"] == pytest.approx(composed(2), rel=1e-4)
    other = made(tmp_path / "other", **{**family, "data_limit": 65}, after=str(first.path))
    add(other, 0, good_plan())
    assert Result.load(other).epsilon_search.upper == pytest.approx(composed(3), rel=1e-4)  # of each: 1, and all 2


def test_compositions_with_what_is_carried() -> None:
    one = Mechanism(noise_multiplier=1.0, sample_rate=0.1, steps=1)
    two = Mechanism(noise_multiplier=1.0, sample_rate=0.1, steps=2)
    assert compositions([], family=False, carried=((None, (one,)),)) == ((one,),)
    assert compositions([(0, (one,))], family=True, carried=((1, (one,)), (None, ()))) == ((one,),)
    assert compositions([(0, (one,))], family=True, carried=((0, (one,)),)) == ((two,),)
    assert compositions([(0, (one,)), (1, (one,))], family=True, carried=((None, (one,)),)) == ((two,),)


def test_a_private_holdouts_releases_are_carried_too(tmp_path: Path) -> None:
    private = write_private(tmp_path / "private")
    values = {"data": private, "holdout_budget": HOLDOUT_BUDGET, "trials": 1, "metric": "accuracy"}
    first = session_in(tmp_path / "first", small_search(**values))
    drive(first)
    second = session_in(tmp_path / "second", small_search(**values, after=str(tmp_path / "first")))
    alone = Result.load(tmp_path / "first").epsilon_holdout
    assert alone is not None and Result.load(tmp_path / "second").epsilon_holdout == alone
    drive(second)
    result = Result.load(tmp_path / "second")
    assert result.epsilon_holdout is not None
    (released,) = (
        each.mechanisms[0]
        for record in result.trials
        if (each := second.directory.plan(record.key, "holdout-plan.json"))
    )
    both = Mechanism(noise_multiplier=released.noise_multiplier, sample_rate=1.0, steps=2 * released.steps)
    assert result.epsilon_holdout.upper == pytest.approx(
        accountants.epsilon([both], delta=HOLDOUT_BUDGET.delta).upper, rel=1e-4
    )
    said = checked(second.directory)
    assert said["holdout"]["epsilon"]["pld"]["upper"] == result.epsilon_holdout.upper
    assert said["holdout"]["earlier_reports"] == released.steps and said["earlier"][0]["holdout"] is True
    report = verify(tmp_path / "second")
    assert report["ok"], report
    assert report["holdout"]["epsilon"]["pld"]["upper"] == result.epsilon_holdout.upper
    copy = tmp_path / "second" / EARLIER / first.directory.header["id"]
    (copy / "trials/t0000/seed-0/holdout-ledger.jsonl").unlink()
    assert not verify(tmp_path / "second")["ok"]


# Which rules allow it.


def test_random_stopping_neither_learns_nor_is_learned_from_on_the_same_people(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="about this search's trials alone"):
        small_search(selection="geometric:5", after="runs/x")
    first = RunDirectory.create(tmp_path / "first", small_search(selection="geometric:5").to_json())
    with pytest.raises(InvalidValue, match="released its result under random stopping"):
        carrying.found(small_search(after=str(first.path)))


def test_what_is_called_public_does_not_go_on_from_private_runs_on_it(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    with pytest.raises(InvalidValue, match="spent on private examples of the same data"):
        carrying.found(search_for(selection="public", after=str(first.path)))
    again = RunDirectory.create(tmp_path / "again", search_for(selection="public").to_json())
    (each,) = carrying.found(search_for(selection="public", after=str(again.path)))
    assert each.counted


def test_insecure_noise_is_not_gone_on_from(tmp_path: Path) -> None:
    first = made(tmp_path / "first", insecure_seed=1)
    with pytest.raises(InvalidValue, match="insecure_seed"):
        carrying.found(search_for(after=str(first.path)))


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be the run directory of an earlier search"):
        carrying.found(search_for(after=str(tmp_path / "nowhere")))
    with pytest.raises(InvalidValue, match="must name run directories"):
        search_for(after=(3,))


@pytest.mark.parametrize("final", ["rest", "all"])
def test_tuning_on_a_subsample_composes_with_what_ran_before_on_everybody(final: str) -> None:
    rule = Subsample(fraction=0.1, final=final)
    tuning = [Mechanism(noise_multiplier=2.0, sample_rate=0.1, steps=100)]
    last = [Mechanism(noise_multiplier=1.5, sample_rate=0.1, steps=50)]
    before = [Mechanism(noise_multiplier=3.0, sample_rate=0.1, steps=200)]
    alone = subsample_bound(tuning, last, rule, BUDGET)
    found = subsample_bound(tuning, last, rule, BUDGET, before=before)
    least = accountants.epsilon(before, delta=BUDGET.delta).lower
    most = accountants.epsilon([*before, *tuning, *last], delta=BUDGET.delta).upper
    assert max(alone.epsilon, least) < found.epsilon <= most * (1 + 1e-3)
    assert subsample_bound([], [], rule, BUDGET, before=before).epsilon >= (
        accountants.epsilon(before, delta=BUDGET.delta).lower * (1 - 1e-3)
    )


def test_a_search_on_a_subsample_states_what_ran_before(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    second = made(tmp_path / "second", selection="subsample:0.1", after=str(first.path))
    found = Result.load(second)
    assert found.epsilon_released.upper >= accountants.epsilon(good_plan().mechanisms * 2, delta=1e-5).lower * 0.999
    assert checked(second)["selection"]["released"]["epsilon"] == found.epsilon_released.upper
    assert verify(second.path)["released"]["epsilon"] == found.epsilon_released.upper


# What the sampler learns.


def _told(path: Path, search: Search) -> list[tuple[float, float]]:
    """(learning rate, accuracy) of everything that the sampler of a session has been told."""
    trials = session_in(path, search)._sampling._study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    return [(trial.params["learning_rate"], trial.value) for trial in trials]


def _earlier_with(path: Path, rates: list[float], **changes: Any) -> RunDirectory:
    directory = made(path, **changes)
    for number, rate in enumerate(rates):
        add(directory, number, good_plan(), config={"learning_rate": rate}, score=rate / 10)
    return directory


SPACE = {"learning_rate": tune.loguniform(0.1, 4.0)}


def test_the_sampler_is_told_finished_trials_that_fit_and_the_others_are_counted(tmp_path: Path) -> None:
    first = _earlier_with(tmp_path / "first", [0.5, 1.0, 8.0], space={"learning_rate": tune.loguniform(0.1, 10.0)})
    search = search_for(space=SPACE, sampler="tpe", after=str(first.path))
    assert _told(tmp_path / "second", search) == [(0.5, 0.05), (1.0, 0.1)]
    assert _told(tmp_path / "second", search) == [(0.5, 0.05), (1.0, 0.1)]  # also when it goes on
    lessons = carrying.lessons(search, carrying.found(search))
    assert lessons.passed_over == {"outside of the space": 1}
    assert "learns from 2 finished trials" in lessons.summary("tpe") and "1 do not fit" in lessons.summary("tpe")
    assert _told(tmp_path / "third", search_for(space=SPACE, after=str(first.path))) == []  # random
    assert "learns nothing" in carrying.lessons(search, ()).summary("random")


def test_a_hyperparameter_that_was_fixed_or_left_out_has_its_value(tmp_path: Path) -> None:
    first = _earlier_with(tmp_path / "first", [1.0], fixed={"epochs": 2, "batch_size": 256})
    space = {**SPACE, "epochs": tune.randint(1, 5), "active_ratio": tune.uniform(0.01, 1.0)}
    search = search_for(space=space, fixed={"batch_size": 256}, sampler="tpe", after=str(first.path))
    ((config, values),) = carrying.lessons(search, carrying.found(search)).trials
    assert config["epochs"] == 2 and config["active_ratio"] > 0 and values == (0.1,)
    other = search_for(space=SPACE, method="dp_sgd", sampler="tpe", after=str(first.path))
    assert carrying.lessons(other, carrying.found(other)).passed_over == {"of another method": 1}
    unmeasured = search_for(space=SPACE, metric="loss", sampler="tpe", after=str(first.path))
    assert carrying.lessons(unmeasured, carrying.found(unmeasured)).passed_over == {"without loss": 1}


def test_tpe_begins_to_model_where_the_earlier_search_ended() -> None:
    """Its first ten trials are random. Told of forty, it proposes near the best of them at once."""
    space = Space.from_definition(SPACE)

    def score(rate: float) -> float:
        return -abs(math.log(rate))

    def proposed(told: list[float]) -> list[float]:
        sampling = Sampling(space=space, sampler="tpe", seed=3, directions=["max"])
        sampling.learn([({"learning_rate": rate}, [score(rate)]) for rate in told])
        proposals = []
        for number in range(8):
            proposal = sampling.ask()
            assert proposal is not None and proposal.number == number
            proposals.append(float(proposal.config["learning_rate"]))
        return proposals

    grid = [float(rate) for rate in np.geomspace(0.1, 4.0, 40)]
    first, informed = proposed([]), proposed(grid)
    assert proposed(grid[:9]) == first  # nine are too few for TPE's model
    assert np.median([score(rate) for rate in informed]) > np.median([score(rate) for rate in first]) / 2


def test_learning_comes_first_and_has_no_meaning_for_a_grid() -> None:
    sampling = Sampling(space=Space.from_definition(SPACE), sampler="tpe", seed=0, directions=["max"])
    sampling.ask()
    with pytest.raises(InvalidValue, match="must come first"):
        sampling.learn([({"learning_rate": 1.0}, [0.5])])


def test_earlier_trials_change_no_number_and_a_restart_changes_no_proposal(tmp_path: Path) -> None:
    first = _earlier_with(tmp_path / "first", [0.5 + 0.1 * index for index in range(12)])
    search = small_search(space=SPACE, sampler="tpe", trials=3, after=str(first.path))
    whole = session_in(tmp_path / "whole", search)
    assert drive(whole) == ["t0000", "t0001", "t0002"]
    assert session_in(tmp_path / "parts", search).next_task() is not None
    shutil.rmtree(first.path)  # what was taken over is enough to go on
    assert drive(session_in(tmp_path / "parts", search))[-1] == "t0002"
    configs = [
        [record.config for record in RunDirectory.open(tmp_path / name).records().values()][:1]
        for name in ("whole", "parts")
    ]
    assert configs[0] == configs[1]
    assert verify(tmp_path / "whole")["ok"] and verify(tmp_path / "parts")["ok"]
    assert len(Result.load(tmp_path / "whole").trials) == 3


# Where it is shown, and how it travels.


def test_the_running_total_begins_with_what_is_carried(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    total = session_in(tmp_path / "second", search_for(after=str(first.path)))._total()
    assert total.upper >= accountants.epsilon(good_plan().mechanisms * 2, delta=1e-5).lower


def test_the_plan_shows_what_was_spent_and_writes_nothing(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    before = sorted(tmp_path.rglob("*"))
    search = search_for(after=str(first.path))
    found, without = preview(search, proposals=1), preview(search_for(), proposals=1)
    assert sorted(tmp_path.rglob("*")) == before
    assert found["earlier"]["runs"] == 2 and without["earlier"] is None
    assert found["earlier"]["epsilon_already_spent_on_these_people"] == pytest.approx(composed(2), rel=1e-4)
    name = "epsilon_of_the_search_if_all_runs_finish"
    assert found["cost"][name] > without["cost"][name]


def test_a_definition_travels_and_one_without_it_is_as_it_was(tmp_path: Path) -> None:
    assert "after" not in small_search().to_json()
    search = small_search(after="runs/x")
    assert search.to_json()["after"] == [str(Path("runs/x").resolve())]
    again = Search.from_json(json.loads(json.dumps(search.to_json())))
    assert again.to_json() == search.to_json()
    assert small_search().with_overrides({"after": "runs/x,runs/y"}).after == ("runs/x", "runs/y")
    assert small_search().with_overrides({"after": "runs/x"}).after == ("runs/x",)


def test_a_fetched_copy_holds_what_is_carried(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    second = made(tmp_path / "second", after=str(first.path))
    add(second, 0, good_plan())
    pack(second, tmp_path / "copy.tar.gz", source="there")
    copy = unpack(tmp_path / "copy.tar.gz", tmp_path / "fetched")
    assert verify(copy.path)["ok"]
    assert Result.load(copy).epsilon_search == Result.load(second).epsilon_search


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(tmp_path / "first")
    add(first, 0, good_plan())
    file = tmp_path / "search.py"
    file.write_text(
        "from ray import tune\nimport raydp\n\nsearch = raydp.Search(name='next', data='digits', model='mlp', "
        "budget=raydp.Budget(epsilon=1.0, delta=1e-5), space={'learning_rate': tune.loguniform(0.1, 4.0)}, "
        "fixed={'epochs': 1, 'batch_size': 256})\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(file), "--proposals", "0", "--after", str(first.path)])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "earlier | small" in printed and "epsilon already spent on these people" in printed
    second = made(tmp_path / "second", after=str(first.path))
    add(second, 0, good_plan())
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(second.path)])
    assert ended.value.code == 0
    assert "with the earlier ones" in " ".join(capsys.readouterr().out.split())
