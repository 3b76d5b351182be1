r"""The two large networks of Boenisch et al.'s table 3, in a form in which IDP-SGD trains them.

A budget enters through rates and clip norms, so all that a network must do is treat examples one by
one and have a gradient for each of them:

* `resnet18`: torchvision's, with group norm for batch norm, 11 million parameters. Per-example
  gradients take 43 MB an image, so the trainer's "mixed" and the engine's "ghost" mode, which keep
  none, are the ones for it.
* `Encoder`: a transformer that classifies token sequences, BERT's parts (embeddings of tokens and
  places, attention, layer norm) at any size and without its weights. `fine_tune` leaves only its
  last block and head to be trained, as is usual for BERT under DP. The trainer goes through it by
  `torch.func`; for the engine Opacus's `ModuleValidator.fix` puts its own attention in place of
  PyTorch's.

ResNet-18's row is the experiment `idp-sgd/table-3-resnet18`, which needs CIFAR-10 and a GPU. BERT's
row has none: it needs SNLI, BERT's pretrained weights and a GPU.

>>> model = fine_tune(encoder(tokens=50, classes=3, width=8, heads=2, blocks=2, length=6))
>>> model(torch.randint(1, 50, (4, 6))).shape
torch.Size([4, 3])
>>> sorted({name.partition(".")[0] for name, p in model.named_parameters() if p.requires_grad})
['blocks', 'head']
"""

import torch
import torch.nn.functional as F
from torch import nn

from dpcompanion import data
from dpcompanion.training import models


@models.seeded
def resnet18(classes=10, *, groups=32):
    """torchvision's ResNet-18 with group norm from `seed`: (n, 3, height, width) -> (n, classes).

    Its blocks change nothing in place, since what a layer put out is still needed to clip it.
    """
    resnet = data.import_torchvision().models.resnet

    class ResidualBlock(resnet.BasicBlock):
        def forward(self, x):
            shortcut = x if self.downsample is None else self.downsample(x)
            return F.relu(shortcut + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))

    model = resnet.ResNet(
        ResidualBlock,
        [2, 2, 2, 2],
        num_classes=classes,
        norm_layer=lambda width: nn.GroupNorm(groups, width),
    )
    model.relu.inplace = False
    return model


class Block(nn.Module):
    """Self-attention and two linear layers, each followed by layer norm, as in BERT."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, absent):
        """x (n, places, width); absent (n, places), True where there is no token to look at."""
        x = self.norm1(x + self.attention(x, x, x, key_padding_mask=absent, need_weights=False)[0])
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))


class Encoder(nn.Module):
    """A transformer that classifies token numbers (n, places), 0 for none, by what its first place
    holds at the end.
    """

    def __init__(self, *, tokens, classes, width, heads, blocks, length):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.norm(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x, tokens == 0)
        return self.head(x[:, 0])


@models.seeded
def encoder(*, tokens=30_522, classes=3, width=768, heads=12, blocks=12, length=512):
    """An `Encoder` initialised by `seed`; the defaults are the size of bert-base-uncased, for
    SNLI's three classes.
    """
    return Encoder(
        tokens=tokens, classes=classes, width=width, heads=heads, blocks=blocks, length=length
    )


def fine_tune(model):
    """Freeze all of an `Encoder` but its last block and its head; returns the model."""
    model.requires_grad_(False)
    for part in (model.blocks[-1], model.head):
        part.requires_grad_(True)
    return model
