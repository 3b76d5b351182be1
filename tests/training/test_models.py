import pytest
import torch

from dpcompanion.gradients import clipping
from dpcompanion.training import cross_entropy, gradient_norms, models

NETWORKS = [
    (models.mnist_cnn, {}, 26_010, (1, 28, 28)),
    (models.cifar_cnn, {}, 550_570, (3, 32, 32)),
    (models.lenet5, {}, 61_706, (1, 32, 32)),
    (models.resnet20, {}, 268_346, (3, 32, 32)),
    (models.resnet20, {"groups": 16, "affine": True}, 269_722, (3, 32, 32)),
    (models.wrn16_4, {}, 2_753_402, (3, 32, 32)),
]


@pytest.mark.parametrize("build, options, count, shape", NETWORKS)
def test_a_network_has_the_parameters_of_its_paper_and_gives_logits(build, options, count, shape):
    model = build(**options)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("build, options, count, shape", NETWORKS)
def test_a_network_can_be_clipped_layer_by_layer(build, options, count, shape):
    model, x, y = (
        build(**options).double(),
        torch.randn(3, *shape).double(),
        torch.tensor([1, 2, 3]),
    )
    layerwise = gradient_norms(model, cross_entropy, x, y, method="mixed")
    assert layerwise[0] > 0
    value = cross_entropy(model(x[:1]), y[:1]).sum()
    alone = torch.stack(
        [g.norm() for g in torch.autograd.grad(value, list(model.parameters()))]
    ).norm()
    torch.testing.assert_close(layerwise[0], alone, rtol=1e-10, atol=0)


def test_initialization_depends_on_the_seed_alone_and_leaves_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = models.mnist_cnn(seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    again, other = models.mnist_cnn(seed=1), models.mnist_cnn(seed=2)
    assert torch.equal(one[0].weight, again[0].weight) and not torch.equal(
        one[0].weight, other[0].weight
    )


def test_residual_convolutions_start_with_the_published_spread():
    for module in models.resnet20().modules():
        if isinstance(module, torch.nn.Conv2d) and module.out_channels == 64:
            expected = (2 / (9 * 64)) ** 0.5
            assert abs(module.weight.std().item() / expected - 1) < 0.03


def test_a_standardised_convolution_has_weights_of_mean_zero_and_norm_one():
    conv = models.StandardizedConv2d(3, 4, 3, bias=False)
    torch.nn.init.normal_(conv.weight, mean=1.0)
    response = conv(torch.eye(27).reshape(27, 3, 3, 3)).reshape(27, 4)
    torch.testing.assert_close(response.sum(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(response.norm(dim=0), torch.ones(4))


def test_pooling_with_channels_side_by_side_is_pooling():
    x = torch.randn(3, 5, 7, 6, requires_grad=True)
    ours, theirs = models.MaxPool2d(2, stride=1)(x), torch.nn.functional.max_pool2d(x, 2, stride=1)
    weights = torch.randn_like(theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(
        *(torch.autograd.grad((weights * pooled).sum(), x)[0] for pooled in (ours, theirs))
    )


def test_the_lstm_of_linear_layers_is_that_of_pytorch():
    ours, theirs = models.LSTM(5, 7, 3).double(), torch.nn.LSTM(5, 7, 3, batch_first=True).double()
    with torch.no_grad():
        for k in range(3):
            for kind, layer in (("ih", ours.of_input[k]), ("hh", ours.of_state[k])):
                getattr(theirs, f"weight_{kind}_l{k}").copy_(layer.weight)
                getattr(theirs, f"bias_{kind}_l{k}").copy_(layer.bias)
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0])
    assert ours.of_state[0].weight.abs().max() <= 7**-0.5


TEXT = [(models.char_rnn, 382_418, 259, 18), (models.word_mean, 480_306, 30_000, 2)]


@pytest.mark.parametrize("build, count, tokens, classes", TEXT)
def test_a_network_for_text_is_clipped_layer_by_layer_and_does_not_see_what_fills_up(
    build, count, tokens, classes
):
    model = build().double()
    assert sum(p.numel() for p in model.parameters()) == count
    x = torch.randint(1, tokens, (5, 9), generator=torch.Generator().manual_seed(0))
    x[:2, :4] = 0
    x[3, 2:6] = x[3, 1]
    y = torch.arange(5) % classes
    assert (
        model(x).shape == (5, classes)
        and clipping.resolve_method(model, cross_entropy, x[:2], y[:2]) == "mixed"
    )
    layerwise = gradient_norms(model, cross_entropy, x, y, method="mixed")
    torch.testing.assert_close(
        layerwise, gradient_norms(model, cross_entropy, x, y, method="func"), rtol=1e-10, atol=0
    )
    value = cross_entropy(model(x[3:4]), y[3:4]).sum()
    alone = torch.stack(
        [g.norm() for g in torch.autograd.grad(value, list(model.parameters()))]
    ).norm()
    torch.testing.assert_close(layerwise[3], alone, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        model.embedding.weight[0], torch.zeros_like(model.embedding.weight[0])
    )


def test_the_mean_of_words_is_over_the_words_that_there_are():
    model = models.word_mean()
    x = torch.randint(1, 30_000, (3, 8))
    torch.testing.assert_close(
        model(x), model(torch.cat([x, torch.zeros(3, 5, dtype=torch.int64)], 1))
    )
    assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
