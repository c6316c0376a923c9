import numpy as np
import pytest
import torch

from raydp import data
from raydp.data import regression
from raydp.errors import InvalidValue, UnknownName


def examples(dataset):
    return dataset.private.non_private("a test of synthetic data")


def test_what_the_paper_draws():
    tasks = regression.LinearTasks()
    generator = np.random.default_rng(0)
    weights = tasks.weights(4000, generator)
    assert tasks.energy == pytest.approx(0.543, abs=1e-3)
    assert (weights**2).sum(axis=1).mean() == pytest.approx(tasks.energy, rel=0.05)
    assert (np.abs(weights) <= tasks.scales).all()
    x, y = tasks.examples(weights[:50], 2000, generator)
    np.testing.assert_allclose(np.linalg.norm(x, axis=2), 8.0, rtol=1e-5)
    np.testing.assert_allclose(np.cov(x[0].T), np.eye(64), atol=0.15)
    residual = y - np.einsum("tnd,td->tn", x, weights[:50])
    assert residual.std() == pytest.approx(1.0, rel=0.02)


def test_members_are_other_people_and_a_member_stays_itself():
    first, again, second = (data.load("regression", limit=64, member=member) for member in (0, 0, 1))
    assert first.private.fingerprint == again.private.fingerprint != second.private.fingerprint
    assert first.holdout_visibility == "synthetic" and first.task == data.task_of("regression") == "regression"
    assert not torch.equal(first.holdout.truth, second.holdout.truth)
    assert len(first.private) == 64 and first.private.input_shape == (64,)


def test_the_hold_out_is_of_the_same_task_and_of_other_examples():
    dataset = data.load("regression", limit=512)
    found, held = examples(dataset), dataset.holdout
    estimate = (found.inputs * found.targets[:, None]).mean(dim=0)
    assert float((estimate - held.truth).norm()) < float((estimate + held.truth).norm())
    residual = held.targets - held.inputs @ held.truth
    assert float(residual.std()) == pytest.approx(1, rel=0.1)
    assert not dataset.private.shared_with(held)


def test_public_tasks_are_data_sets_of_their_own():
    public = data.load_public("regression", limit=5, set_size=32, seed=3)
    assert public.sets.shape == (5, 32) and len(public) == 160
    assert torch.equal(public.inputs, data.load_public("regression", limit=5, set_size=32, seed=4).inputs)
    private = data.load("regression", limit=32).private
    data.check_public(public, private)


def test_options_stand_in_the_name():
    assert data.load("regression:dimension=16,gamma=2").private.input_shape == (16,)
    assert regression.family("regression:gamma=0.75") == regression.LinearTasks(gamma=0.75)
    with pytest.raises(UnknownName, match="dimension"):
        data.load("regression:dimensions=3")
    with pytest.raises(InvalidValue, match="must be a number"):
        data.load("regression:dimension=3.5")
    with pytest.raises(InvalidValue, match=r"regression\.dimension"):
        data.load("regression:dimension=0")


def test_other_sources_have_one_member():
    with pytest.raises(InvalidValue, match="member of digits"):
        data.load("digits", member=1)
