r"""Opacus with a privacy budget for each example: `IndividualizedPrivacyEngine`.

A drop-in for `opacus.PrivacyEngine`. Against plain Opacus three lines change: the engine's name,
its method, and the budgets. The training loop stays as it is, with `BatchMemoryManager` too::

    engine = IndividualizedPrivacyEngine()
    model, optimizer, loader = engine.make_private_with_budgets(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        max_grad_norm=1.0,
        target_epsilons=budgets,
        target_delta=1e-5,
        epochs=10,
        method="sample",
    )

Or the budgets are those of a filter (`dpcompanion.filters`), which charges each example for what
its own gradients need, and keeps them in for longer: `make_private_with_filter`.

What makes each budget hold:

* parameters come from `dpcompanion.idp`: for example i the rate q_i and the clip norm c_i, and one
  noise of standard deviation sigma times the mean clip norm; with a filter one rate, and the clip
  norms that it makes of each example's own gradient before a step, and charges for;
* the loader's sampler is replaced by independent draws, example i with probability q_i;
* the data set notes which examples it hands out, so that each gradient meets its own clip norm
  whatever way a draw is cut into physical batches. So a batch must keep its order, from the collate
  function (which is tried out beforehand) to the loss, and be used before the next one is fetched:
  a loop that fetches ahead gives examples the norms of others;
* the optimizer ends a step with the last piece of its draw: it never joins two draws, takes no
  example and no draw twice, and goes by what was handed out, not by a queue of signals, which an
  evaluation through the same loader would leave out of step;
* every draw becomes a step, in its turn, an empty one too, which is noise alone: a loop that leaves
  some out by what is in them raises the rate of the others, and is refused. Each pass begins with
  the first draw that is no step yet, and so does a run that goes on from a checkpoint: there is one
  sequence of draws, however often it is looked at;
* with the first batch it is proved against plain autograd that each example's gradient is its own
  and its norm whole, before any step: a weight used outside of its layer is refused, and so is a
  function that mixes examples. It is proved again with batches 2, 4, 8 and so on, and with the next
  batch when the state has changed that says which code runs: the mode of a submodule, a flag, a
  hook. With every batch each layer must be called with one row for each example;
* the loss is a mean (or, with loss_reduction "sum", a sum) of one number an example: what comes
  back to the module's outputs is compared with standard losses of them, or with the criterion that
  the engine was given (`dpcompanion.engine.losses`). Class weights, or a mean over a batch's
  tokens, are refused without a criterion; and so are gradients that reach the weights by another
  way, and per-example gradients that were changed before the step;
* the original optimizer takes no step of its own, all trainable parameters are its, they stay the
  same ones, and no forward pass writes into them (as that of an embedding with `max_norm` would).
  Another optimizer of theirs is warned of;
* sums are divided by the expected batch size, :math:`\sum_i q_i`, public as the number of examples
  is;
* steps are counted where noise is added, and no more are taken than the budgets were made for.
  After a step with less noise, as Opacus's schedulers of noise and clipping would have it, every
  epsilon is infinite;
* draws and noise come from ciphers under keys of the operating system
  (`dpcompanion.mechanism.secure`), so that nobody can subtract the noise, and no script that seeds
  itself repeats it; for research, under keys hashed from a seed. Sums are made in float32 at least,
  noise is drawn and added in float64. A checkpoint holds how far they have come; keys lie beside
  it.

On a GPU no step waits for the device but those of a proof: what needs a look at numbers is done
then, or afterwards. Gradients that are not finite contribute nothing, and are counted there;
a warning says so when epsilons are asked for, when a checkpoint is written, and after the last
step. In ghost mode, where one such gradient spoils the sum, the weights are no numbers from then
on, and a FloatingPointError says so at the same places. A filter belongs on the CPU, as by default:
it receives the norms once a measurement.

Neighbours differ in one example, whose gradients are zero in one of them (zero-out, as in
`dpcompanion.training.DPSGDPlan`): the number of examples is public, for the rate is 1 / len(loader)
and the divisor the sum of the rates. `statement` says so in words. Poisson sampling; each example's
guarantee holds whatever the others are (individualised DP). The budgets themselves are taken as
public, or kept to oneself: rates and clip norms depend on them. The account is one of real numbers:
what floats add to a sum is not in it.

**Persons with several rows.** With ``people=`` (whose each item of the data set is) and
``at_most=k``, as in `dpcompanion.training.train`, the n examples are persons: draws, rates, clip
norms, budgets, filters, epsilons and statements are theirs, in the order of ``engine.persons``. A
draw names persons, and the loader hands out at most k rows of each. Opacus finds the gradient of
every row. The optimizer adds up those of a person, row after row, before any norm is taken, and
clips their mean once. So copies of a row change no epsilon. The proof and the comparison of losses
are of rows, which is stricter than persons need. ``batch_size`` counts persons, since a rate that
depended on the number of rows would disclose it. Ghost mode, which knows no norm of a sum over
rows, refuses ``people=``.

**Several processes.** Under ``torchrun``, after ``torch.distributed.init_process_group()``, every
rank gives the engine the same arguments, with the module itself and no ``DistributedDataParallel``,
and runs the same loop. All make the same Poisson draws, the loader hands out this rank's share,
which may be empty, and ``optimizer.step()`` adds up the clipped sums of all ranks. Rank 0 adds the
noise, once, and all receive the same bits. So the account is that of one process, and so is the
result up to the order of sums (but for what models draw at random, and for the rows of a person
that a filter measures). Ranks that were given different things, or whose weights become different,
are refused, and an error in a step ends it on all of them. Sums travel without noise, and the key
of the draws goes to all ranks: `dpcompanion.training.distributed` says what is trusted. Every rank
takes every step; epsilons may be asked for on one. An error of a rank's own loop, outside of a
step, is not sent to the others, which notice it when its process is gone.

**Sharded modules.** In ghost mode the module may be one after
``torch.distributed.fsdp.fully_shard`` (FSDP2), called with its layers and, last, with the module
itself, over all ranks; the optimizer is made afterwards. Each rank then holds a part of the
weights, the gradients and the optimizer's state. Draws, noise and account are those of one process,
and so is the result up to the order of sums (`dpcompanion.engine.shards`). For the proof with the
first batches each rank gathers all weights at once (``prove=False`` leaves the proof out), and
while noise is added rank 0 holds the whole sum in main memory, in float64. Gradients travel between
ranks before they are clipped, too. A draw is one batch, without Opacus's memory manager, and all
ranks make equally many passes. `save_checkpoint` writes the account and the draws; weights and the
optimizer's state are the caller's to write. These are refused by name: other modes, filters,
trainable layers for which Opacus has no rule, layers that are used twice or share a weight,
parameters that are not sharded, policies of mixed precision and of offloading, and other meshes.

What the engine cannot see, it takes on trust:

* an item of the data set is made of one example, not mixed with partners drawn at random (a data
  set that mixes it with what was read before is refused, and so is a collate function that mixes),
  and the loop mixes none before they reach the module, as mixup does;
* the module treats examples one by one with all data as it does with batches 1, 2, 4, 8 and so on,
  with which that is proved (`train` looks again after as many steps);
* the loop gives a criterion targets of which each is one example's own, and changes none of the
  loader's by way of `.data` or of NumPy, which leaves no trace;
* nothing outside of the module, and no attribute of it that is no buffer, begins to remember
  batches later;
* learning rates, and the step after which training ends, follow a plan or public data, not losses
  of the examples;
* weights of examples that the loop computes depend on each example alone;
* under autocast in bfloat16 a loss is compared to within a twentieth;
* in the mode "ew", no loss is made of what a hook took from inside of the module;
* in the mode "ghost", no hook comes to lie on a weight's node of the autograd graph once training
  has begun, as it would change sums that were clipped (hooks of tensors and parameters are seen);
* with trust_loss=True, the loop's loss is made of losses of which each depends on one example.

Needs Opacus, version 1.6 or later.

Six people, two budgets, a linear model; the loop is your own:

>>> import torch
>>> from torch.utils.data import DataLoader, TensorDataset
>>> data = TensorDataset(torch.zeros(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]))
>>> module = torch.nn.Linear(4, 2)
>>> engine = IndividualizedPrivacyEngine()
>>> model, optimizer, loader = engine.make_private_with_budgets(
...     module=module,
...     optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
...     data_loader=DataLoader(data, batch_size=2),
...     max_grad_norm=1.0,
...     target_epsilons=[1.0, 1.0, 1.0, 4.0, 4.0, 4.0],
...     target_delta=1e-3,
...     epochs=2,
...     method="sample",
... )
>>> for _ in range(2):
...     for x, y in loader:
...         optimizer.zero_grad()
...         torch.nn.functional.cross_entropy(model(x), y).backward()
...         optimizer.step()
>>> [f"{epsilon:.1f}" for epsilon in engine.get_epsilons(1e-3).tolist()]
['1.0', '1.0', '1.0', '4.0', '4.0', '4.0']
"""

try:
    import opacus as _opacus  # noqa: F401
except ImportError as error:
    raise ImportError("the engine stands on Opacus: pip install 'dpcompanion[opacus]'") from error

from dpcompanion.engine.attention import MultiheadAttention
from dpcompanion.engine.private import MODES, IndividualizedPrivacyEngine
from dpcompanion.engine.recurrence import GRU, LSTM, RNN
from dpcompanion.engine.replacements import replace_layers

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "IndividualizedPrivacyEngine",
    "MultiheadAttention",
    "replace_layers",
]
