"""Private training's layers in place of PyTorch's recurrent and attention ones, same weights."""

from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from dpcompanion.engine.attention import MultiheadAttention
from dpcompanion.engine.recurrence import GRU, LSTM, RNN

#: PyTorch's layers whose weights no hook sees, and those that compute the same.
REPLACEMENTS = {nn.MultiheadAttention: MultiheadAttention, nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU}


def replace_layers(module: nn.Module) -> nn.Module:
    """The module with layers for private training in place of its recurrent and attention layers.

    `torch.nn.MultiheadAttention`, `RNN`, `LSTM` and `GRU`, wherever they are, become
    `dpcompanion.engine`'s layers of the same names, with the same weights, outputs and state_dict.
    Call it before the optimizer is made: parameters are new ones.

    `torch.nn.TransformerEncoder` packs padded examples into nested tensors in evaluation mode,
    which none of these layers takes. Here ``use_nested_tensor = False`` is set on it, so that
    outputs at padded positions are others, and no longer 0.

    Args:
        module: changed in place, where it is none of these layers itself.

    Returns:
        The module, or the layer that takes its place.

    Raises:
        ValueError: an LSTM with proj_size.

    >>> model = replace_layers(nn.TransformerEncoderLayer(8, 2, batch_first=True))
    >>> type(model.self_attn).__module__
    'dpcompanion.engine.attention'
    """
    made: dict[int, nn.Module] = {}  # a layer that stands in two places is one layer

    def replaced(part):
        if type(part) not in REPLACEMENTS:
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False
            for name, child in part._modules.items():
                if child is not None and id(child) not in made:
                    made[id(child)] = replaced(child)
                if child is not None:
                    part._modules[name] = made[id(child)]
            return part
        found = REPLACEMENTS[type(part)].of(part)
        if not any(p.requires_grad for p in part.parameters()):
            found.requires_grad_(False)
        return found

    return replaced(module)


def check_replaced(module):
    """No trainable layer of those that `replace_layers` exchanges."""
    for name, part in module.named_modules():
        if type(part) in REPLACEMENTS and any(p.requires_grad for p in part.parameters()):
            kind, opacus = type(part).__name__, ""
            if kind == "MultiheadAttention":
                opacus = (
                    "; Opacus's DPMultiheadAttention does not: with batch_first=True its outputs "
                    "are others"
                )
            raise UnsupportedModuleError(
                f"module must have its weights in layers that Opacus sees, but {name or 'it'!r} is "
                f"a torch.nn.{kind}: use dpcompanion.engine.{kind}, which computes the same from "
                "the same weights, by dpcompanion.engine.replace_layers(module) before the "
                f"optimizer is made{opacus}"
            )
