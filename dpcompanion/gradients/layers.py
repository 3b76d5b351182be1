r"""The gradient of one layer, example by example, from what went in and what came back.

The weight of a linear layer or convolution sees example :math:`i` as two matrices: its
inputs :math:`A_i` (positions x in; the patches, for a convolution) and the gradients
of its outputs :math:`G_i` (out x positions).  The gradient of the weight is :math:`G_i A_i`.
Clipping needs its norm, and then a weighted sum over examples.  Two ways:

* explicit: multiply, in x out numbers an example, and take the norm;
* ghost: :math:`\lVert G_i A_i\rVert^2 = \langle A_i A_i^T, G_i^T G_i\rangle`, positions^2 numbers
  an example and no gradient (Goodfellow 2015; Li et al. 2022; Bu et al. 2022). With one position it
  is a product of two norms.

The sum then comes from the kept gradients, or from one ordinary weighted weight gradient. Neither
needs a second pass through the network. A weight that is computed from parameters
(`dpcompanion.gradients.reparametrized`) adds one linear map, the same for all examples. Any other
layer that maps one tensor to one tensor is differentiated example by example with `torch.func`.

Only these last two look at the layer's weights. So the examples of several networks (runs) can be
worked on together, first all of one run, then all of the next; sums are made for each run: factors
(runs, examples of a run) give {name: (runs, *shape)}.

>>> layer = torch.nn.Linear(3, 2).double()
>>> a, g = torch.randn(5, 3).double(), torch.randn(5, 2).double()
>>> gradient = Ghost(layer, [(a, g)])
>>> explicit = torch.einsum("no,ni->noi", g, a)
>>> squares = explicit.flatten(1).square().sum(1) + g.square().sum(1)
>>> torch.allclose(gradient.squared_norms(), squares)
True
>>> torch.allclose(gradient.weighted_sum(torch.ones(1, 5).double())["weight"][0], explicit.sum(0))
True
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_weight

from dpcompanion._devices import whole_convolutions
from dpcompanion.gradients.matrices import (
    CACHED,
    bias_gradients,
    count_positions,
    gram_is_cheaper,
    in_full,
    in_one_precision,
    matrices,
    padded,
    rows_at_once,
    weight_gradients,
)
from dpcompanion.gradients.reparametrized import Reparametrized
from dpcompanion.gradients.tensors import (
    UnsupportedModel,
    added_up,
    call_with,
    own_parameters,
    squared_norms,
)

# Where the axes of a convolution's weight, (n, out, in, height, width), are among those of its
# gradients as computed.
AXES = (0, 1, 4, 2, 3)
# Numbers that a block of examples may take while a norm is worked out: few enough for a processor's
# memory to be used again, and on a GPU so many that launches do not count.
_BLOCK, _BLOCK_ON_GPU = 2**23, 2**25


def _scaled(tensor, factors):
    return tensor * factors.to(tensor.dtype).reshape(-1, *[1] * (tensor.ndim - 1))


def _in_float(g, axis=0):
    """Pairs (where along the axis, what is there), in float32 what is held in bfloat16: on a
    processor a few examples at a time, each in the place of those before it, so that they stay in
    its cache. One pair at least, if an empty one.
    """
    if g.dtype != torch.bfloat16:
        yield slice(None), g
        return
    # A quarter: they lie beside what they are made from, and are read at once. Four at least: fewer
    # are added up several times slower, even where no cache holds them.
    rows = max(4, rows_at_once(g.device, 4 * g.numel() // max(1, g.shape[axis]), g.shape[axis]))
    place = torch.empty_like(g.narrow(axis, 0, min(rows, g.shape[axis])), dtype=torch.float32)
    for start in range(0, max(1, g.shape[axis]), rows):
        part = g.narrow(axis, start, min(rows, g.shape[axis] - start))
        yield slice(start, start + rows), place.narrow(axis, 0, part.shape[axis]).copy_(part)


class Explicit:
    """Gradients of one layer's parameters, held for every example as {name: (n, *shape)}.

    What was multiplied in bfloat16 is held in it; norms and sums of it are made in float32.

    The axes of a convolution's weight may be held in another order, the one in which they were
    computed: `axes` are their places among the axes of the sums, of which the first counts runs.
    """

    def __init__(self, gradients, axes=None):
        self.gradients, self.axes = gradients, axes

    def squared_norms(self):
        return sum(
            torch.cat([squared_norms(part) for _, part in _in_float(g)])
            for g in self.gradients.values()
        )

    def keep_only(self, rows):
        self.gradients = {name: _rows(g, rows) for name, g in self.gradients.items()}

    def weighted_sum(self, factors):
        factors, sums = factors.unsqueeze(1), {}
        for name, g in self.gradients.items():
            shape = g.shape[1:]
            g = g.reshape(len(factors), factors.shape[-1], shape.numel())
            dtype = torch.float32 if g.dtype == torch.bfloat16 else g.dtype
            total = g.new_empty(len(factors), 1, g.shape[2], dtype=dtype)
            for number, (where, part) in enumerate(_in_float(g, 1)):
                # In its place: it is as large as a gradient. Nothing is read of it at first.
                total.baddbmm_(factors[..., where].to(dtype), part, beta=min(number, 1))
            sums[name] = total.reshape(-1, *shape)
        if self.axes and "weight" in sums:
            sums["weight"] = sums["weight"].permute(self.axes)
        return sums


def _rounded_on(squares, length, terms, dtype):
    """Squared norms of an example's exact gradients, made so long that they hold for what is added
    to a sum in `dtype`.

    A gradient is a sum of so many `terms`, whose norms add up to `length` at most. Each takes two
    roundings, and one more whenever another is added to it. Where terms cancel, what these leave
    may be longer than the exact gradient. inf where a term may be longer than `dtype` can hold, and
    nan where one is not finite.
    """
    unit = torch.finfo(dtype).eps / 2
    length = torch.where(length < torch.finfo(dtype).max / 4, length, length * math.inf)
    return (squares.sqrt() + (terms + 4) * unit * length).square()


def _before_rounding(squares):
    """Squared norms that what was rounded to bfloat16, each number to nearest, had before."""
    return squares / (1 - torch.finfo(torch.bfloat16).eps / 2) ** 2


class Ghost:
    """A linear layer or convolution of which only inputs and output gradients are held.

    The norm comes from Gram matrices, or from explicit gradients of a few examples at a time where
    that is less work: in bfloat16 if the layer computed in it, and then what their rounding may
    hide, 0.4%, is added. Gram products are added up in float64: their terms can cancel, and a norm
    must not come out too small. Nor must it where the sum, which is added up in the type of the
    weight, rounds what cancels.
    """

    def __init__(self, module, uses):
        self.module, self.uses = module, uses

    def squared_norms(self):
        return self.weight_squares() + self.bias_squares()

    def weight_squares(self):
        """What the weight adds to the squared norms; 0 if it is not trained."""
        if "weight" not in own_parameters(self.module):
            return 0
        return self.rounded_on(
            torch.cat([self._weight_squares(block) for block in self.blocks(self.uses)])
        )

    def rounded_on(self, squares, stretch: float | torch.Tensor = 1.0):
        """Squared norms of gradients of the weight, which hold for what is added up: of the
        weight's own parameters, if these gradients are at most `stretch` times as long.
        """
        positions = count_positions(self.module, self.uses)
        if positions == 1:
            return squares  # one product, in which nothing cancels
        # By Cauchy and Schwarz; a place of the input is in as many patches as a kernel has places,
        # at most.
        each = self.module.weight[0, 0].numel()
        products = (squared_norms(self._seen(a)) * each * squared_norms(g) for a, g in self.uses)
        length = added_up(product.sqrt() for product in products)
        return _rounded_on(squares, stretch * length, positions, self._dtype)

    def _seen(self, a):
        conv = self.module
        return padded(conv, a) if type(conv) is nn.Conv2d and conv.padding_mode != "zeros" else a

    @property
    def _dtype(self):
        return next(iter(own_parameters(self.module).values())).dtype

    def blocks(self, uses, numbers=None):
        """The uses of a few examples at a time, such that their gradients or patches take that many
        numbers; in the precision in which they are multiplied for norms.
        """
        weight, positions = self.module.weight, count_positions(self.module, uses)
        if numbers is None:
            numbers = _BLOCK if weight.device.type == "cpu" else _BLOCK_ON_GPU
        rows = max(1, numbers // max(weight.numel(), positions * weight[0].numel()))
        short = positions > 1 and not gram_is_cheaper(
            self.module, positions, kept=False, dtype=uses[0][1].dtype
        )
        # a GPU may add up parts of one product in bfloat16, too
        short &= uses[0][1].device.type == "cpu"
        for i in range(0, len(uses[0][0]), rows):
            block = [(a[i : i + rows], g[i : i + rows]) for a, g in uses]
            full = (
                [(in_full(self.module, a), in_full(self.module, g)) for a, g in block]
                if not short
                else []
            )
            yield in_one_precision(self.module, block) if short else full

    def bias_squares(self):
        """What the bias adds to the squared norms; 0 if it has none to train."""
        if "bias" not in own_parameters(self.module):
            return 0
        squares = squared_norms(
            added_up(bias_gradients(self.module, in_full(self.module, g)) for _, g in self.uses)
        )
        positions = count_positions(self.module, self.uses)
        if positions == 1:
            return squares
        length = (positions * added_up(squared_norms(g) for _, g in self.uses)).sqrt()
        return _rounded_on(squares, length, positions, self._dtype)

    def _weight_squares(self, uses) -> torch.Tensor:
        positions, dtype = count_positions(self.module, uses), uses[0][1].dtype
        if positions > 1 and (
            dtype == torch.bfloat16 or not gram_is_cheaper(self.module, positions, kept=False)
        ):
            squares = torch.cat(
                [squared_norms(g) for _, g in _in_float(weight_gradients(self.module, uses))]
            )
            return _before_rounding(squares) if dtype == torch.bfloat16 else squares
        pairs = [matrices(self.module, a, g) for a, g in uses]
        inputs, outputs = torch.cat([p[0] for p in pairs], 2), torch.cat([p[1] for p in pairs], 3)
        if positions == 1:
            a, g = (
                squared_norms(part.flatten(0, 1)).view(part.shape[:2]) for part in (inputs, outputs)
            )
            # nan where one is not finite, be the other 0: that example is to be dropped
            product = a * g
            return torch.where(
                (a > 0) & (g > 0), product.clamp(min=torch.finfo(torch.float64).tiny), product
            ).sum(1)
        inputs, outputs = inputs.double(), outputs.double()
        return ((inputs @ inputs.mT) * (outputs.mT @ outputs)).sum((1, 2, 3)).clamp(min=0)

    def keep_only(self, rows):
        self.uses = [(_rows(a, rows), _rows(g, rows)) for a, g in self.uses]

    def weighted_sum(self, factors):
        sums, runs = {}, len(factors)
        for a, g in self.uses:
            g = _scaled(in_full(self.module, g), factors.flatten())
            for name in own_parameters(self.module):
                term = (
                    self._weight_sum(in_full(self.module, a), g, runs)
                    if name == "weight"
                    else bias_gradients(self.module, g).unflatten(0, factors.shape).sum(1)
                )
                sums[name] = sums[name] + term if name in sums else term
        return sums

    def _weight_sum(self, a, g, runs):
        conv = self.module
        if type(conv) is nn.Conv2d:
            padding = conv.padding
            if conv.padding_mode != "zeros" or isinstance(padding, str):
                a, padding = padded(conv, a), 0
            options: dict[str, Any] = dict(
                stride=conv.stride, padding=padding, dilation=conv.dilation, groups=conv.groups
            )
            pieces = zip(a.chunk(runs), g.chunk(runs))
            with whole_convolutions(a.device):
                return torch.stack(
                    [conv2d_weight(a, conv.weight.shape, g, **options) for a, g in pieces]
                )
        return g.reshape(runs, -1, g.shape[-1]).mT @ a.reshape(runs, -1, a.shape[-1])


class GhostReparametrized:
    """A layer whose weight is computed from parameters: gradients of the weight it uses, a few
    examples at a time, are pulled back to the parameters for the norms; for the sum, one weighted
    gradient of each run is.

    Where gradients are made in bfloat16, they may be held as they are, before they are pulled back
    (`hold`).
    """

    def __init__(self, module, uses, stacked):
        self.module, self.stacked = module, stacked
        self.ghost, self.held, self._squares = Ghost(module.ordinary(), uses), None, None

    @property
    def gradients(self):
        return self.held.gradients if self.held else {}

    def hold(self):
        """This, holding the effective weight's gradients for the sum: the very numbers measured."""
        self.held = _explicit_matrices(self.ghost.module, self.ghost.uses)
        self._squares, self.ghost.uses = self.squared_norms(), []
        return self

    @property
    def _is_short(self):
        g = self.ghost.uses[0][1]
        return g.dtype == torch.bfloat16 and g.device.type == "cpu"

    def _parameters(self, run):
        return self.module.weight_parameters(self.stacked, run)

    def _trained(self, found):
        return {name: found[name] for name in own_parameters(self.module) if name in found}

    def _effective(self):
        """Pairs of a run and gradients of its effective weight, as the parameters' are laid out, in
        float32 or more, a few examples at a time; and by how much their norms may have been
        rounded, of them.
        """
        ghost, runs = self.ghost, len(next(iter(self.stacked.values()))) if self.stacked else 1
        examples = len(ghost.uses[0][0]) // runs
        for run in range(runs):
            mine = slice(run * examples, (run + 1) * examples)
            if self.held:
                blocks = [self.held.gradients["weight"][mine]]
            else:
                uses = [(a[mine], g[mine]) for a, g in ghost.uses]
                blocks = ghost.blocks(uses, CACHED * (8 if self._is_short else 1))
                blocks = (weight_gradients(ghost.module, block) for block in blocks)
            for block in blocks:
                short = block.dtype == torch.bfloat16
                for _, part in _in_float(block):
                    yield (
                        run,
                        part.permute(AXES) if part.ndim == 5 else part,
                        short and not self.held,
                    )

    def pulled(self):
        """Gradients of the parameters, {name: (n, *shape)}, a few examples at a time."""
        runs = len(next(iter(self.stacked.values()))) if self.stacked else 1
        back = [self.module.pull_back(**self._parameters(run)) for run in range(runs)]
        for run, gradients, _ in self._effective():
            # the next ones take their place
            gradients = gradients.clone() if self._is_short else gradients
            yield self._trained(back[run](gradients))

    def squared_norms(self):
        if self._squares is not None:
            return self._squares
        runs = len(next(iter(self.stacked.values()))) if self.stacked else 1
        stretches = [self.module.stretch(**self._parameters(run)).double() for run in range(runs)]
        if self._is_short:
            squares = torch.cat(list(self._squares_in_short(stretches)))
        else:
            squares = torch.cat(
                [added_up(squared_norms(g) for g in pulled.values()) for pulled in self.pulled()]
            )
        stretch = torch.stack(stretches).repeat_interleave(len(squares) // runs)
        return self.ghost.rounded_on(squares, stretch) + self.ghost.bias_squares()

    def _squares_in_short(self, stretches):
        """Squared norms of the gradients that `_effective` gives, or were before rounding."""
        measures = [
            self.module.pulled_squares(**self._parameters(run)) for run in range(len(stretches))
        ]
        for run, gradients, rounded in self._effective():
            whole = squared_norms(gradients) if rounded else None
            squares = added_up(self._trained(measures[run](gradients)).values())
            if whole is not None:
                lost = _before_rounding(whole).sqrt() - whole.sqrt()
                squares = (squares.sqrt() + stretches[run] * lost).square()
            yield squares

    def explicit(self):
        """The same, with the gradients held."""
        gradients, axes = {}, AXES if isinstance(self.module, nn.Conv2d) else None
        for pulled in self.pulled():
            for name, g in pulled.items():
                gradients.setdefault(name, []).append(
                    g.permute(0, 1, 3, 4, 2) if axes and name == "weight" else g
                )
        gradients = {name: torch.cat(parts) for name, parts in gradients.items()}
        if "bias" in own_parameters(self.module):
            gradients["bias"] = added_up(
                bias_gradients(self.ghost.module, in_full(self.module, g))
                for _, g in self.ghost.uses
            )
        return Explicit(gradients, axes)

    def keep_only(self, rows):
        (self.held or self.ghost).keep_only(rows)

    def weighted_sum(self, factors):
        sums = (self.held or self.ghost).weighted_sum(factors)
        runs = [
            self._trained(self.module.pull_back(**self._parameters(run))(g[None]))
            for run, g in enumerate(sums.pop("weight"))
        ]
        return sums | {name: torch.cat([pulled[name] for pulled in runs]) for name in runs[0]}


class GhostEmbedding:
    """An embedding: an example's gradient is, for each of its tokens, the sum over the positions
    that hold it.
    """

    def __init__(self, module, uses):
        self.module = module
        self.tokens = torch.cat([a.reshape(len(a), -1) for a, _ in uses], 1)
        self.g = in_full(
            module, torch.cat([g.reshape(len(g), -1, g.shape[-1]) for _, g in uses], 1)
        )
        if module.padding_idx is not None:
            self.g = self.g * (self.tokens != module.padding_idx).unsqueeze(-1)

    def sums(self):
        """Keys example x rows of the weight + row (k,), and the gradient of that row for that
        example (k, out).
        """
        keys = (
            self.tokens
            + len(self.module.weight)
            * torch.arange(len(self.tokens), device=self.tokens.device)[:, None]
        )
        pairs, where = keys.unique(return_inverse=True)
        sums = self.g.new_zeros(len(pairs), self.g.shape[-1], dtype=torch.float64)
        return pairs, sums.index_add_(0, where.flatten(), self.g.flatten(0, 1).double())

    def squared_norms(self):
        squares = (
            self._by_pairs_of_positions() if self.tokens.device.type != "cpu" else self._by_tokens()
        )
        terms = self.tokens.shape[1]
        if terms == 1:
            return squares
        return _rounded_on(squares, (terms * squared_norms(self.g)).sqrt(), terms, self.g.dtype)

    def _by_pairs_of_positions(self):
        """Without the number of different tokens, for which a GPU would make its host wait."""
        same = self.tokens.unsqueeze(2) == self.tokens.unsqueeze(1)
        g = self.g.double()
        return ((g @ g.mT) * same).sum((1, 2)).clamp(min=0)

    def _by_tokens(self):
        pairs, sums = self.sums()
        return sums.new_zeros(len(self.tokens)).index_add_(
            0, pairs // len(self.module.weight), squared_norms(sums)
        )

    def keep_only(self, rows):
        self.g = _rows(self.g, rows)

    def weighted_sum(self, factors):
        runs, rows = len(factors), len(self.module.weight)
        tokens = (
            self.tokens.reshape(runs, -1)
            + rows * torch.arange(runs, device=self.tokens.device)[:, None]
        )
        weight = self.g.new_zeros(runs * rows, self.g.shape[-1])
        weight.index_add_(0, tokens.flatten(), _scaled(self.g, factors.flatten()).flatten(0, 1))
        return {"weight": weight.unflatten(0, (runs, rows))}


def float64_sum(layer, factors):
    """`layer.weighted_sum` of one run, in float64, of just what `layer.squared_norms` measured.

    Each term takes two roundings at most before it is added. `layer` must be one that
    `layer_gradient` made by "materialized"; factors (n,) float64.
    """
    if isinstance(layer, Explicit):
        sums = {}
        for name, g in layer.gradients.items():
            g, shape = g.flatten(1), g.shape[1:]
            rows = max(1, _BLOCK // max(1, g.shape[1]))
            parts = (
                factors[i : i + rows] @ g[i : i + rows].double() for i in range(0, len(g), rows)
            )
            sums[name] = added_up(parts).view(shape)
        if layer.axes and "weight" in sums:
            sums["weight"] = sums["weight"].permute([axis - 1 for axis in layer.axes[1:]])
        return sums
    if isinstance(layer, GhostEmbedding):
        pairs, rows = layer.sums()
        scaled = rows * factors[pairs // len(layer.module.weight)][:, None]
        size = len(layer.module.weight)
        return {"weight": scaled.new_zeros(size, rows.shape[1]).index_add_(0, pairs % size, scaled)}
    ((a, g),) = layer.uses
    a, g = a.reshape(len(a), -1).double(), g.reshape(len(g), -1).double() * factors[:, None]
    return {
        name: g.mT @ a if name == "weight" else g.sum(0) for name in own_parameters(layer.module)
    }


def _rows(tensor, rows):
    """`tensor` with zeros in the rows that are not to be kept: 0 times inf would be nan."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(rows.reshape(-1, *[1] * (tensor.ndim - 1)), tensor, 0)


def _explicit_matrices(module, uses):
    uses = in_one_precision(module, uses)
    gradients, trainable = {}, own_parameters(module)
    if "weight" in trainable:
        gradients["weight"] = weight_gradients(module, uses)
    if "bias" in trainable:
        gradients["bias"] = added_up(bias_gradients(module, g) for _, g in uses)
    return Explicit(gradients, AXES if type(module) is nn.Conv2d else None)


def _explicit_norm_layer(module, uses):
    """Group and layer norm; on a processor a few examples at a time, which stay in its cache."""
    gradients = {}
    for a, g in uses:
        rows = rows_at_once(a.device, 4 * a.numel() // max(1, len(a)), len(a))
        blocks = [
            _norm_layer_gradients(module, *pair) for pair in zip(a.split(rows), g.split(rows))
        ]
        for name in own_parameters(module):
            term = torch.cat([block[name] for block in blocks])
            gradients[name] = gradients[name] + term if name in gradients else term
    return Explicit(gradients)


def _norm_layer_gradients(module, a, g):
    """Scale sees the normalised input, shift sees the output gradient; both everywhere."""
    if isinstance(module, nn.GroupNorm):
        normal, everywhere = F.group_norm(a, module.num_groups, eps=module.eps), range(2, a.ndim)
    else:
        normal = F.layer_norm(a, module.normalized_shape, eps=module.eps)
        everywhere = range(1, a.ndim - module.weight.ndim)
    gradients = {"weight": normal.mul_(g), "bias": g}
    return (
        {name: t.sum(tuple(everywhere)) for name, t in gradients.items()}
        if everywhere
        else gradients
    )


def _explicit_any(module, uses, stacked):
    """Any layer: the vector-Jacobian product of the layer for each example, by torch.func."""
    parameters = {name: p.detach() for name, p in own_parameters(module).items()}

    def one(parameters, a, g):
        def layer(parameters):
            return call_with(module, parameters, a.unsqueeze(0))

        return torch.func.vjp(layer, parameters)[1](g.unsqueeze(0))[0]

    each, gradients = torch.func.vmap(one, in_dims=(None, 0, 0)), {}
    for a, g in uses:
        try:
            if stacked:
                runs = len(next(iter(stacked.values())))
                terms = torch.func.vmap(each)(
                    stacked, a.unflatten(0, (runs, -1)), g.unflatten(0, (runs, -1))
                )
                terms = {name: term.flatten(0, 1) for name, term in terms.items()}
            else:
                terms = each(parameters, a, g)
        except RuntimeError as error:
            raise UnsupportedModel(
                f"a layer {type(module).__name__} cannot be differentiated by itself: {error}"
            ) from error
        for name, term in terms.items():
            gradients[name] = gradients[name] + term if name in gradients else term
    return Explicit(gradients)


#: Layers that have a rule, for their weight and bias.
_RULED = (nn.Linear, nn.Conv2d, nn.Embedding, nn.GroupNorm, nn.LayerNorm)


def layer_gradient(module, uses, method, budget, stacked=None, kept=True):
    """The gradient of `module` from its uses [(inputs, output gradients)], in the cheapest form.

    The parameters of several runs of the layer, if so, are in `stacked`, {name: (runs, *shape)}.
    `method` "ghost" keeps no gradient of a linear layer, convolution or embedding; "mixed" keeps it
    where that saves arithmetic and needs at most `budget` numbers, and makes none where it is not
    to be `kept` for a sum and the norm is cheaper without. "materialized" is for `float64_sum`:
    what is measured is what is added, so that only a linear layer with one position an example,
    whose gradient is a product of two vectors, need not be held.
    """
    if type(module) in _RULED and own_parameters(module).keys() - {"weight", "bias"}:
        # One that was given parameters, and with them another way forward, as of an adapter.
        uses = [(in_full(module, a), in_full(module, g)) for a, g in uses]
        return _explicit_any(module, uses, stacked)
    if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq):
        return GhostEmbedding(module, uses)
    if method == "materialized" and type(module) in (nn.Linear, nn.Conv2d):
        outer = type(module) is nn.Linear and len(uses) == 1 and count_positions(module, uses) == 1
        return Ghost(module, uses) if outer else _explicit_matrices(module, uses)
    if type(module) in (nn.Linear, nn.Conv2d):
        too_large = module.weight.numel() * len(uses[0][0]) > budget
        positions, dtype = count_positions(module, uses), uses[0][1].dtype
        if method == "ghost" or too_large or gram_is_cheaper(module, positions, kept, dtype):
            return Ghost(module, uses)
        return _explicit_matrices(module, uses)
    if isinstance(module, Reparametrized) and set(own_parameters(module)) - {"bias"}:
        layer = GhostReparametrized(module, uses, stacked)
        explicit = sum(p.numel() for p in own_parameters(module).values()) * len(uses[0][0])
        fits = explicit <= min(budget, sum(a.numel() + g.numel() for a, g in uses))
        if method == "mixed" and fits and len(uses) == 1 and uses[0][1].dtype == torch.bfloat16:
            return layer.hold()
        return layer.explicit() if method == "materialized" or method == "mixed" and fits else layer
    uses = [(in_full(module, a), in_full(module, g)) for a, g in uses]
    if type(module) in (nn.GroupNorm, nn.LayerNorm):
        return _explicit_norm_layer(module, uses)
    return _explicit_any(module, uses, stacked)
