"""Layers that people use, each in a small model, for tests that try all of them in every way of
training.

`CASES` is {name: Case}; a case builds a model that gives one row of logits an example, and inputs
for it. A library's own modules are made from tiny configurations: nothing is downloaded.

Who adds a layer adds a `Case`; who adds a way of training (`train`'s methods, the engine's modes)
loops over `CASES`.
"""

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations

from dpcompanion.data import import_torchvision

import_torchvision()  # transformers imports it, and beside a CPU build of PyTorch that takes help

from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config  # noqa: E402
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Model  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaModel  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerFF, T5LayerSelfAttention  # noqa: E402

CLASSES, TOKENS = 3, 11


def first(outputs):
    """What a layer gives, or the first thing of it."""
    return (
        outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "last_hidden_state", outputs)
    )


class Net(nn.Module):
    """`layer` in a classifier: `call` says how it is called, `stem` what its input goes through
    before.
    """

    def __init__(self, layer, features, *, call=None, stem=None):
        super().__init__()
        self.stem, self.layer, self.head = (
            stem or nn.Identity(),
            layer,
            nn.Linear(features, CLASSES),
        )
        self.call = call or (lambda layer, h: layer(h))

    def forward(self, x):
        return self.head(torch.tanh(first(self.call(self.layer, self.stem(x)))).flatten(1))


