import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydp.data import Augmentation, apply, augment, draw
from raydp.errors import InvalidValue, UnknownName


def generator(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def make_images(n=6, channels=3, height=5, width=7):
    return torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(0)) + 1


def reference(images, parameters):
    """The same with one loop an example, a view and an axis."""
    padding = parameters.padding
    height, width = images.shape[2:]
    views = []
    for image, tops, lefts, flips in zip(images, parameters.top, parameters.left, parameters.flip, strict=True):
        canvas = torch.zeros(image.shape[0], height + 2 * padding, width + 2 * padding)
        canvas[:, padding : padding + height, padding : padding + width] = image
        for top, left, flip in zip(tops, lefts, flips, strict=True):
            view = canvas[:, top : top + height, left : left + width]
            views.append(view.flip(-1) if flip else view)
    return torch.stack(views)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["crop", "crop_flip"]),
    multiplicity=st.integers(1, 4),
    padding=st.integers(0, 5),
    n=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_views_equal_those_of_a_plain_loop(kind, multiplicity, padding, n, seed):
    augmentation = Augmentation(kind=kind, multiplicity=multiplicity, padding=padding)
    images = make_images(n)
    parameters = draw(augmentation, n, generator(seed))
    views = apply(images, parameters)
    assert torch.equal(views, reference(images, parameters))
    assert torch.equal(views, augment(images, augmentation, generator(seed)))


def test_micro_batches_see_the_views_of_the_whole_batch():
    augmentation = Augmentation(kind="crop_flip", multiplicity=3, padding=2)
    images = make_images(7)
    parameters = draw(augmentation, 7, generator())
    whole = apply(images, parameters)
    parts = [apply(images[i : i + 2], parameters[i : i + 2]) for i in range(0, 7, 2)]
    assert torch.equal(whole, torch.cat(parts))


def test_offsets_and_flips_are_uniform():
    parameters = draw(Augmentation(kind="crop_flip", multiplicity=4, padding=2), 5000, generator())
    assert parameters.top.shape == parameters.left.shape == parameters.flip.shape == (5000, 4)
    for offsets in (parameters.top, parameters.left):
        frequency = np.bincount(offsets.ravel(), minlength=5) / offsets.size
        np.testing.assert_allclose(frequency, 0.2, atol=5 * np.sqrt(0.16 / offsets.size))
    assert parameters.flip.mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(20_000))
    corners = [parameters.top.ravel(), parameters.left.ravel(), parameters.flip.ravel()]
    assert np.abs(np.corrcoef(corners) - np.eye(3)).max() < 5 / np.sqrt(20_000)
    assert not draw(Augmentation(kind="crop", multiplicity=4), 50, generator()).flip.any()


def test_none_changes_nothing_and_draws_nothing():
    images, random = make_images(), generator()
    assert augment(images, Augmentation(), random) is images
    assert random.random() == generator().random()


@pytest.mark.parametrize("kind", ["none", "crop", "crop_flip"])
def test_an_empty_batch(kind):
    augmentation = Augmentation(kind=kind, multiplicity=1 if kind == "none" else 3)
    assert augment(make_images()[:0], augmentation, generator()).shape == (0, 3, 5, 7)


def test_bad_arguments():
    with pytest.raises(UnknownName, match="crop_flip"):
        Augmentation(kind="crop_flp")
    for changes in ({"multiplicity": 0}, {"multiplicity": 2.0}, {"padding": -1}, {"multiplicity": 2, "kind": "none"}):
        with pytest.raises(InvalidValue, match=next(iter(changes))):
            Augmentation(**{"kind": "crop", **changes})
    with pytest.raises(InvalidValue, match="must belong to the 6 images"):
        apply(make_images(6), draw(Augmentation(kind="crop"), 5, generator()))
