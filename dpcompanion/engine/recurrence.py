r"""Recurrent layers made of layers that Opacus sees: `torch.nn.RNN`, `LSTM` and `GRU`.

.. math:: h_t = \tanh(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh})

and likewise for the gates of the other two. PyTorch's own layers multiply inside of one function,
where no hook sees an example's share. Opacus's `DPRNN`, `DPLSTM` and `DPGRU` compute the same but
for three things, which these do as PyTorch: dropout lies between layers (Opacus has it within the
recurrence, and after the last layer); the last states of packed sequences have the type and device
of the others; and rows of a packed sequence may come in any order, as they are brought into that of
the batch before any weight is used.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers.dp_rnn import RNNLinear
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpcompanion._types import Device


class _Cell(nn.Module):
    """The weights of one layer in one direction."""

    def __init__(self, inputs, gates, hidden, bias):
        super().__init__()
        self.ih, self.hh = RNNLinear(inputs, gates, bias), RNNLinear(hidden, gates, bias)


class _Recurrent(nn.Module):
    """What the three share; a state is a tuple of (N, hidden_size), the output first."""

    kind, gates, states = nn.RNN, 1, 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        """Many arguments, since they are those of `torch.nn.RNNBase`."""
        super().__init__()
        if options.pop("proj_size", 0):
            raise ValueError("proj_size must be 0, for projections of states are not supported")
        plain = self.kind(
            input_size,
            hidden_size,
            num_layers,
            bias=bias,
            dropout=dropout,
            bidirectional=bidirectional,
            **options,
        )
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size, self._ways = 0, 2 if bidirectional else 1
        self.cells = nn.ModuleList(
            _Cell(
                input_size if layer == 0 else self._ways * hidden_size,
                self.gates * hidden_size,
                hidden_size,
                bias,
            )
            for layer in range(num_layers)
            for _ in range(self._ways)
        )
        #: {own name: PyTorch's}, in PyTorch's order.
        self._named = {
            f"cells.{layer * self._ways + way}.{matrix}.{what}": f"{what}_{matrix}_l{layer}"
            + "_reverse" * way
            for layer in range(num_layers)
            for way in range(self._ways)
            for what in (("weight", "bias") if bias else ("weight",))
            for matrix in ("ih", "hh")
        }
        self.register_state_dict_post_hook(_as_in_torch)
        self.register_load_state_dict_pre_hook(_from_torch)
        self.load_state_dict(plain.state_dict())  # begins as PyTorch's does
        self.to(device=device, dtype=dtype)

    @classmethod
    def of(cls, layer: Any) -> Any:
        """The layer that computes what PyTorch's does, with copies of its weights."""
        options = (
            {"nonlinearity": layer.nonlinearity} if cls is RNN else {"proj_size": layer.proj_size}
        )
        made = cls(
            layer.input_size,
            layer.hidden_size,
            layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=layer.dropout,
            bidirectional=layer.bidirectional,
            device=layer.weight_hh_l0.device,
            dtype=layer.weight_hh_l0.dtype,
            **options,
        )
        made.load_state_dict(layer.state_dict())
        return made.train(layer.training)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Outputs of the last layer and the last states, as PyTorch's layer gives them.

        Args:
            input: (T, N, input_size), N first with batch_first; or a PackedSequence.
            hx: None, for states of 0, or (layers x directions, N, hidden_size); a pair of them for
                an LSTM.

        Raises:
            ValueError: an input without an axis of examples.
        """
        packed = isinstance(input, PackedSequence)
        lengths = None
        if packed:
            h, lengths = pad_packed_sequence(input, batch_first=True)
            lengths = lengths.to(h.device)
        elif input.ndim != 3:
            raise ValueError(
                f"input must have three axes, one of them of the examples, got {tuple(input.shape)}"
            )
        else:
            h = input if self.batch_first else input.transpose(0, 1)
        n = len(h)
        if hx is None:
            begin = [h.new_zeros(len(self.cells), n, self.hidden_size)] * self.states
        else:
            begin = list(hx) if self.states > 1 else [hx]
        ends = []
        for layer in range(self.num_layers):
            ways = []
            for way in range(self._ways):
                number = layer * self._ways + way
                out, end = self._one_way(
                    self.cells[number],
                    _turned(h, lengths) if way else h,
                    [b[number] for b in begin],
                    lengths,
                )
                ways.append(_turned(out, lengths) if way else out)
                ends.append(end)
            h = torch.cat(ways, -1)
            if self.dropout and self.training and layer < self.num_layers - 1:
                h = F.dropout(h, self.dropout)
        last = tuple(torch.stack(states) for states in zip(*ends))
        if packed:
            out = pack_padded_sequence(
                h, torch.as_tensor(lengths).cpu(), batch_first=True, enforce_sorted=False
            )
            out = PackedSequence(
                out.data, out.batch_sizes, input.sorted_indices, input.unsorted_indices
            )
        else:
            out = h if self.batch_first else h.transpose(0, 1)
        return out, last if self.states > 1 else last[0]

    def _one_way(self, cell, x, state, lengths):
        """Outputs (N, T, hidden_size) and the last state; past a sequence's end its state stays,
        and puts out 0.
        """
        sent, outputs = cell.ih(x), []
        for t in range(x.shape[1]):
            new = self.step(sent[:, t], cell.hh(state[0]), state)
            if lengths is None:
                state, out = new, new[0]
            else:
                within = (t < lengths)[:, None]
                state = [torch.where(within, a, b) for a, b in zip(new, state)]
                out = torch.where(within, new[0], 0.0)
            outputs.append(out)
        return torch.stack(outputs, 1), state

    def step(
        self, sent: torch.Tensor, kept: torch.Tensor, state: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The next state; sent, kept: (N, gates x hidden_size), what inputs and state give."""
        raise NotImplementedError


