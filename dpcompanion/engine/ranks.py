"""One private run on several processes, the ranks of `torch.distributed` (`training.distributed`).

The loop is the user's own, on every rank alike, and the loader hands out the rank's share of each
draw. Ranks meet

* when a module is made private: what one refuses no rank begins, and all refuse what they were
  given differently;
* where a filter measures norms: each measures a share, and all take the same decisions;
* in the last piece of each draw: the clipped sums of all are added up on rank 0, which adds the
  noise, once, and all receive the same bits;
* at the end of each epoch, and after the last step, where they compare their weights; and when a
  checkpoint is loaded;
* of a module after `fully_shard`, in every pass (`dpcompanion.engine.shards`).
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from dpcompanion.engine.randomness import digest
from dpcompanion.mechanism.secure import SecureStream
from dpcompanion.training import distributed

_Options = ParamSpec("_Options")
_Made = TypeVar("_Made")
_Engine = TypeVar("_Engine")


def on_all_ranks(
    make: Callable[Concatenate[_Engine, _Options], _Made],
) -> Callable[Concatenate[_Engine, _Options], _Made]:
    """A method of the engine that makes a module private, called by all ranks alike."""

    @functools.wraps(make)
    def together(engine: Any, *arguments: _Options.args, **options: _Options.kwargs) -> _Made:
        with distributed.joined(lasting=True) as ranks:
            made = make(engine, *arguments, **options)
            share_draws(engine)
            ranks.same(
                lambda: _described(engine, options),
                "be given the same module, data, budgets and options",
            )
            return made

    return together


def share_draws(engine: Any) -> None:
    """Give all ranks the key of rank 0's draws, unless a seed's. The noise's key stays."""
    follower = engine.accountant.follower
    stream = follower.draws.generator
    if isinstance(stream, SecureStream) and engine.accountant.origin is None:
        stream.set_state(follower.ranks.from_first(stream.get_state(with_key=True)))


def check_weights(ranks: distributed.Ranks, module: Any, when: str) -> None:
    """Refuse ranks whose weights have become different."""
    ranks.same(
        lambda: {"weights": distributed.digest(module.state_dict())},
        f"hold the same weights {when}",
    )


def check_resumed(engine: Any) -> None:
    """Refuse ranks that have read different checkpoints."""
    accountant, follower = engine.accountant, engine.accountant.follower
    follower.ranks.same(
        lambda: {
            "step": str(accountant.steps),
            "weights": distributed.digest(follower.hooks._module.state_dict()),
            "draws": distributed.digest(follower.draws.state()),
            "budgets": distributed.digest(accountant.budgets.state_dict()),
        },
        "read the same checkpoint",
    )


def _described(engine, options):
    accountant, follower = engine.accountant, engine.accountant.follower
    module, original = follower.hooks._module, follower.original_optimizer
    plain = (bool, int, float, str, type(None))
    return {
        "budgets": distributed.digest(
            accountant.budgets.parameters(),
            accountant.budgets.state_dict(),
            engine.max_grad_norms,
            engine.sample_rates,
        ),
        "data": digest(engine.dataset, engine.people),
        "model": distributed.digest(
            [(name, p.requires_grad) for name, p in module.named_parameters()],
            [(name, part.training) for name, part in module.named_modules()],
            module.state_dict(),
        ),
        "optimizer": distributed.digest(type(original).__name__, original.state_dict()),
        "seed": repr(accountant.origin),
        "draws": distributed.digest(follower.draws.state()),
        **{
            name: repr(value) if isinstance(value, plain) else type(value).__qualname__
            for name, value in options.items()
        },
    }
