"""No step waits for the host: on the meta device, where no number can be read, nothing is copied to the processor."""

import collections

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpcompanion.training import clipped_sum, cross_entropy, gradient_norms, layers, models

READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_unique2", "unique_dim", "masked_select"}


class CopiesToHost(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), None)
        target = torch.device(kwargs.get("device") or device or "cpu").type
        if device == "meta" and (name in READS or name in ("_to_copy", "copy_") and target == "cpu"):
            self.seen[name] += 1
        return function(*args, **kwargs)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.linear = nn.Embedding(7, 5, padding_idx=0), nn.LayerNorm(5), nn.Linear(5, 10)

    def forward(self, x):
        return self.linear(self.norm(self.embedding(x))).mean(1)


def images(*shape):
    return torch.zeros(4, *shape, device="meta")


MODELS = {
    "linear": (lambda: nn.Linear(4, 10), lambda: images(4)),
    "mnist cnn": (models.mnist_cnn, lambda: images(1, 28, 28)),
    "cifar cnn": (models.cifar_cnn, lambda: images(3, 32, 32)),
    "resnet20": (models.resnet20, lambda: images(3, 32, 32)),
    "wrn16_4": (models.wrn16_4, lambda: images(3, 32, 32)),
    "tokens": (Tokens, lambda: torch.zeros(4, 6, dtype=torch.int64, device="meta")),
}


def test_the_count_counts():
    with CopiesToHost() as copies, pytest.raises(RuntimeError):
        torch.ones((), device="meta").item()
    assert copies.seen["_local_scalar_dense"] == 1
    with CopiesToHost() as copies, pytest.raises(NotImplementedError):
        torch.ones((), device="meta").cpu()
    assert sum(copies.seen.values()) == 1


@pytest.mark.parametrize("method", ["mixed", "ghost"])
@pytest.mark.parametrize("name", MODELS)
def test_clipping_and_norms_read_nothing_back(name, method):
    make, inputs = MODELS[name]
    model, x, y = make().to("meta"), inputs(), torch.zeros(4, dtype=torch.int64, device="meta")
    for limit in (1.0, torch.ones(4)):
        with CopiesToHost() as copies:
            found = clipped_sum(model, cross_entropy, x, y, limit, method=method, chunk=3)
        assert not copies.seen
        assert {name: g.shape for name, g in found.gradients.items()} == {
            name: p.shape for name, p in model.named_parameters()}
        assert all(g.device.type == "meta" for g in (*found.gradients.values(), found.norms, found.losses))
    with CopiesToHost() as copies:
        gradient_norms(model, cross_entropy, x, y, method=method)
    assert not copies.seen


def test_norms_of_embeddings_are_the_same_by_pairs_of_positions():
    torch.manual_seed(0)
    module, tokens, g = nn.Embedding(5, 3, padding_idx=1), torch.randint(5, (6, 9)), torch.randn(6, 9, 3)
    layer = layers.GhostEmbedding(module, [(tokens, g)])
    torch.testing.assert_close(layer._by_pairs_of_positions(), layer._by_tokens())