class RNN(_Recurrent):
    """`torch.nn.RNN` for private training: the same arguments, outputs and state_dict.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias: as in `torch.nn.RNN`.
        batch_first, dropout, bidirectional, device, dtype: as there.

    >>> plain = torch.nn.RNN(3, 4, batch_first=True)
    >>> layer = RNN.of(plain)
    >>> x = torch.randn(2, 5, 3)
    >>> (
    ...     bool((layer(x)[0] - plain(x)[0]).abs().max() < 1e-6),
    ...     list(layer.state_dict()) == list(plain.state_dict()),
    ... )
    (True, True)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: Any,
        **options: Any,
    ):
        super().__init__(
            input_size, hidden_size, num_layers, *args, nonlinearity=nonlinearity, **options
        )
        self.nonlinearity = nonlinearity

    def step(
        self, sent: torch.Tensor, kept: torch.Tensor, state: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return [(torch.tanh if self.nonlinearity == "tanh" else torch.relu)(sent + kept)]


class LSTM(_Recurrent):
    """`torch.nn.LSTM` for private training: same arguments (but proj_size), outputs and state_dict.

    >>> LSTM(3, 4, batch_first=True)(torch.zeros(2, 5, 3))[0].shape
    torch.Size([2, 5, 4])
    """

    kind, gates, states = nn.LSTM, 4, 2

    def step(
        self, sent: torch.Tensor, kept: torch.Tensor, state: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        i, f, g, o = (sent + kept).chunk(4, 1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]


class GRU(_Recurrent):
    """`torch.nn.GRU` for private training: the same arguments, outputs and state_dict.

    >>> GRU(3, 4, batch_first=True)(torch.zeros(2, 5, 3))[0].shape
    torch.Size([2, 5, 4])
    """

    kind, gates = nn.GRU, 3

    def step(
        self, sent: torch.Tensor, kept: torch.Tensor, state: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        (r, z, new), (kept_r, kept_z, kept_new) = sent.chunk(3, 1), kept.chunk(3, 1)
        r, z = (r + kept_r).sigmoid(), (z + kept_z).sigmoid()
        return [(1 - z) * (new + r * kept_new).tanh() + z * state[0]]


def _turned(x, lengths):
    """Each sequence of x (N, T, ...) the other way round, up to its length."""
    if lengths is None:
        return x.flip(1)
    places = torch.arange(x.shape[1], device=x.device)
    places = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
    return x.gather(1, places[..., None].expand(x.shape))


def _as_in_torch(module, state, prefix, metadata):
    for own, name in module._named.items():
        state[prefix + name] = state.pop(prefix + own)


def _from_torch(module, state, prefix, *_):
    for own, name in module._named.items():
        if prefix + name in state:
            state[prefix + own] = state.pop(prefix + name)
