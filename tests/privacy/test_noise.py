import copy
import errno
import json
import os
import pickle
import stat
import traceback

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from raydp.errors import CorruptFile, InvalidValue, RaydpError
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey, poisson_sample

SECRET = bytes(range(32))
SCALE = 2.0**22  # standard deviation of the noise on a phase's grid, or thereabouts
PINNED_WORD, PINNED_NORMALS = 12752864018142994690, [-5796865, 2168127, -3648636]
items = st.one_of(st.text(max_size=8), st.integers())


def make_phase(name="train", *, population=1000, batch_size=50, steps=400):
    spec = PhaseSpec(name=name, steps=steps, batch_size=batch_size, population=population, clip_norm=1.0)
    return Phase(spec=spec, noise_multiplier=1.0)


def test_same_address_same_draw_whoever_asks():
    first, second = NoiseKey(SECRET), NoiseKey(SECRET)
    second.rounded_normals(100, SCALE, "noise", "other", 3)  # an earlier draw leaves no trace
    mine, yours = (key.rounded_normals(20, SCALE, "noise", "train", 7) for key in (first, second))
    np.testing.assert_array_equal(mine, yours)
    assert mine.dtype == np.int64
    mine, yours = (key.derive("run", 1).rounded_normals(9, SCALE, "x") for key in (first, second))
    np.testing.assert_array_equal(mine, yours)
    assert len(np.intersect1d(first.rounded_normals(19, SCALE, "a"), first.rounded_normals(20, SCALE, "a"))) == 0


def test_the_draws_are_pinned():
    """Replaying a step under a later release must draw the same noise: the derivation is part of the file format."""
    key = NoiseKey(SECRET)
    assert key.generator("sample", "train", 0).words(1).tolist() == [PINNED_WORD]
    assert key.rounded_normals(3, SCALE, "noise", "train", 0).tolist() == PINNED_NORMALS


@given(st.lists(items, min_size=1, max_size=4), st.lists(items, min_size=1, max_size=4))
def test_different_addresses_have_different_streams(first, second):
    key = NoiseKey(SECRET)
    same = [(type(a), a) for a in first] == [(type(b), b) for b in second]
    draws = [key.generator(*address).words(2) for address in (first, second)]
    assert np.array_equal(*draws) == same


@pytest.mark.parametrize(
    ("first", "second"),
    [(("ab",), ("a", "b")), ((1, 23), (12, 3)), (("1",), (1,)), (("a", ""), ("a",)), ((0,), (-1,)), ((2**70,), (0,))],
)
def test_addresses_are_encoded_without_collisions(first, second):
    key = NoiseKey(SECRET)
    assert key.generator(*first).words(1) != key.generator(*second).words(1)


def test_addresses_and_keys_are_independent():
    size = 200_000
    key = NoiseKey(SECRET)
    draws = [key.rounded_normals(size, SCALE, "noise", "train", step) for step in range(4)]
    draws += [
        NoiseKey(SECRET[::-1]).rounded_normals(size, SCALE, "noise", "train", 0),
        key.derive("noise").rounded_normals(size, SCALE, "train", 0),
    ]
    correlation = np.corrcoef(np.stack(draws))
    assert np.abs(correlation - np.eye(6)).max() < 5 / np.sqrt(size)
    squares = np.corrcoef(np.square(np.stack(draws)))
    assert np.abs(squares - np.eye(6)).max() < 5 / np.sqrt(size)


@pytest.mark.parametrize("address", [(), (1.5,), (True,), (None,), (b"x",), (np.float32(1),)])
def test_bad_addresses_are_refused(address):
    with pytest.raises(InvalidValue, match="address"):
        NoiseKey(SECRET).generator(*address)


def test_a_generated_key_is_new_and_an_insecure_one_is_marked(tmp_path):
    assert NoiseKey.generate().generator("a").random() != NoiseKey.generate().generator("a").random()
    assert not NoiseKey.generate().is_insecure
    insecure = NoiseKey.insecure(3)
    assert insecure.generator("a").random() == NoiseKey.insecure(3).generator("a").random()
    assert insecure.generator("a").random() != NoiseKey.insecure(4).generator("a").random()
    insecure.save(tmp_path / "key")
    for key in (insecure, insecure.derive("x"), NoiseKey.load(tmp_path / "key")):
        assert key.is_insecure
        assert "insecure" in repr(key)


def shown(key):
    """Everything that a careless program could print of a key."""
    yield repr(key)
    yield str(key)
    yield f"{key} {key!r} {[key]} { {'key': key} }"
    yield json.dumps({"key": key}, default=str)
    for action in (
        lambda: json.dumps({"key": key}),
        lambda: pickle.dumps(key),
        lambda: copy.copy(key),
        lambda: copy.deepcopy({"key": key}),
        lambda: vars(key),
        lambda: bytes(key),
        lambda: key.derive(key),
        lambda: NoiseKey(SECRET[:-1]),
        lambda: NoiseKey(SECRET.hex()),
    ):
        with pytest.raises((RaydpError, TypeError)) as caught:
            action()
        yield "".join(traceback.format_exception(caught.value))


def test_the_secret_is_never_shown():
    forms = [SECRET.hex()[:20], repr(SECRET[8:20])[2:-1], "".join(map(chr, SECRET[:-1]))]
    for text in shown(NoiseKey(SECRET)):
        assert not any(form in text for form in forms)


def test_pickling_says_what_to_do_instead():
    with pytest.raises(RaydpError, match=r"NoiseKey\.load"):
        pickle.dumps(NoiseKey(SECRET))


