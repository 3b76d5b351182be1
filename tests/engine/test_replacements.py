"""The engine's attention and recurrence: what PyTorch's compute from the same weights; and each
example's own.
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion import engine
from dpcompanion.engine import IndividualizedPrivacyEngine, MultiheadAttention, replace_layers
from dpcompanion.training import clipped_sum, cross_entropy

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "bias, add_bias_kv, add_zero_attn, kdim", itertools.product([0, 1], [0, 1], [0, 1], [None, 3])
)
def test_attention_is_that_of_pytorch_with_every_mask(
    bias, add_bias_kv, add_zero_attn, kdim, batch_first
):
    plain = nn.MultiheadAttention(
        8,
        2,
        bias=bool(bias),
        add_bias_kv=bool(add_bias_kv),
        add_zero_attn=bool(add_zero_attn),
        kdim=kdim,
        vdim=kdim and 5,
        batch_first=batch_first,
    ).double()
    layer = MultiheadAttention.of(plain)
    q, k, v = (
        torch.randn(3, *shape).double() for shape in ((5, 8), (4, kdim or 8), (4, 5 if kdim else 8))
    )
    if not batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    padding = torch.rand(3, 4) > 0.6
    padding[:, 0] = False
    causal = torch.ones(5, 4).triu(1).bool()
    masks = [None, causal, torch.randn(5, 4).double(), torch.randn(6, 5, 4).double()]
    for mask, padded, weighed in itertools.product(masks, [None, padding], [False, True]):
        options = {"attn_mask": mask, "key_padding_mask": padded, "need_weights": weighed}
        for own, theirs in zip(layer(q, k, v, **options), plain(q, k, v, **options)):
            assert (own is None and theirs is None) or torch.allclose(
                own, theirs, rtol=0, atol=1e-12
            )
    mask, heads = masks[1], {"average_attn_weights": False}
    assert torch.allclose(layer(q, k, v, **heads)[1], plain(q, k, v, **heads)[1])
    assert torch.allclose(
        layer(q, k, v, attn_mask=mask, is_causal=True)[0],
        plain(q, k, v, attn_mask=mask, is_causal=True)[0],
    )
    check_state(plain, layer)


def check_state(plain, layer):
    """The state_dict of one is that of the other, both ways, in a larger module and in copies."""
    state = layer.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), plain.state_dict().values()))
    outer = nn.ModuleDict({"part": copy.deepcopy(layer)})
    nn.ModuleDict({"part": plain}).load_state_dict(
        {name: 2 * t for name, t in outer.state_dict().items()}
    )
    outer.load_state_dict(nn.ModuleDict({"part": plain}).state_dict())
    again = pickle.loads(pickle.dumps(outer))["part"].state_dict()
    assert all(torch.equal(again[name], 2 * t) for name, t in state.items())


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize(
    "bidirectional, bias, batch_first", itertools.product([False, True], repeat=3)
)
def test_recurrence_is_that_of_pytorch_with_packed_rows_in_any_order(
    name, bidirectional, bias, batch_first
):
    plain = getattr(nn, name)(
        3, 4, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    ).double()
    layer = getattr(engine, name).of(plain)
    x = torch.randn(4, 5, 3).double()
    x = x if batch_first else x.transpose(0, 1)
    packed = [
        pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)
        for lengths in ([2, 5, 1, 5], [5, 4, 2, 1])
    ]
    begin = torch.randn(4 if bidirectional else 2, 4, 4).double()
    begin = (begin, begin.flip(0)) if name == "LSTM" else begin
    for inputs, state in itertools.product([x, *packed], [None, begin]):
        (own, own_ends), (theirs, ends) = layer(inputs, state), plain(inputs, state)
        if not torch.is_tensor(own):
            assert torch.equal(own.batch_sizes, theirs.batch_sizes)
            own, theirs = own.data, theirs.data
        if name != "LSTM":
            own_ends, ends = (own_ends,), (ends,)
        for a, b in zip((own, *own_ends), (theirs, *ends)):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
    check_state(plain, layer)


def test_dropout_lies_between_layers_as_in_pytorch():
    layer = engine.RNN(3, 4, 2, dropout=1.0)
    plain = nn.RNN(3, 4, 2, dropout=1.0)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 2, 3)
    # what goes up is 0, what is put out is not
    assert torch.allclose(layer(x)[0], plain(x)[0], atol=1e-6)


def test_what_is_not_supported_is_refused_by_name():
    refused("proj_size", engine.LSTM, 3, 4, proj_size=2)
    refused("embed_dim", MultiheadAttention, 7, 2)
    layer, x = MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    refused("query", layer, x[0], x[0], x[0])
    refused("attn_mask", layer, x, x, x, attn_mask=torch.ones(3, 3).bool())
    refused("attn_mask", layer, x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="input"):
        engine.GRU(3, 4)(torch.randn(5, 3))


def test_layers_are_replaced_wherever_they_are_and_shared_ones_stay_shared():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    )
    frozen = nn.LSTM(3, 4).requires_grad_(False)
    model = nn.ModuleList([encoder, frozen, nn.ModuleList([frozen])]).eval()
    x, before = torch.randn(3, 5, 8), model.state_dict()
    expected = encoder(x)
    assert replace_layers(model) is model
    assert (
        torch.allclose(encoder(x), expected, atol=1e-6)
        and not model[0].layers[1].self_attn.training
    )
    assert model[1] is model[2][0] and not any(p.requires_grad for p in model[1].parameters())
    assert {name: t.shape for name, t in model.state_dict().items()} == {
        name: t.shape for name, t in before.items()
    }
    assert isinstance(replace_layers(nn.GRU(3, 4)), engine.GRU)


def test_an_encoder_with_replaced_layers_takes_a_padding_mask_in_evaluation():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2).eval()
    x, padded = torch.randn(4, 6, 8), torch.arange(6) > torch.tensor([[5], [3], [5], [4]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padded)
        found = replace_layers(encoder)(x, src_key_padding_mask=padded)
    assert torch.allclose(found[~padded], expected[~padded], atol=1e-5)


class Sequences(nn.Module):
    """Whatever axis the examples have: attention with a row for everybody, and recurrence."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = MultiheadAttention(4, 2, add_bias_kv=True, batch_first=batch_first)
        self.recurrent = engine.GRU(4, 4, batch_first=batch_first)
        self.head, self.time = nn.Linear(4, 3), int(batch_first)

    def forward(self, x):
        h = self.recurrent(self.attention(x, x, x)[0])[0]
        return self.head(h).mean(self.time)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_sums_of_clipped_gradients_are_autograds_whichever_axis_has_the_examples(batch_first, mode):
    n, clip = 8, 0.05
    x, y = torch.randn(n, 5, 4), torch.arange(n) % 3

    def collate(items):
        stacked = torch.stack([item[0] for item in items], 0 if batch_first else 1)
        return stacked, torch.stack([item[1] for item in items])

    model = Sequences(batch_first)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(n):
        inputs = x[i : i + 1] if batch_first else x[i : i + 1].transpose(0, 1)
        found = torch.autograd.grad(
            F.cross_entropy(model(inputs), y[i : i + 1]), list(model.parameters())
        )
        factor = min(1.0, clip / float(torch.stack([g.norm() for g in found]).norm()))
        expected = [total + factor * g for total, g in zip(expected, found)]
    module, optimizer, *rest, loader = IndividualizedPrivacyEngine().make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=n, collate_fn=collate),
        target_epsilons=[3.0] * n,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=clip,
        batch_first=batch_first,
        grad_sample_mode=mode,
        criterion=F.cross_entropy,
    )
    inputs, targets = next(iter(loader))
    rest[0](module(inputs), targets).backward()
    optimizer.pre_step()
    for p, total in zip(model.parameters(), expected):
        assert torch.allclose(p.summed_grad, total, rtol=1e-4, atol=1e-6)


class Padded(nn.Module):
    """An encoder of tokens, where 0 is no token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 2)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x), src_key_padding_mask=x == 0)[:, 0])


def rows_of_tokens():
    x = torch.randint(1, 9, (12, 6))
    x[::2, 4:] = 0
    return x, torch.arange(12) % 2


def test_an_encoder_that_packs_its_rows_is_refused_with_advice_that_helps():
    x, y = rows_of_tokens()
    model = Padded().eval()
    with pytest.raises(ValueError, match="use_nested_tensor = False"):
        clipped_sum(model, cross_entropy, x, y, 1.0)
    assert clipped_sum(replace_layers(model), cross_entropy, x, y, 1.0).norms.isfinite().all()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 2)
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0][:, -1])


def test_recurrent_layers_are_refused_with_advice_that_helps():
    x, y = rows_of_tokens()
    model = Recurrent()
    refused(r"engine\.replace_layers\(model\)", clipped_sum, model, cross_entropy, x, y, 1.0)
    assert clipped_sum(replace_layers(model), cross_entropy, x, y, 1.0).norms.isfinite().all()
