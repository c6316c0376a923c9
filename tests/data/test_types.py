import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from raydp.data import PrivateAccess, PrivateData, PublicData
from raydp.errors import InvalidValue, LedgerRefusal, RaydpError
from raydp.privacy.budget import Budget
from raydp.privacy.ledger import Ledger, LedgerWriter
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey, poisson_sample
from raydp.privacy.plan import Interval, Plan

N = 200


def arrays(count=N):
    images = np.arange(count * 8, dtype=np.int64).astype(np.uint8).reshape(count, 2, 2, 2)
    return {"name": "toy", "inputs": images, "targets": np.arange(count) % 5, "num_classes": 5}


def make_plan(*, batch_size=10, steps=4, population=N):
    spec = PhaseSpec(name="train", steps=steps, batch_size=batch_size, population=population, clip_norm=1.0)
    bounds = Interval(lower=0.9, estimate=0.95, upper=1.0, accountant="pld")
    phase = Phase(spec=spec, noise_multiplier=2.0)
    return Plan(budget=Budget(epsilon=1, delta=1e-5), phases=(phase,), certificate={"pld": bounds})


@pytest.fixture
def key():
    return NoiseKey.insecure(0)


@pytest.fixture
def ledger(tmp_path):
    with LedgerWriter(tmp_path / "ledger.jsonl", make_plan()) as writer:
        yield writer


class TestSample:
    def test_a_batch_is_the_poisson_sample_and_is_in_the_ledger(self, key, ledger):
        private, phase = PrivateData(**arrays()), make_plan().phase("train")
        batch = private.sample(key=key, phase=phase, step=0, ledger=ledger)
        np.testing.assert_array_equal(batch.indices, poisson_sample(key, phase, 0))
        np.testing.assert_array_equal(batch.inputs, arrays()["inputs"][batch.indices.numpy()])
        np.testing.assert_array_equal(batch.targets, batch.indices % 5)
        assert (batch.inputs.dtype, batch.targets.dtype, batch.indices.dtype) == (torch.uint8, torch.int64, torch.int64)
        assert len(batch) == len(batch.indices)
        assert ledger.ledger.steps("train") == 1

    def test_a_replay_is_the_same_batch_and_counts_once(self, key, ledger):
        phase = make_plan().phase("train")
        first, second = (PrivateData(**arrays()).sample(key=key, phase=phase, step=0, ledger=ledger) for _ in range(2))
        assert torch.equal(first.inputs, second.inputs)
        assert ledger.ledger.steps("train") == 1

    def test_exactly_t_batches_and_no_data_is_read_when_the_ledger_refuses(self, key, ledger):
        private, phase = PrivateData(**arrays()), make_plan().phase("train")
        for step in range(4):
            private.sample(key=key, phase=phase, step=step, ledger=ledger)
        with pytest.raises(LedgerRefusal, match="overspend"):
            private.sample(key=key, phase=phase, step=4, ledger=ledger)
        ledger.commit()
        assert Ledger.read(ledger.path).steps("train") == 4

    def test_an_empty_batch_is_a_batch(self, key, tmp_path):
        plan = make_plan(batch_size=1, steps=50)
        private = PrivateData(**arrays())
        with LedgerWriter(tmp_path / "ledger.jsonl", plan) as ledger:
            batches = [
                private.sample(key=key, phase=plan.phase("train"), step=step, ledger=ledger) for step in range(50)
            ]
        empty = next(batch for batch in batches if len(batch) == 0)
        assert empty.inputs.shape == (0, 2, 2, 2)
        assert empty.inputs.dtype == torch.uint8
        assert Ledger.read(tmp_path / "ledger.jsonl").steps("train") == 50

    def test_a_plan_for_other_data_is_refused(self, key, ledger):
        with pytest.raises(InvalidValue, match=r"train\.population = 200: must be the 199 examples"):
            PrivateData(**arrays(199)).sample(key=key, phase=make_plan().phase("train"), step=0, ledger=ledger)

    def test_a_phase_that_is_not_the_ledgers_is_refused(self, key, ledger):
        """Else a batch of rate 1 could be taken under an entry of rate 0.05."""
        phase = make_plan(batch_size=N).phase("train")
        with pytest.raises(LedgerRefusal, match="not in the plan"):
            PrivateData(**arrays()).sample(key=key, phase=phase, step=0, ledger=ledger)
        assert ledger.ledger.steps("train") == 0


