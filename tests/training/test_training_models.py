import pytest
import torch

from dpcompanion.training import cross_entropy, gradient_norms, models

NETWORKS = [
    (models.mnist_cnn, {}, 26_010, (1, 28, 28)), (models.cifar_cnn, {}, 550_570, (3, 32, 32)),
    (models.lenet5, {}, 61_706, (1, 32, 32)), (models.resnet20, {}, 268_346, (3, 32, 32)),
    (models.resnet20, {"groups": 16, "affine": True}, 269_722, (3, 32, 32)),
    (models.wrn16_4, {}, 2_753_402, (3, 32, 32))]


@pytest.mark.parametrize("build, options, count, shape", NETWORKS)
def test_a_network_has_the_parameters_of_its_paper_and_gives_logits(build, options, count, shape):
    model = build(**options)
    assert models.parameter_count(model) == count
    assert model(torch.randn(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("build, options, count, shape", NETWORKS)
def test_a_network_can_be_clipped_layer_by_layer(build, options, count, shape):
    model, x, y = build(**options).double(), torch.randn(3, *shape).double(), torch.tensor([1, 2, 3])
    layerwise = gradient_norms(model, cross_entropy, x, y, method="mixed")
    assert layerwise[0] > 0
    value = cross_entropy(model(x[:1]), y[:1]).sum()
    alone = torch.stack([g.norm() for g in torch.autograd.grad(value, list(model.parameters()))]).norm()
    torch.testing.assert_close(layerwise[0], alone, rtol=1e-10, atol=0)


def test_initialisation_depends_on_the_seed_alone_and_leaves_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = models.mnist_cnn(seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    again, other = models.mnist_cnn(seed=1), models.mnist_cnn(seed=2)
    assert torch.equal(one[0].weight, again[0].weight) and not torch.equal(one[0].weight, other[0].weight)


def test_residual_convolutions_start_with_the_published_spread():
    for module in models.resnet20().modules():
        if isinstance(module, torch.nn.Conv2d) and module.out_channels == 64:
            expected = (2 / (9 * 64)) ** 0.5
            assert abs(module.weight.std().item() / expected - 1) < 0.03


def test_a_standardised_convolution_has_weights_of_mean_zero_and_norm_one():
    conv = models.StandardisedConv2d(3, 4, 3, bias=False)
    torch.nn.init.normal_(conv.weight, mean=1.0)
    response = conv(torch.eye(27).reshape(27, 3, 3, 3)).reshape(27, 4)
    torch.testing.assert_close(response.sum(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(response.norm(dim=0), torch.ones(4))


def test_pooling_with_channels_side_by_side_is_pooling():
    x = torch.randn(3, 5, 7, 6, requires_grad=True)
    ours, theirs = models.MaxPool2d(2, stride=1)(x), torch.nn.functional.max_pool2d(x, 2, stride=1)
    weights = torch.randn_like(theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad((weights * pooled).sum(), x)[0] for pooled in (ours, theirs)))
