import pytest
import torch
from torch import nn

from raydp.errors import InvalidValue, UnknownName
from raydp.models.hypernetwork import Architecture, Block, Hypernetwork, Layout


def target():
    return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 13, bias=False))


def hypernetwork(*, clip_norm=1.0, features=6, seed=0, layout=None, **sizes):
    small = {"embedding": 8, "encoder_width": 16, "decoder_width": 16, "decoder_hidden": 32, "decoder_depth": 2}
    return Hypernetwork(
        features=features,
        layout=layout or Layout.of(target()),
        architecture=Architecture(**{**small, **sizes}),
        clip_norm=clip_norm,
        seed=seed,
    )


class TestLayout:
    def test_no_token_straddles_two_parameters(self):
        layout = Layout.of(target(), token=32)
        assert layout.names == ("0.weight", "0.bias", "2.weight")
        assert (layout.sizes, layout.token_counts) == ((200, 20, 260), (7, 1, 9))
        assert (layout.parameters, layout.tokens) == (480, 17)
        tokens = torch.arange(17.0)[:, None].expand(17, 32)[None]
        found = layout.of_tokens(tokens)
        assert found["0.weight"].unique().tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert found["0.bias"].unique().tolist() == [7]
        assert found["2.weight"].unique().tolist() == list(range(8, 17))
        assert {name: tuple(value.shape[1:]) for name, value in found.items()} == dict(
            zip(layout.names, layout.shapes, strict=True)
        )

    def test_numbers_one_after_the_other(self):
        found = Layout.of(target()).of_flat(torch.arange(960.0).view(2, 480))
        assert torch.equal(torch.cat([value[1].flatten() for value in found.values()]), torch.arange(480.0, 960.0))

    def test_a_parameter_that_does_not_exist_is_named_with_near_ones(self):
        assert Layout.of(target(), ["2.*"]).names == ("2.weight",)
        with pytest.raises(UnknownName, match=r"0\.weigth.*0\.weight"):
            Layout.of(target(), ["0.weigth"])
        frozen = target().requires_grad_(False)
        with pytest.raises(UnknownName):
            Layout.of(frozen)


@pytest.mark.parametrize("decoder", ["transformer", "mlp"])
@pytest.mark.parametrize("encoder", ["mlp", "linear"])
def test_the_order_of_the_examples_does_not_matter(encoder, decoder):
    network = hypernetwork(encoder=encoder, decoder=decoder)
    features = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(1))
    shuffled = features[:, torch.randperm(12, generator=torch.Generator().manual_seed(2))]
    assert torch.allclose(network.pool(features), network.pool(shuffled), atol=1e-6)
    left, right = (network.generate(network.pool(x)) for x in (features, shuffled))
    assert left.keys() == right.keys() == set(Layout.of(target()).names)
    assert all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_replacing_one_example_moves_the_average_by_at_most_two_c_over_n(scale):
    network, n = hypernetwork(clip_norm=0.7), 16
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        features = scale * torch.randn(n, 6, generator=generator)
        other = features.clone()
        other[3] = -scale * 10 * torch.randn(6, generator=generator)
        moved = (network.pool(features) - network.pool(other)).detach()
        assert float(moved.norm()) <= 2 * 0.7 / n + 1e-6


def test_cross_attention_to_one_token_is_an_addition():
    """Against torch's own attention with the same weights."""
    block = Block(16, 4, 32, 8)
    attention = nn.MultiheadAttention(16, 4, kdim=8, vdim=8, batch_first=True)
    with torch.no_grad():
        attention.v_proj_weight.copy_(block.value.weight)
        attention.in_proj_bias.zero_()
        attention.in_proj_bias[32:].copy_(block.value.bias)
        attention.out_proj.weight.copy_(block.out.weight)
        attention.out_proj.bias.copy_(block.out.bias)
    queries, context = torch.randn(3, 5, 16), torch.randn(3, 8)
    wanted, _ = attention(queries, context[:, None], context[:, None])
    assert torch.allclose(block.cross(context).expand(3, 5, 16), wanted, atol=1e-5)


def test_the_head_begins_small_and_the_seed_decides_the_weights():
    network = hypernetwork(decoder_width=128, decoder_hidden=512, embedding=128)
    assert float(network.decoder.head.weight.detach().std()) == pytest.approx(0.01, rel=0.03)
    assert not network.decoder.head.bias.any()
    layout, state = Layout.of(target()), torch.random.get_rng_state()
    same, other = hypernetwork(seed=3, layout=layout), hypernetwork(seed=4, layout=layout)
    assert torch.equal(torch.random.get_rng_state(), state)
    again = hypernetwork(seed=3, layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), again.parameters(), strict=True))
    assert not torch.equal(same.encoder[0].weight, other.encoder[0].weight)


def test_the_published_decoder_is_built_as_described():
    network = Hypernetwork(features=512, layout=Layout.of(target()), architecture=Architecture(), clip_norm=1.0, seed=0)
    assert [tuple(layer.weight.shape) for layer in network.encoder if isinstance(layer, nn.Linear)] == [
        (512, 512),
        (128, 512),
    ]
    assert len(network.decoder.blocks) == 4
    assert network.decoder.blocks[0].mlp[0].out_features == 512
    assert network.decoder.queries.shape == (6, 128)


def test_the_explicit_network_of_the_proof():
    layout = Layout.of(nn.Linear(6, 1, bias=False))
    network = hypernetwork(features=7, layout=layout, encoder="oracle", decoder="pad", embedding=2, clip_norm=100.0)
    x, y = torch.randn(9, 6), torch.randn(9)
    found = network.generate(network.pool(torch.cat([x, y[:, None]], dim=1)[None]))["weight"]
    wanted = (y[:, None] * x[:, :2]).mean(dim=0)
    assert torch.allclose(found, torch.cat([wanted, torch.zeros(4)]).view(1, 1, 6), atol=1e-6)
    assert not list(network.parameters())


def test_features_of_another_width_are_refused():
    with pytest.raises(InvalidValue, match="must be the 6 numbers"):
        hypernetwork().embed(torch.zeros(3, 7))
    with pytest.raises(InvalidValue, match="multiple of the 4 heads"):
        hypernetwork(decoder_width=18)