def test_save_and_load(tmp_path):
    path = tmp_path / "run" / "key"
    path.parent.mkdir()
    old = os.umask(0)
    try:
        NoiseKey(SECRET).save(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]
    loaded = NoiseKey.load(path)
    assert loaded.generator("a").random() == NoiseKey(SECRET).generator("a").random()
    with pytest.raises(InvalidValue, match="must not exist yet"):
        NoiseKey.generate().save(path)
    assert NoiseKey.load(path).generator("a").random() == loaded.generator("a").random()
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_a_full_disk_leaves_no_part_of_the_secret_behind(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RaydpError, match=r"No space left on device.*Free space"):
            NoiseKey(SECRET).save(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RaydpError, match="directory exist"):
        NoiseKey(SECRET).save(tmp_path / "absent" / "key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    NoiseKey(SECRET).save(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(InvalidValue, match="owner only") as caught:
        NoiseKey.load(tmp_path / "key")
    assert SECRET.hex() not in str(caught.value)


def test_damaged_or_missing_key_files(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(InvalidValue, match="start a new run"):
        NoiseKey.load(path)
    NoiseKey(SECRET).save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:40], whole.replace(b"layout 3", b"layout 2"), whole[:-3] + b"zz\n"):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile) as caught:
            NoiseKey.load(path)
        assert SECRET.hex()[:16] not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(InvalidValue, match="regular file"):
        NoiseKey.load(tmp_path)


def test_destroy_overwrites_before_it_unlinks(tmp_path):
    path = tmp_path / "key"
    NoiseKey(SECRET).save(path)
    (tmp_path / "key.new").write_bytes(path.read_bytes())  # what a crash inside save leaves
    second_name = tmp_path / "hard-link"
    os.link(path, second_name)
    NoiseKey.destroy(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["hard-link"]
    assert set(second_name.read_bytes()) == {0}
    NoiseKey.destroy(path)  # already gone


class TestPoissonSample:
    def test_mean_and_variance_of_the_batch_size(self):
        phase, key = make_phase(steps=4000), NoiseKey(SECRET)
        sizes = np.array([len(poisson_sample(key, phase, step)) for step in range(phase.steps)])
        mean, variance = 50, 50 * (1 - 0.05)
        assert sizes.mean() == pytest.approx(mean, abs=4 * np.sqrt(variance / len(sizes)))
        assert sizes.var(ddof=1) == pytest.approx(variance, rel=4 * np.sqrt(2 / len(sizes)))
        assert (
            stats.chisquare(
                np.bincount(np.clip(sizes, 35, 65), minlength=66)[35:],
                len(sizes) * np.diff(np.concatenate([[0], stats.binom.cdf(np.arange(35, 65), 1000, 0.05), [1]])),
            ).pvalue
            > 1e-4
        )

    def test_every_example_takes_part_equally_often_and_independently(self):
        phase, key = make_phase(population=20, batch_size=5, steps=20_000), NoiseKey(SECRET)
        taken = np.zeros((phase.steps, 20))
        for step in range(phase.steps):
            taken[step, poisson_sample(key, phase, step)] = 1
        np.testing.assert_allclose(taken.mean(axis=0), 0.25, atol=5 * np.sqrt(0.25 * 0.75 / phase.steps))
        bound = 5 / np.sqrt(phase.steps)
        assert np.abs(np.corrcoef(taken.T) - np.eye(20)).max() < bound  # between examples
        lagged = np.corrcoef(taken[1:, 0], taken[:-1, 0])[0, 1]  # between steps
        assert abs(lagged) < bound

    def test_indices_are_sorted_unique_int64_inside_the_population(self):
        sample = poisson_sample(NoiseKey(SECRET), make_phase(), 3)
        assert sample.dtype == np.int64
        assert (np.diff(sample) > 0).all()
        assert sample.min() >= 0 and sample.max() < 1000

    def test_exactly_as_many_batches_as_steps_empty_ones_included(self):
        """An expected batch of one example is empty in 1/e of the steps (Opacus drops those)."""
        phase = make_phase(population=1000, batch_size=1, steps=1000)
        samples = [poisson_sample(NoiseKey(SECRET), phase, step) for step in range(phase.steps)]
        empty = sum(len(sample) == 0 for sample in samples)
        assert empty / phase.steps == pytest.approx(np.exp(-1), abs=4 * np.sqrt(np.exp(-1) / phase.steps))
        for step in (-1, phase.steps):
            with pytest.raises(InvalidValue, match=r"train\.step"):
                poisson_sample(NoiseKey(SECRET), phase, step)

    def test_rate_one_takes_everyone(self):
        phase = make_phase(population=30, batch_size=30)
        np.testing.assert_array_equal(poisson_sample(NoiseKey(SECRET), phase, 0), np.arange(30))

    def test_a_replay_is_identical_and_everything_else_differs(self):
        key, phase = NoiseKey(SECRET), make_phase()
        sample = poisson_sample(key, phase, 5)
        np.testing.assert_array_equal(sample, poisson_sample(NoiseKey(SECRET), make_phase(), 5))
        others = [
            poisson_sample(key, phase, 6),
            poisson_sample(key, make_phase("warmup"), 5),
            poisson_sample(NoiseKey(SECRET[::-1]), phase, 5),
            poisson_sample(key.derive("seed", 1), phase, 5),
        ]
        for other in others:
            # independent samples of 50 of 1000 share 2.5 examples on average
            assert len(np.intersect1d(sample, other)) < 15
