import numpy as np
import pytest
import torch
from torch import nn

from raydp.errors import InvalidValue, UnknownName
from raydp.methods import method
from raydp.models import build_model
from raydp.tasks import TASKS, HeldOut, Task, task
from raydp.training import run
from raydp.training.gradients import PerExampleGradients
from tests.training.helpers import digits_spec


def held_out(n=12, *, truth=None, classes=None):
    inputs = torch.randn(n, 5, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(dim=1) if classes is None else torch.arange(n) % classes
    return HeldOut(inputs=inputs, targets=targets, normalize=lambda x: x, num_classes=classes, truth=truth)


def linear_map():
    return build_model("linear_map", input_shape=(5,), outputs=1, seed=0)


class TestRegression:
    def test_metrics_by_hand(self):
        model, held = linear_map(), held_out(truth=torch.ones(5))
        weight = next(model.parameters()).detach().flatten()
        found = task("regression").evaluate(model, held)
        assert found["mse"] == pytest.approx(float(((held.inputs @ weight) - held.targets).square().mean()), rel=1e-6)
        assert found["parameter_error"] == pytest.approx(float((weight - 1).square().sum()), rel=1e-6)

    def test_the_error_of_the_parameters_needs_the_truth_and_its_size(self):
        regression = task("regression")
        assert "parameter_error" not in regression.evaluate(linear_map(), held_out())
        with_bias = build_model("linear", input_shape=(5,), outputs=1, seed=0)
        assert regression.available(with_bias, held_out(truth=torch.ones(5))) == ("mse",)

    def test_per_example_gradients_of_its_loss(self):
        model, held = linear_map(), held_out()
        (found,) = PerExampleGradients(model, task("regression").loss)(held.inputs, held.targets)
        residual = model(held.inputs).detach().flatten() - held.targets
        assert torch.allclose(found[:, 0], 2 * residual[:, None] * held.inputs, atol=1e-5)


def test_a_model_in_training_stays_in_training():
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).train()
    task("classification").evaluate(model, held_out(classes=3))
    assert model.training and model[1].training


def test_classes_and_numbers_are_not_mixed_up():
    with pytest.raises(InvalidValue, match="needs numbers"):
        task("regression").check("mine", input_shape=(5,), num_classes=3)
    with pytest.raises(InvalidValue, match="needs classes"):
        task("classification").check("mine", input_shape=(5,), num_classes=None)
    with pytest.raises(InvalidValue, match=r"num_classes = 1.*two classes or more"):
        task("classification").check("mine", input_shape=(5,), num_classes=1)
    with pytest.raises(UnknownName, match="regression"):
        task("regresion")


@pytest.mark.parametrize("name", ["dp_ngd", "gep", "ada_dps"])
def test_methods_that_draw_labels_refuse_other_tasks(name):
    with pytest.raises(InvalidValue, match=rf"none that {name} can train, which needs classification"):
        method(name).check_task(task("regression"))
    method("dp_sgd").check_task(task("regression"))


class _Draw:
    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return len(self.noise)

    def __getitem__(self, part):
        return _Draw(self.noise[part])


class _Noisy(type(TASKS["classification"])):
    """Classification of noisy inputs: a task with randomness of its own."""

    name = "noisy"

    def draw(self, n, input_shape, generator):
        return _Draw(torch.from_numpy(generator.standard_normal((n, *input_shape)).astype(np.float32)))

    def examples(self, inputs, targets, draw):
        assert len(draw) == len(inputs)
        return inputs + 0.1 * draw.noise, targets


@pytest.mark.parametrize("copies", [1, 3])
def test_randomness_of_a_task_is_drawn_once_a_step_whatever_the_micro_batch(tmp_path, monkeypatch, copies):
    noisy: Task = _Noisy()
    monkeypatch.setattr(run, "task", lambda name: noisy)
    config = {"epochs": 1, "batch_size": 400}
    if copies > 1:
        config |= {"augmentation": "crop", "augmentation_multiplicity": copies}
    endings = []
    for index, micro_batch in enumerate((1024, 60)):
        spec = digits_spec(tmp_path / str(index), "dp_sgd", config, micro_batch=micro_batch)
        list(run.execute(spec))
        endings.append(torch.load(spec.directory / "weights.pt", weights_only=True))
    plain = digits_spec(tmp_path / "plain", "dp_sgd", config)
    monkeypatch.setattr(run, "task", lambda name: TASKS["classification"])
    list(run.execute(plain))
    other = torch.load(plain.directory / "weights.pt", weights_only=True)
    for name, value in endings[0].items():
        assert torch.allclose(value, endings[1][name], atol=1e-5)
        assert not torch.allclose(value, other[name], atol=1e-5)
