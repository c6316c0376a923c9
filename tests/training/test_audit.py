"""An audit of real private steps (METHODS section 4, row 15): what leaks stays below what the accountant claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from raydp.geometry import Identity
from raydp.privacy import accountants
from raydp.privacy.audit import epsilon_lower_bound
from raydp.privacy.mechanism import Phase, PhaseSpec
from raydp.privacy.noise import NoiseKey, poisson_sample
from raydp.training.gradients import PerExampleGradients
from raydp.training.optimizer import CoordinateOptimizer
from raydp.training.step import private_gradient

DELTA, RUNS, STEPS = 1e-3, 1000, 2
SPEC = PhaseSpec(name="train", steps=STEPS, batch_size=9, population=12, clip_norm=1.0)
SIGMA = 1.4


def canary_scores(*, noise_multiplier: float, canary: bool, world: int) -> np.ndarray:
    """How far each of many independent runs moved the one weight that only the canary's gradient touches.

    Eleven ordinary examples and, in one world, a twelfth whose only pixel is one that the others lack; it is so bright
    that its gradient lies along that pixel's weights and is clipped to the full norm C.
    """
    torch.manual_seed(0)
    images = torch.randn(12, 1, 2, 2)
    images[:, 0, 1, 1] = 0.0
    images[11] = 0.0
    images[11, 0, 1, 1] = 100.0
    labels = torch.arange(12) % 2
    phase = Phase(spec=SPEC, noise_multiplier=noise_multiplier)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    gradients = PerExampleGradients(model)
    geometry = Identity(sizes=tuple(parameter.numel() for parameter in gradients.parameters))
    scores = []
    for run in range(RUNS):
        key = NoiseKey.insecure(world).derive(run)
        with torch.no_grad():
            for parameter in gradients.parameters:
                parameter.zero_()  # the canary's logits are even, so its gradient is large
        optimizer = CoordinateOptimizer(gradients.parameters, None, kind="sgd", momentum=0.0, weight_decay=0.0)
        for step in range(STEPS):
            indices = torch.from_numpy(poisson_sample(key, phase, step))
            if not canary:
                indices = indices[indices != 11]  # the neighbouring data set lacks it; nothing else changes
            batch = gradients(images[indices], labels[indices])
            released = private_gradient([batch], geometry=geometry, phase=phase, step=step, key=key)
            optimizer.step(geometry.lift(released), 1e-3)  # small, so that the canary stays far above C
        weight = model[1].weight.detach()
        scores.append(float(weight[1, 3] - weight[0, 3]))
    return np.array(scores)


def audited(noise_multiplier: float) -> float:
    inside = canary_scores(noise_multiplier=noise_multiplier, canary=True, world=1)
    outside = canary_scores(noise_multiplier=noise_multiplier, canary=False, world=2)
    return epsilon_lower_bound(inside, outside, delta=DELTA).epsilon_lower


@pytest.fixture(scope="module")
def claim() -> float:
    mechanism = Phase(spec=SPEC, noise_multiplier=SIGMA).mechanism
    return accountants.epsilon([mechanism], delta=DELTA, adjacency="add_remove").upper


def test_the_audit_of_real_steps_stays_below_the_claim_and_sees_the_canary(claim: float) -> None:
    assert claim / 10 < audited(SIGMA) <= claim


def test_the_audit_exceeds_the_claim_when_the_noise_is_ten_times_too_small(claim: float) -> None:
    assert audited(SIGMA / 10) > claim
