"""Every example's gradient norm at the present weights, by a pass over the data set."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from dpcompanion.gradients import clipping
from dpcompanion.gradients.passes import norms_of_all, resolve_method, undisturbed
from dpcompanion.gradients.proof import rows_to_look_through


class GivenNorms:
    """Called, it gives the (n,) norms that a function of the caller's says, which may use the
    module itself: on several ranks, to all what it says on rank 0.

    Args:
        follower: the optimizer, whose module and gradients stay as they are.
        function: called without arguments, it gives (n,) norms.
    """

    def __init__(self, follower, function):
        self._follower, self._function = follower, function

    def __call__(self):
        with self._follower.set_aside():
            norms = self._function()
        ranks = self._follower.ranks
        return norms if ranks.size == 1 else ranks.from_first(torch.as_tensor(norms).detach().cpu())


class GradientNorms:
    """Called, it gives the examples' gradient norms, (n,), before clipping, in evaluation mode.

    Args:
        hooks: what Opacus made of the module.
        loss: (outputs, targets) -> (n,).
        dataset, collate: batches are (inputs, targets).
        size: examples of a batch.
        ranks: those of the run, each of which measures its share.
    """

    def __init__(self, hooks, loss, dataset, collate, *, size, ranks):
        self._hooks = hooks
        self._loss = loss
        self._dataset = dataset
        self._collate = collate
        self._size = size
        self._method, self._ranks = None, ranks

    def __call__(self):
        with undisturbed(self._hooks) as module:
            if self._method is None:
                ((x, y),) = self._batches(
                    Subset(self._dataset, rows_to_look_through(len(self._dataset)).tolist())
                )
                self._method = clipping.resolve_method(module, self._loss, x, y)
            n = len(self._dataset)
            own = (
                Subset(self._dataset, range(n)[self._ranks.share(n)])
                if self._ranks.size > 1
                else self._dataset
            )
            found = [
                clipping.gradient_norms(module, self._loss, x, y, method=self._method)
                for x, y in self._batches(own, self._size)
            ]
            first = next(module.parameters())
            (norms,) = self._ranks.gathered(n, torch.cat(found or [first.new_zeros(0)]))
            return norms

    def _batches(self, dataset, size=None):
        device = next(self._hooks._module.parameters()).device
        # A generator of its own: PyTorch's default one stays as it is.
        loader = DataLoader(
            dataset,
            batch_size=size or len(dataset),
            collate_fn=self._collate,
            generator=torch.Generator(),
        )
        for batch in loader:
            if (
                not isinstance(batch, (list, tuple))
                or len(batch) != 2
                or not all(map(torch.is_tensor, batch))
            ):
                raise ValueError(
                    "norms must be given where batches are not pairs of tensors, (inputs, "
                    f"targets), got {type(batch).__name__}"
                )
            yield tuple(t.to(device) for t in batch)


class PersonNorms:
    """Called, it gives the (n,) norms of the persons' gradients, before clipping, in evaluation
    mode: of each at a choice of at most k of their rows.

    Args:
        hooks: what Opacus made of the module.
        loss: (outputs, targets) -> (rows,).
        examples: the persons (`dpcompanion.training.people.PersonItems`).
        size: persons that are measured at once.
        choice: the `RowChoice` of the run, by whose stream rows are chosen.
        ranks: those of the run, each of which measures its share.
    """

    def __init__(self, hooks, loss, examples, *, size, choice, ranks):
        self._hooks = hooks
        self._loss = loss
        self._examples = examples
        self._size = size
        self._choice = choice
        self._method, self._ranks = None, ranks

    def __call__(self):
        with self._choice.drawing("norms"), undisturbed(self._hooks) as module:
            if self._method is None:
                self._method = resolve_method(module, self._loss, self._examples, "auto")
            options: dict[str, Any] = {"method": self._method, "microbatch_size": self._size}
            share = self._ranks.share(len(self._examples))
            found = norms_of_all(module, self._loss, self._examples, within=share, **options)
        (norms,) = self._ranks.gathered(len(self._examples), found)
        return norms
