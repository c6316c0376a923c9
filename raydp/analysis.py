"""NON-PRIVATE analysis on public benchmarks: how good a support really is, by the un-noised gradient.

Everything here that reads data goes through ``PrivateData.non_private(reason)``, which logs. Nothing here may steer a
trial, choose between trials, or be published about data that are private; methods and geometries cannot import this
module (a test reads their imports). The theory of arXiv 2606.04375, section 5, is beside it, as plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raydp import _validate
from raydp.data import Dataset
from raydp.errors import InvalidValue
from raydp.geometry import Support
from raydp.tasks import cross_entropy_sum
from raydp.training.gradients import LossFunction


@dataclass(frozen=True, kw_only=True)
class OracleCapture:
    """How much of the un-noised gradient a support holds: alpha(A) = ‖P_A G‖²/‖G‖² (arXiv 2606.04375, section 7.4).

    Non-private. The evidence that a support carries information is ``capture - expected_random``.

    Attributes:
        capture: of the support A itself, in [0, 1].
        expected_random: k/d, the mean over uniformly random supports of this size.
        best: of A* = TopK(G², k), the upper limit.
    """

    capture: float
    expected_random: float
    best: float

    @property
    def information(self) -> float:
        """(capture - k/d) / (best - k/d): 0 for a random support, 1 for the best one."""
        room = self.best - self.expected_random
        return (self.capture - self.expected_random) / room if room > 0 else 0.0


def non_private_gradient(
    model: nn.Module, dataset: Dataset, *, reason: str, loss: LossFunction = cross_entropy_sum, batch_size: int = 500
) -> list[Tensor]:
    """NON-PRIVATE: the mean gradient over all private examples at the model's present weights; no clipping, no noise.

    Args:
        model: its weights are not changed.
        dataset: read through ``private.non_private(reason)``.
        reason: goes into the log.
        loss: sum of the examples' losses.
        batch_size: examples in memory at once.

    Returns:
        One flat float64 tensor (size,) for each trainable parameter, in ``named_parameters`` order.
    """
    batch_size = _validate.integer("batch_size", batch_size, low=1)
    examples = dataset.private.non_private(reason)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    totals = [torch.zeros(parameter.numel(), dtype=torch.float64) for parameter in parameters]
    for start in range(0, len(examples), batch_size):
        part = slice(start, start + batch_size)
        logits = model(dataset.normalization.apply(examples.inputs[part].to(device)))
        gradients = torch.autograd.grad(loss(logits, examples.targets[part].to(device)), parameters)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient.flatten().cpu().double()
    return [total / len(examples) for total in totals]


def oracle_capture(gradient: Sequence[Tensor], support: Support) -> OracleCapture:
    """NON-PRIVATE: the capture of a support by the un-noised gradient of :func:`non_private_gradient`.

    Args:
        gradient: flat tensors (size,), one for each parameter.
        support: k >= 1 coordinates of the same parameters.

    Raises:
        InvalidValue: the support is empty, or the gradient is zero or not finite.
    """
    energy, inside = _energies(gradient, support)
    coordinates, k = sum(part.numel() for part in gradient), sum(support.sizes)
    _validate.positive("squared norm of the gradient", energy)
    _validate.integer("size of the support", k, low=1)
    largest = torch.cat([part.double().square() for part in gradient]).topk(k).values
    return OracleCapture(
        capture=min(1.0, inside / energy),
        expected_random=k / coordinates,
        best=min(1.0, float(largest.sum()) / energy),
    )


def _energies(gradient: Sequence[Tensor], support: Support) -> tuple[float, float]:
    """‖G‖² and ‖P_A G‖²."""
    inside = sum(
        float(part.double()[index].square().sum()) for part, index in zip(gradient, support.indices, strict=True)
    )
    return sum(float(part.double().square().sum()) for part in gradient), inside


@dataclass(frozen=True, kw_only=True)
class OneStepErrors:
    """Mean squared errors of one noisy gradient at equal noise (arXiv 2606.04375, Proposition 5.1).

    Attributes:
        dense: d·nu².
        masked: ‖P_Ā G‖² + k·nu².
    """

    dense: float
    masked: float

    @property
    def restriction_helps(self) -> bool:
        """‖P_Ā G‖² < (d - k)·nu²."""
        return self.masked < self.dense


def one_step_errors(gradient: Sequence[Tensor], support: Support, noise_std: float) -> OneStepErrors:
    """NON-PRIVATE: whether leaving the coordinates outside the support alone costs less signal than it saves noise.

    Args:
        gradient: flat tensors (size,), the un-noised gradient.
        support: of the same parameters.
        noise_std: nu > 0, of the noise on each coordinate of the *released average*: sigma·C/B.
    """
    energy, inside = _energies(gradient, support)
    variance = _validate.positive("noise_std", noise_std) ** 2
    coordinates = sum(part.numel() for part in gradient)
    return OneStepErrors(dense=coordinates * variance, masked=energy - inside + sum(support.sizes) * variance)


def score_variance(gradient: float, noise_std: float, steps: int) -> float:
    """Var(a_p) = (4 G_p² nu² + 2 nu⁴)/T1 of a TP-TopK score (Lemma 5.2: Gaussian noise, no clipping, no sampling).

    Args:
        gradient: G_p.
        noise_std: nu > 0, of the noise on the released average.
        steps: T1 >= 1.
    """
    noise = _validate.positive("noise_std", noise_std) ** 2
    steps = _validate.integer("steps", steps, low=1)
    return (4 * _validate.real("gradient", gradient) ** 2 * noise + 2 * noise**2) / steps


@dataclass(frozen=True, kw_only=True)
class MisrankingBounds:
    """Upper bounds on the chance that the weaker of two coordinates scores at least as high as the stronger.

    Attributes:
        chebyshev: V/D² (Proposition 5.3), V = Var(a_p - a_q), D = G_p² - G_q²; at most 1.
        cantelli: V/(V + D²), its one-sided form, always tighter.
    """

    chebyshev: float
    cantelli: float


def misranking_bounds(*, stronger: float, weaker: float, noise_std: float, steps: int) -> MisrankingBounds:
    """Bounds for two coordinates of gradients ``stronger`` and ``weaker``, |stronger| > |weaker|.

    Raises:
        InvalidValue: the stronger gradient is not larger in magnitude.
    """
    gap = _validate.real("stronger", stronger) ** 2 - _validate.real("weaker", weaker) ** 2
    if gap <= 0:
        raise InvalidValue("stronger", stronger, f"must exceed |{weaker}| in magnitude", "Swap the two.")
    variance = score_variance(stronger, noise_std, steps) + score_variance(weaker, noise_std, steps)
    return MisrankingBounds(chebyshev=min(1.0, variance / gap**2), cantelli=variance / (variance + gap**2))