class TestRefusals:
    @pytest.mark.parametrize(
        "access",
        [
            lambda data: data[0],
            lambda data: data[:3],
            lambda data: list(data),
            lambda data: next(iter(data)),
            lambda data: dict(data),
            lambda data: np.asarray(data),
            lambda data: next(iter(DataLoader(data))),
            lambda data: data.inputs,
            lambda data: data.images,
            lambda data: data.labels,
            lambda data: data.data,
            lambda data: data.targets,
            lambda data: 3 in data,
        ],
    )
    def test_examples_have_no_other_way_out(self, access):
        with pytest.raises(PrivateAccess, match=r"\.sample\(.*\.non_private\(reason\)") as caught:
            access(PrivateData(**arrays()))
        assert isinstance(caught.value, RaydpError) and isinstance(caught.value, TypeError)

    def test_torch_cannot_convert_it_either(self):
        with pytest.raises((PrivateAccess, ValueError)):
            torch.as_tensor(PrivateData(**arrays()))

    def test_nothing_public_returns_examples(self):
        private = PrivateData(**arrays())
        public = {name for name in dir(private) if not name.startswith("_")}
        assert public == {
            "fingerprint",
            "input_shape",
            "name",
            "non_private",
            "num_classes",
            "num_labels",
            "outputs",
            "part",
            "sample",
            "shared_with",
            "shares_with",
        }
        assert not hasattr(private, "__dict__")
        assert not hasattr(private, "inputs")
        assert repr(private) == "PrivateData('toy', 200 images of (2, 2, 2), 5 classes)"

    @pytest.mark.parametrize("action", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_no_pickles_and_copies(self, action):
        with pytest.raises(RaydpError, match=r"raydp\.data\.load"):
            action(PrivateData(**arrays()))


class TestNonPrivate:
    def test_the_escape_is_logged(self, caplog):
        with caplog.at_level(logging.WARNING):
            public = PrivateData(**arrays()).non_private("mean of a public benchmark")
        assert isinstance(public, PublicData)
        assert "non-private" in public.name
        assert len(public) == N
        assert "mean of a public benchmark" in caplog.text
        assert "NON-PRIVATE access to all 200 examples of 'toy'" in caplog.text

    @pytest.mark.parametrize("reason", ["", "  ", None, 3])
    def test_it_wants_a_reason(self, reason):
        with pytest.raises(InvalidValue, match="reason"):
            PrivateData(**arrays()).non_private(reason)


def test_fingerprints_follow_the_content():
    changed_image, changed_label, reshaped = arrays(), arrays(), arrays()
    changed_image["inputs"][7, 1, 1, 1] += 1
    changed_label["targets"] = (np.arange(N) + 1) % 5
    reshaped["inputs"] = reshaped["inputs"].reshape(N, 1, 4, 2)
    prints = [PrivateData(**x).fingerprint for x in (arrays(), changed_image, changed_label, reshaped)]
    assert len(set(prints)) == 4
    assert prints[0] == PrivateData(**arrays()).fingerprint
    assert len(prints[0]) == 64


def features(count=6):
    inputs = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return {"name": "rows", "inputs": inputs, "targets": inputs.sum(axis=1)}


class TestFeatures:
    def test_rows_of_numbers_are_as_protected_as_images(self, key, tmp_path):
        private, plan = PrivateData(**features()), make_plan(batch_size=3, population=6)
        assert repr(private) == "PrivateData('rows', 6 rows of features of (3,), numbers as targets)"
        assert (private.input_shape, private.num_classes, private.outputs) == ((3,), None, 1)
        with LedgerWriter(tmp_path / "ledger.jsonl", plan) as ledger:
            batch = private.sample(key=key, phase=plan.phase("train"), step=0, ledger=ledger)
        assert (batch.inputs.dtype, batch.targets.dtype) == (torch.float32, torch.float32)
        with pytest.raises(PrivateAccess):
            private.targets  # noqa: B018

    def test_shared_rows_are_found(self):
        other = features()
        other["inputs"] = np.concatenate([np.zeros((2, 3), np.float32), other["inputs"][[4]]])
        other["targets"] = np.zeros(3, np.float32)
        assert PrivateData(**features()).shared_with(PublicData(**other)) == [2]

    def test_public_sets_are_positions(self):
        assert PublicData(**features(), sets=np.array([[0, 1], [4, 5]])).sets.tolist() == [[0, 1], [4, 5]]
        for sets in (np.array([[0, 6]]), np.array([0, 1]), np.array([[0.0, 1.0]]), np.zeros((0, 2), np.int64)):
            with pytest.raises(InvalidValue, match=r"rows\.sets"):
                PublicData(**features(), sets=sets)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"inputs": np.full((6, 3), np.nan, np.float32)}, r"rows\.inputs"),
            ({"targets": np.full(6, np.inf, np.float32)}, r"rows\.targets"),
            ({"num_classes": 2}, "no meaning"),
            ({"targets": np.zeros(6, np.int64)}, r"rows\.num_classes"),
        ],
    )
    def test_bad_rows(self, changes, message):
        with pytest.raises(InvalidValue, match=message):
            PublicData(**{**features(), **changes})


@pytest.mark.parametrize("kind", [PublicData, PrivateData])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": np.zeros((N, 2, 2, 2), np.float32)}, r"toy\.inputs = 'torch.float32"),
        ({"inputs": np.zeros((N, 2, 2), np.uint8)}, "4 dimensions"),
        ({"targets": np.zeros(N, np.int32)}, r"toy\.targets = 'torch.int32"),
        ({"targets": np.zeros(N - 1, np.int64)}, "one input for each of 199"),
        ({"num_classes": 4}, r"toy\.targets = 4: must lie in \[0, 4\)"),
        ({"targets": np.full(N, -1)}, r"toy\.targets = -1"),
        ({"inputs": np.zeros((0, 2, 2, 2), np.uint8), "targets": np.zeros(0, np.int64)}, ">= 1 targets"),
        ({"num_classes": 0}, r"toy\.num_classes"),
    ],
)
def test_both_types_check_their_arrays(kind, changes, message):
    with pytest.raises(InvalidValue, match=message):
        kind(**{**arrays(), **changes})