class Tied(nn.Module):
    """An embedding whose weight is also that of the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embedding(x))).mean(1)[:, :CLASSES]


class Positions(nn.Module):
    """Position embeddings that are added to all examples: as (1, T, d), or as (T, d)."""

    def __init__(self, *, batch):
        super().__init__()
        self.batch, self.words, self.places = batch, nn.Embedding(TOKENS, 4), nn.Embedding(8, 4)

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return self.words(x) + self.places(places[None] if self.batch else places)


class Packed(nn.Module):
    """An LSTM on packed sequences, whose lengths are the numbers of tokens above 0."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = (
            nn.Embedding(TOKENS, 4, padding_idx=0),
            nn.LSTM(4, 4, batch_first=True),
        )

    def forward(self, x):
        lengths = (x > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.rnn(packed)[1][0][0]


class OwnWeight(nn.Module):
    """A parameter that belongs to no layer of PyTorch's."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 1.0]))

    def forward(self, x):
        return x * self.gain + self.gain.square().sum()


def seen(layer, x):
    """Batch norm in evaluation mode, with statistics of some inputs."""
    layer(x)
    return layer.eval()


def floats(*shape):
    """A function that makes n inputs of a shape."""
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def tokens(length=6, *, padding=False):
    """A function that makes n sequences of tokens; with `padding` ending in zeros, some early."""

    def make(n, generator):
        x = torch.randint(1, TOKENS, (n, length), generator=generator)
        if padding:
            x[torch.arange(length)[None] > torch.arange(n)[:, None] % length] = 0
        return x

    return make


def attend(layer, h, *, first_axis=0, mask=None):
    """Self-attention of `layer` on h (n, T, d), whatever axis it takes for the examples."""
    h = h if first_axis == 0 else h.transpose(0, 1)
    out = layer(h, h, h, attn_mask=mask, need_weights=False)[0]
    return out if first_axis == 0 else out.transpose(0, 1)


def attend_padded(layer, h):
    """Self-attention that leaves out positions whose first feature is above 1, the first position
    never.
    """
    mask = h[..., 0] > 1
    mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], 1)
    return layer(h, h, h, key_padding_mask=mask, need_weights=False)[0]


def causal(length):
    """A mask of attention to what comes later."""
    return torch.ones(length, length).triu(1).bool()


def rotated(model, h):
    """A Llama model on embeddings."""
    return model(inputs_embeds=h, use_cache=False)


BERT = {
    "vocab_size": TOKENS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_implementation": "eager",
}
GPT2 = {
    "vocab_size": TOKENS,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 8,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attn_implementation": "eager",
}
LLAMA = {
    "vocab_size": TOKENS,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "attn_implementation": "eager",
}
T5 = {
    "vocab_size": TOKENS,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "attn_implementation": "eager",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and inputs.

    Attributes:
        build: () -> a module that gives (n, classes).
        inputs: (n, generator) -> inputs of n examples.
        refused: whether every way of training must refuse it, as it mixes examples or keeps
            something of them.
        random: whether it draws at random in training mode, so that gradients there are known by
            their bounds only.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[..., torch.Tensor]
    refused: bool = False
    random: bool = False


def _case(layer, inputs, features, *, call=None, stem=None, refused=False, random=False):
    def build():
        return Net(layer(), features, call=call, stem=stem() if stem else None)

    return Case(build, inputs, refused, random)


CASES = {
    "Linear": _case(lambda: nn.Linear(4, 5), floats(4), 5),
    "Linear at positions": _case(lambda: nn.Linear(4, 5), floats(6, 4), 30),
    "Conv1d": _case(lambda: nn.Conv1d(2, 3, 3, padding=1), floats(2, 6), 18),
    "Conv2d": _case(lambda: nn.Conv2d(2, 3, 3, stride=2), floats(2, 7, 7), 27),
    "Conv2d in groups": _case(
        lambda: nn.Conv2d(4, 4, 3, groups=2, padding="same"), floats(4, 5, 5), 100
    ),
    "Conv3d": _case(lambda: nn.Conv3d(1, 2, 2), floats(1, 3, 3, 3), 16),
    "ConvTranspose1d": _case(lambda: nn.ConvTranspose1d(2, 3, 3), floats(2, 4), 18),
    "ConvTranspose2d": _case(lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), floats(2, 3, 3), 108),
    "Embedding": _case(lambda: nn.Embedding(TOKENS, 4), tokens(), 24),
    "Embedding with padding_idx": _case(
        lambda: nn.Embedding(TOKENS, 4, padding_idx=0), tokens(padding=True), 24
    ),
    "Embedding with max_norm": _case(
        lambda: nn.Embedding(TOKENS, 4, max_norm=0.1), tokens(), 24, refused=True
    ),
    "Embedding scaled by frequency": _case(
        lambda: nn.Embedding(TOKENS, 4, scale_grad_by_freq=True), tokens(padding=True), 24
    ),
    "Embedding with sparse gradients": _case(
        lambda: nn.Embedding(TOKENS, 4, sparse=True), tokens(), 24
    ),
    "EmbeddingBag": _case(lambda: nn.EmbeddingBag(TOKENS, 4), tokens(), 4),
    "EmbeddingBag with padding_idx": _case(
        lambda: nn.EmbeddingBag(TOKENS, 4, mode="sum", padding_idx=0), tokens(padding=True), 4
    ),
    "positions of a batch of one": _case(lambda: Positions(batch=True), tokens(), 24),
    "positions without a batch": _case(lambda: Positions(batch=False), tokens(), 24),
    "LayerNorm": _case(lambda: nn.LayerNorm(4), floats(6, 4), 24),
    "RMSNorm": _case(lambda: nn.RMSNorm(4), floats(6, 4), 24),
    "GroupNorm": _case(lambda: nn.GroupNorm(2, 4), floats(4, 5), 20),
    "InstanceNorm1d": _case(lambda: nn.InstanceNorm1d(3, affine=True), floats(3, 5), 15),
    "InstanceNorm2d with statistics": _case(
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        floats(3, 4, 4),
        48,
        refused=True,
    ),
    "BatchNorm1d": _case(lambda: nn.BatchNorm1d(4), floats(4), 4, refused=True),
    "BatchNorm2d": _case(lambda: nn.BatchNorm2d(3), floats(3, 4, 4), 48, refused=True),
    "RNN": _case(lambda: nn.RNN(3, 4, batch_first=True), floats(5, 3), 20),
    "LSTM": _case(lambda: nn.LSTM(3, 4, batch_first=True), floats(5, 3), 20),
    "GRU": _case(lambda: nn.GRU(3, 4, batch_first=True), floats(5, 3), 20),
    "LSTM, sequences first": _case(
        lambda: nn.LSTM(3, 4),
        floats(5, 3),
        20,
        call=lambda layer, h: layer(h.transpose(0, 1))[0].transpose(0, 1),
    ),
    "LSTM, packed": _case(Packed, tokens(padding=True), 4),
    "MultiheadAttention": _case(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True), floats(5, 4), 20, call=attend
    ),
    "MultiheadAttention, sequences first": _case(
        lambda: nn.MultiheadAttention(4, 2),
        floats(5, 4),
        20,
        call=lambda layer, h: attend(layer, h, first_axis=1),
    ),
    "MultiheadAttention, causal": _case(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        floats(5, 4),
        20,
        call=lambda layer, h: attend(layer, h, mask=causal(5)),
    ),
    "MultiheadAttention, padded": _case(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True), floats(5, 4), 20, call=attend_padded
    ),
    "TransformerEncoderLayer": _case(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), floats(5, 4), 20
    ),
    "TransformerDecoderLayer": _case(
        lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        floats(5, 4),
        20,
        call=lambda layer, h: layer(h, h.flip(1)),
    ),
    "Bilinear": _case(
        lambda: nn.Bilinear(4, 4, 5), floats(4), 5, call=lambda layer, h: layer(h, h.flip(1))
    ),
    "PReLU": _case(lambda: nn.PReLU(4), floats(4, 5), 20),
    "Dropout": _case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), floats(4), 8, random=True
    ),
    "weights that are tied": Case(Tied, tokens()),
    "a parameter of one's own": _case(OwnWeight, floats(4), 4),
    "weight_norm": _case(lambda: parametrizations.weight_norm(nn.Linear(4, 5)), floats(4), 5),
    "spectral_norm": _case(
        lambda: parametrizations.spectral_norm(nn.Linear(4, 5)), floats(4), 5, refused=True
    ),
    "a layer that is used twice": _case(
        lambda: nn.Linear(4, 4), floats(4), 4, call=lambda layer, h: layer(torch.tanh(layer(h)))
    ),
    "BertEmbeddings": _case(lambda: BertEmbeddings(BertConfig(**BERT)), tokens(), 48),
    "BertLayer": _case(lambda: BertLayer(BertConfig(**BERT)), floats(5, 8), 40),
    "GPT2Block": _case(lambda: GPT2Block(GPT2Config(**GPT2), layer_idx=0), floats(5, 8), 40),
    "GPT2Model": _case(
        lambda: GPT2Model(GPT2Config(**GPT2)),
        tokens(),
        48,
        call=lambda layer, x: layer(x, use_cache=False),
    ),
    "LlamaModel": _case(
        lambda: LlamaModel(LlamaConfig(**LLAMA)),
        tokens(),
        48,
        call=lambda m, x: m(x, use_cache=False),
    ),
    "T5LayerSelfAttention": _case(
        lambda: T5LayerSelfAttention(T5Config(**T5), has_relative_attention_bias=True, layer_idx=0),
        floats(5, 8),
        40,
        call=lambda layer, h: layer(h, cache_position=torch.arange(h.shape[1])),
    ),
    "T5LayerFF": _case(lambda: T5LayerFF(T5Config(**T5)), floats(5, 8), 40),
}


def design(settings, modes):
    """(layer, mode, settings): for each layer and mode one of as few settings of a product {name:
    values} as hold each pair of two of them, all in turn.
    """
    product = list(itertools.product(*settings.values()))
    left = {pair for each in product for pair in itertools.combinations(enumerate(each), 2)}
    chosen = []
    while left:
        best = max(
            product, key=lambda each: len(left & set(itertools.combinations(enumerate(each), 2)))
        )
        chosen.append(best)
        left -= set(itertools.combinations(enumerate(best), 2))
    pairs = itertools.product(CASES, modes)
    return [(name, mode, chosen[number % len(chosen)]) for number, (name, mode) in enumerate(pairs)]
