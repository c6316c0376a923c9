import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn

from raydp.errors import InvalidValue, UnknownName
from raydp.models import MODELS, build_model, default_model, validate_model

MINIMUM = {
    "resnet20": 16,
    "wrn_16_4": 16,
    "resnet20_ws": 16,
    "wrn_16_4_ws": 16,
    "tanh_cnn": 16,
    "tanh_cnn_small": 8,
    "mlp": 1,
    "linear": 1,
    "bright_map": 1,
    "linear_map": 1,
}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "input_shape", "parameters"),
    [
        ("tanh_cnn", (1, 28, 28), 26_010),
        ("tanh_cnn", (3, 32, 32), 550_570),
        ("tanh_cnn_small", (3, 32, 32), 65_962),
        ("mlp", (1, 8, 8), 4_810),
        ("linear", (1, 8, 8), 650),
    ],
)
def test_published_parameter_counts(name, input_shape, parameters):
    assert count(build_model(name, input_shape=input_shape, outputs=10, seed=0)) == parameters


def test_the_layers_of_the_published_networks():
    small = build_model("tanh_cnn", input_shape=(1, 28, 28), outputs=10, seed=0)
    assert [tuple(p.shape) for p in small.parameters() if p.dim() > 1] == [
        (16, 1, 8, 8),
        (32, 16, 4, 4),
        (32, 512),
        (10, 32),
    ]
    large = build_model("tanh_cnn", input_shape=(3, 32, 32), outputs=10, seed=0)
    assert [p.shape[0] for p in large.parameters() if p.dim() == 4] == [32, 32, 64, 64, 128, 128]
    assert [tuple(p.shape) for p in large.parameters() if p.dim() == 2] == [(128, 2048), (10, 128)]


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(MODELS)),
    channels=st.sampled_from([1, 3]),
    height=st.integers(4, 40),
    width=st.integers(4, 40),
    classes=st.integers(1, 12),
)
def test_every_size_either_works_or_is_refused(name, channels, height, width, classes):
    shape = (channels, height, width)
    if min(height, width) < MINIMUM[name]:
        with pytest.raises(InvalidValue, match=r"model = .* needs images of at least"):
            build_model(name, input_shape=shape, outputs=classes, seed=0)
        return
    model = build_model(name, input_shape=shape, outputs=classes, seed=0)
    assert model(torch.zeros(2, *shape)).shape == (2, classes)
    assert model(torch.zeros(0, *shape)).shape == (0, classes)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_examples_do_not_mix_and_opacus_accepts_the_model(name):
    generator = torch.Generator().manual_seed(0)
    model = build_model(name, input_shape=(3, 16, 16), outputs=5, seed=0)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    torch.testing.assert_close(model(images)[2:3], model(images[2:3]))
    labels = torch.tensor([0, 1, 2, 3])
    assert_per_example_gradients(model, images, labels)


def assert_per_example_gradients(model, inputs, labels):
    """Opacus' gradient of example 2 in a batch is autograd's gradient of example 2 alone."""
    loss = nn.functional.cross_entropy(model(inputs[2:3]), labels[2:3])
    alone = torch.autograd.grad(loss, list(model.parameters()))
    wrapped = GradSampleModule(model, loss_reduction="sum")
    nn.functional.cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
    for parameter, expected in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad_sample[2], expected, rtol=1e-4, atol=1e-6)


def test_weights_depend_on_the_seed_alone_and_the_global_state_is_untouched():
    def weights(seed):
        model = build_model("tanh_cnn", input_shape=(1, 28, 28), outputs=10, seed=seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(10)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 8, 8), "mlp"), ((1, 28, 28), "tanh_cnn"), ((3, 28, 40), "tanh_cnn"), ((3, 32, 32), "tanh_cnn_small")],
)
def test_default_models_take_the_shape(shape, expected):
    assert default_model(shape) == expected
    build_model(expected, input_shape=shape, outputs=10, seed=0)


def test_bad_arguments():
    with pytest.raises(UnknownName, match="Did you mean tanh_cnn"):
        build_model("tanh_cn", input_shape=(1, 28, 28), outputs=10, seed=0)
    for changes in ({"input_shape": (28, 28)}, {"input_shape": (0, 28, 28)}, {"outputs": 0}, {"seed": -1}):
        with pytest.raises(InvalidValue, match=next(iter(changes))):
            build_model("mlp", **{"input_shape": (1, 28, 28), "outputs": 10, "seed": 0, **changes})


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("running_mean", torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 48, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(48))),
            r"model\.1\.1 = 'BatchNorm2d'.*GroupNorm\(num_groups=16, num_channels=48\)",
        ),
        (nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10)), r"model\.1 = .*num_groups=10, num_channels=10"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), r"model\.1 = .*mixes"),
        (nn.Sequential(nn.Conv2d(3, 17, 3), nn.SyncBatchNorm(17)), r"model\.1 = 'SyncBatchNorm'.*num_groups=1,"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
            r"model\.1 = 'InstanceNorm2d'.*track_running_stats=False",
        ),
        (nn.Sequential(nn.Linear(2, 2), Statistics()), r"model\.1 = 'Statistics'.*running statistics"),
        (nn.Sequential(nn.ReLU()), "must have a trainable parameter"),
    ],
)
def test_models_that_are_refused(model, message):
    with pytest.raises(InvalidValue, match=message):
        validate_model(model)


def test_models_that_are_fine():
    validate_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8), nn.LayerNorm([8, 4, 4])))


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_module_that_is_used_twice_is_fine():
    same = nn.Linear(4, 4)
    model = nn.Sequential(same, nn.Tanh(), same)
    validate_model(model)
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert_per_example_gradients(model, inputs, torch.tensor([0, 1, 2, 3]))


def test_dropout_is_refused_because_a_replayed_step_would_differ():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    with pytest.raises(InvalidValue, match=r"model\.1 = 'Dropout'.*replayed"):
        validate_model(model)
