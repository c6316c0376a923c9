"""Several yes/no labels an example: the loss, the metrics by hand, and what is refused."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.nn import functional as F

from raydp.errors import InvalidValue
from raydp.methods import method
from raydp.models import build_model
from raydp.tasks import HeldOut, task
from raydp.training.gradients import PerExampleGradients


class Fixed(nn.Module):
    """Its inputs are its logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.scale * inputs


def held_out(logits, targets):
    inputs = torch.tensor(logits, dtype=torch.float32)
    return HeldOut(inputs=inputs, targets=torch.tensor(targets, dtype=torch.float32), normalize=lambda x: x)


LOGITS = [[2.0, -1.0, 0.5], [-2.0, 3.0, -0.5], [1.0, 1.0, -1.5], [-1.0, -1.0, -2.5]]
TARGETS = [[1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 0, 0]]  # nobody has the third label


def test_metrics_by_hand():
    held = held_out(LOGITS, TARGETS)
    found = task("multilabel").evaluate(Fixed(), held)
    assert found["accuracy"] == pytest.approx(9 / 12)
    assert found["exact_match"] == pytest.approx(1 / 4)
    assert found["recall"] == pytest.approx((1 / 2 + 1) / 2)  # of the two labels that tell something
    logits, targets = np.array(LOGITS), np.array(TARGETS)
    for name, measure in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
        wanted = np.mean([measure(targets[:, label], logits[:, label]) for label in (0, 1)])
        assert found[name] == pytest.approx(wanted)
    wanted = F.binary_cross_entropy_with_logits(held.inputs, held.targets)
    assert found["loss"] == pytest.approx(float(wanted))


def test_the_minority_is_the_label_that_fewest_have():
    found = task("multilabel").evaluate(Fixed(), held_out(LOGITS, [[1, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0]]))
    assert found["minority_recall"] == 0.0  # of the third, whose one example is missed


def test_labels_that_all_or_none_have_leave_only_what_can_be_measured():
    held = held_out([[1.0, -1.0]] * 3, [[1, 0]] * 3)
    assert set(task("multilabel").evaluate(Fixed(), held)) == {"accuracy", "exact_match", "loss"}
    broken = held_out([[float("nan"), 0.0]] * 3, [[1, 0]] * 3)
    assert all(np.isnan(value) for value in task("multilabel").evaluate(Fixed(), broken).values())


def test_contributions_are_bounded_and_average_to_the_metric():
    held = held_out([*LOGITS, [float("nan"), 1.0, 1.0]], [*TARGETS, [0, 1, 1]])
    chosen = task("multilabel")
    for metric, wanted in (("accuracy", 9 / 15), ("exact_match", 1 / 5)):
        found = chosen.contributions(metric, Fixed(), held)
        assert found.shape == (5,) and bool(((found >= 0) & (found <= chosen.bounds[metric])).all())
        assert float(found.mean()) == pytest.approx(wanted)
    with pytest.raises(InvalidValue, match="has no bound"):
        chosen.contributions("auroc", Fixed(), held)


@pytest.mark.parametrize(("name", "factor"), [("multilabel", (1, 1)), ("multilabel:weights=1,4", (1, 4))])
def test_per_example_gradients_of_its_loss(name, factor):
    model = build_model("linear", input_shape=(3,), outputs=2, seed=0)
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    targets = (torch.arange(12).reshape(6, 2) % 3 == 0).float()
    weight, bias = PerExampleGradients(model, task(name).loss)(inputs, targets)
    probability = model(inputs).detach().sigmoid()
    residual = (1 - targets) * probability - torch.tensor(factor) * targets * (1 - probability)
    assert torch.allclose(bias, residual, atol=1e-6)
    assert torch.allclose(weight, residual[:, :, None] * inputs[:, None], atol=1e-5)


def test_what_is_refused():
    shape = {"input_shape": (3,)}
    with pytest.raises(InvalidValue, match=r"targets = '2 classes'.*several yes/no labels"):
        task("multilabel").check("mine", **shape, num_classes=2)
    with pytest.raises(InvalidValue, match=r"3 labels, one a weight"):
        task("multilabel:weights=1,2,3").check("mine", **shape, num_classes=None, num_labels=2)
    with pytest.raises(InvalidValue, match=r"2 labels.*needs classes"):
        task("classification").check("mine", **shape, num_classes=None, num_labels=2)
    with pytest.raises(InvalidValue, match=r"2 labels.*needs numbers"):
        task("regression").check("mine", **shape, num_classes=None, num_labels=2)
    with pytest.raises(InvalidValue, match="must list numbers"):
        task("multilabel:weights=1,x")
    with pytest.raises(InvalidValue, match="none that dp_ngd can train"):
        method("dp_ngd").check_task(task("multilabel"))
