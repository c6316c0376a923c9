"""AdaDPS's diagonal is the public root mean square, and is applied once."""

from __future__ import annotations

import pytest
import torch

from raydp.errors import Diverged, InvalidValue
from raydp.geometry import Diagonal
from raydp.geometry.diagonal import root_mean_squares
from raydp.training.gradients import PerExampleGradients
from tests.geometry.nets import examples, small_net


def test_scales_are_root_mean_squares_of_per_example_gradients() -> None:
    model = small_net()
    images, labels = examples(70)  # more than one batch
    found = root_mean_squares(
        model, images, damping=0.25, generator=torch.Generator(), fisher_labels="given", labels=labels
    )
    gradients = PerExampleGradients(model)(images, labels)
    for scale, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(scale, gradient.flatten(1).square().mean(dim=0).sqrt() + 0.25)


@pytest.mark.parametrize("kind", ["model", "random"])
def test_drawn_labels_follow_the_generator(kind: str) -> None:
    model = small_net()
    images, _ = examples(10)

    def scales(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.cat(root_mean_squares(model, images, damping=1e-3, generator=generator, fisher_labels=kind))

    assert torch.equal(scales(0), scales(0))
    assert not torch.equal(scales(0), scales(1))


def test_coordinates_are_divided_on_the_way_in_and_not_on_the_way_out() -> None:
    geometry = Diagonal(scales=(torch.tensor([2.0, 4.0, 0.5, 1.0]), torch.tensor([8.0])))
    gradients = [torch.ones(3, 2, 2), torch.ones(3, 1)]
    projected = geometry.project(gradients)
    assert projected[0].tolist() == [[0.5, 0.25, 2.0, 1.0]] * 3 and projected[1].tolist() == [[0.125]] * 3
    lifted = geometry.lift([part[0] for part in projected])
    assert lifted[0].tolist() == [0.5, 0.25, 2.0, 1.0]
    assert geometry.sizes == (4, 1) and geometry.support is None


def test_no_example_and_no_damping_are_refused_and_infinite_gradients_end_the_run() -> None:
    model = small_net()
    images, _ = examples(4)
    with pytest.raises(InvalidValue, match="at least one"):
        root_mean_squares(model, images[:0], damping=1.0, generator=torch.Generator())
    with pytest.raises(InvalidValue, match="damping"):
        root_mean_squares(model, images, damping=0.0, generator=torch.Generator())
    with pytest.raises(Diverged):
        root_mean_squares(model, images * float("inf"), damping=1.0, generator=torch.Generator())
