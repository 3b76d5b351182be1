r"""Attention whose weights lie in layers that Opacus sees: `torch.nn.MultiheadAttention`.

.. math:: \mathrm{head}_j = \mathrm{softmax}\Bigl(\tfrac{Q_j K_j^\top}{\sqrt{d}} + M\Bigr) V_j,
    \qquad \mathrm{out} = W_o\,[\mathrm{head}_1, \dots, \mathrm{head}_h] + b_o

PyTorch's own layer multiplies with its weights inside of one function, where no hook sees an
example's share. Opacus's `DPMultiheadAttention` does not compute the same: with batch_first=True it
splits heads along another axis (outputs were 0.49 apart from the same weights), it refuses
`is_causal`, and it takes `attn_mask` for batches of one shape only.

Source: Vaswani et al. 2017.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers.dp_rnn import RNNLinear
from torch import nn

from dpcompanion._types import Device

# Opacus's RNNLinear is an nn.Linear whose examples lie along the first axis, whatever the engine's
# `batch_first` says.


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` for private training: same arguments, outputs and state_dict.

    Args:
        embed_dim, num_heads, dropout, bias: as in `torch.nn.MultiheadAttention`.
        add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as there.

    Raises:
        ValueError: an embed_dim that num_heads does not divide; at a call, inputs without an axis
            of examples (or nested tensors), a mask of another shape or type, `is_causal` without
            `attn_mask`.

    >>> plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> layer = MultiheadAttention.of(plain)
    >>> x, mask = torch.randn(3, 5, 8), torch.ones(5, 5).triu(1).bool()
    >>> bool(
    ...     (layer(x, x, x, attn_mask=mask)[0] - plain(x, x, x, attn_mask=mask)[0]).abs().max()
    ...     < 1e-6
    ... )
    True
    >>> list(layer.state_dict()) == list(plain.state_dict())
    True
    """

    # What PyTorch's Transformer layers ask for, before they take their own path past this layer.
    _qkv_same_embed_dim, in_proj_weight, in_proj_bias = False, None, None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        """Many arguments, since they are those of `torch.nn.MultiheadAttention`."""
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads = {num_heads}, got {embed_dim}"
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        made: Any = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj = (
            RNNLinear(width, embed_dim, bias=bias).to(**made)
            for width in (embed_dim, self.kdim, self.vdim)
        )
        self.out_proj = RNNLinear(embed_dim, embed_dim, bias=bias).to(**made)
        # A row that is the same for everybody, as a layer: its input is a 1 for each example.
        self.bias_k, self.bias_v = (
            RNNLinear(1, embed_dim, bias=False).to(**made) if add_bias_kv else None
            for _ in range(2)
        )
        self.register_state_dict_post_hook(_as_in_torch)
        self.register_load_state_dict_pre_hook(_from_torch)
        plain = nn.MultiheadAttention(
            embed_dim, num_heads, 0.0, bias, add_bias_kv, False, kdim, vdim, **made
        )
        self.load_state_dict(plain.state_dict())  # begins as PyTorch's does

    @classmethod
    def of(cls, layer: Any) -> "MultiheadAttention":
        """The layer that computes what a `torch.nn.MultiheadAttention` does, by copied weights."""
        made = cls(
            layer.embed_dim,
            layer.num_heads,
            dropout=layer.dropout,
            bias=layer.in_proj_bias is not None,
            add_bias_kv=layer.bias_k is not None,
            add_zero_attn=layer.add_zero_attn,
            kdim=layer.kdim,
            vdim=layer.vdim,
            batch_first=layer.batch_first,
            device=layer.out_proj.weight.device,
            dtype=layer.out_proj.weight.dtype,
        )
        made.load_state_dict(layer.state_dict())
        return made.train(layer.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs and attention weights (None without `need_weights`), as PyTorch gives them.

        Args:
            query, key, value: (L, N, embed_dim), (S, N, kdim) and (S, N, vdim); N first with
                batch_first.
            key_padding_mask: (N, S), true (or -inf) where a key is left out.
            attn_mask: (L, S) or (N num_heads, L, S), true where attention is left out, or numbers
                to add.
            average_attn_weights: whether the weights are those of the mean head, (N, L, S), or (N,
                num_heads, L, S).
            is_causal: says that `attn_mask`, which must be given, is causal.
        """
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.is_nested or t.ndim != 3:
                raise ValueError(
                    f"{name} must have three axes, one of them of the examples, got {_shape(t)}"
                )
        if is_causal and attn_mask is None:
            raise ValueError(
                "attn_mask must be given with is_causal, which only says that it is causal, got "
                "None"
            )
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        if self.bias_k is not None and self.bias_v is not None:
            ones = k.new_ones(len(k), 1, 1)
            k, v = torch.cat([k, self.bias_k(ones)], 1), torch.cat([v, self.bias_v(ones)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))  # these rows are for everybody
        q, k, v = (
            t.reshape(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for t in (q, k, v)
        )
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        out = self.out_proj(out.transpose(1, 2).reshape(len(q), q.shape[2], self.embed_dim))
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(self, attn_mask, key_padding_mask, q, k):
        """What is added to the scores, (N or 1, heads or 1, L or 1, S); None without masks."""
        n, length, keys = len(q), q.shape[1], k.shape[1]
        total = None
        if attn_mask is not None:
            shapes = {2: (length, keys), 3: (n * self.num_heads, length, keys)}
            _check_mask("attn_mask", attn_mask, shapes.get(attn_mask.ndim, shapes[2]))
            total = _added(attn_mask, q.dtype)
            total = (
                total.reshape(n, self.num_heads, length, keys)
                if attn_mask.ndim == 3
                else total[None, None]
            )
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, (n, keys))
            padding = _added(key_padding_mask, q.dtype)[:, None, None]
            total = padding if total is None else total + padding
        return total


def _shape(t):
    return "a nested tensor" if t.is_nested else f"the shape {tuple(t.shape)}"


def _check_mask(name, mask, shape):
    if tuple(mask.shape) != shape or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            f"{name} must be boolean or of numbers to add, {shape}, got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )


def _added(mask, dtype):
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _names(module):
    """Of the three projections' weights in PyTorch's layer; None where they are one tensor."""
    same = module.kdim == module.vdim == module.embed_dim
    return None if same else [f"{name}_weight" for name in _PROJECTIONS]


def _as_in_torch(module, state, prefix, metadata):
    """Entries of a state_dict get the names and shapes of PyTorch's layer, in its order."""
    own = {name: state.pop(prefix + name) for name in [key for key, _ in module.named_parameters()]}
    weights, names = [own[f"{name}.weight"] for name in _PROJECTIONS], _names(module)
    found = {"in_proj_weight": torch.cat(weights)} if names is None else dict(zip(names, weights))
    if module.out_proj.bias is not None:
        found["in_proj_bias"] = torch.cat([own[f"{name}.bias"] for name in _PROJECTIONS])
    for name in ("bias_k", "bias_v"):
        if getattr(module, name) is not None:
            found[name] = own[f"{name}.weight"].reshape(1, 1, -1)
    found |= {name: value for name, value in own.items() if name.startswith("out_proj")}
    state.update({prefix + name: value for name, value in found.items()})


def _from_torch(module, state, prefix, *_):
    """And back, where they have PyTorch's names."""
    names = _names(module)
    if names is None and prefix + "in_proj_weight" in state:
        weights = state.pop(prefix + "in_proj_weight").chunk(3)
        state.update(
            {f"{prefix}{name}.weight": weight for name, weight in zip(_PROJECTIONS, weights)}
        )
    for name, own in zip(names or [], _PROJECTIONS):
        if prefix + name in state:
            state[f"{prefix}{own}.weight"] = state.pop(prefix + name)
    if prefix + "in_proj_bias" in state:
        biases = state.pop(prefix + "in_proj_bias").chunk(3)
        state.update({f"{prefix}{name}.bias": bias for name, bias in zip(_PROJECTIONS, biases)})
    for name in ("bias_k", "bias_v"):
        if prefix + name in state:
            state[f"{prefix}{name}.weight"] = state.pop(prefix + name).reshape(-1, 1)
