"""Items that are mappings, or anything with a collate function: a step is that of autograd of one
example at a time, and what mixes examples on the way into a batch is refused.
"""

import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dpcompanion.training import (
    Checkpoint,
    DPSGDPlan,
    NormTracker,
    Track,
    by_person,
    cross_entropy,
    train,
)

from ..refusals import refused

WORDS, CLASSES, N, CLIP = 11, 3, 12, 0.4


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Texts(torch.nn.Module):
    """A mean over the words that the mask leaves."""

    def __init__(self, output=Output):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.output = (
            torch.nn.Embedding(WORDS, 4),
            torch.nn.Linear(4, CLASSES),
            output,
        )

    def forward(self, ids, mask):
        words = self.embed(ids) * mask[..., None]
        return self.output(self.out(words.sum(1) / mask.sum(1, keepdim=True)))


def items(n=N):
    g = torch.Generator().manual_seed(1)
    return [
        {
            "ids": torch.randint(1, WORDS, (1 + 5 * i % 7,), generator=g),
            "label": i % CLASSES,
            "weight": 1.0 + i % 2,
        }
        for i in range(n)
    ]


def padded(rows):
    ids = [row["ids"] for row in rows]
    return {
        "ids": pad_sequence(ids, batch_first=True),
        "mask": pad_sequence([torch.ones(len(each)) for each in ids], batch_first=True),
        "labels": torch.tensor([row["label"] for row in rows]),
        "weight": torch.tensor([row["weight"] for row in rows]),
    }


def weighted(outputs, batch):
    return F.cross_entropy(outputs.logits, batch["labels"], reduction="none") * batch["weight"]


def as_pair(rows):
    batch = padded(rows)
    return (batch["ids"], batch["mask"]), batch["labels"]


def as_named_pair(rows):
    batch = padded(rows)
    return {"mask": batch["mask"], "ids": batch["ids"]}, [
        batch["labels"],
        {"weight": batch["weight"]},
    ]


def of_list(outputs, targets):
    return F.cross_entropy(outputs, targets[0], reduction="none") * targets[1]["weight"]


KINDS = {
    "mapping": (Texts, padded, weighted),
    "pair": (lambda: Texts(lambda logits: logits), as_pair, cross_entropy),
    "nested": (lambda: Texts(lambda logits: logits), as_named_pair, of_list),
}


def one_step(model, loss, data, n, **options):
    """What a step without noise adds up, {name: tensor}."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = DPSGDPlan(
        n=n, sample_rate=1.0, steps=1, max_grad_norm=CLIP, noise_multiplier=0.0, delta=1e-2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, loss, data, plan, optimizer=optimizer, seed=0, progress=False, **options)
    return {name: n * (before[name] - p.detach()) for name, p in model.named_parameters()}


def by_autograd(kind, rows, groups):
    """The sum of the clipped gradients of each group's mean loss, each row collated by itself."""
    make, collate, loss = KINDS[kind]
    model = make()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for group in groups:
        losses = []
        for i in group:
            batch = collate([rows[i]])
            if isinstance(batch, dict):
                losses.append(loss(model(batch["ids"], batch["mask"]), batch))
            else:
                x, y = batch
                losses.append(loss(model(**x) if isinstance(x, dict) else model(*x), y))
        found = torch.autograd.grad(torch.cat(losses).mean(), list(model.parameters()))
        norm = torch.stack([g.norm() for g in found]).norm()
        for name, g in zip(total, found):
            total[name] += g * min(1.0, CLIP / float(norm))
    return total


@pytest.mark.parametrize("method", ["auto", "ghost", "func"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_one_example_at_a_time(kind, method):
    make, collate, loss = KINDS[kind]
    found = one_step(make(), loss, items(), N, collate_fn=collate, method=method)
    for name, g in by_autograd(kind, items(), [[i] for i in range(N)]).items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_with_people_it_is_that_of_one_person_at_a_time(kind):
    make, collate, loss = KINDS[kind]
    people = [3, 1, 3, 7, 3, 1, 3, 9, 9, 9, 1, 5]
    groups = [[i for i, who in enumerate(people) if who == name] for name in sorted(set(people))]
    found = one_step(
        make(), loss, items(), len(groups), collate_fn=collate, people=people, at_most=4
    )
    for name, g in by_autograd(kind, items(), groups).items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-5)


def test_people_of_two_tensors_are_those_of_by_person():
    x, y, people = torch.randn(9, 4), torch.arange(9) % 3, [2, 0, 2, 1, 1, 1, 0, 2, 2]
    found = []
    for data, options in (
        ((x, y), {"people": people, "at_most": 2}),
        (by_person(x, y, people, at_most=2), {}),
    ):
        torch.manual_seed(0)
        found.append(one_step(torch.nn.Linear(4, 3), cross_entropy, data, 3, **options)["weight"])
    assert torch.equal(*found)


def test_persons_without_rows_take_part_and_items_without_a_function_are_stacked():
    rows = [
        {"ids": torch.tensor([1 + i % 9, 2]), "mask": torch.ones(2), "labels": i % CLASSES}
        for i in range(6)
    ]

    def loss(outputs, batch):
        return F.cross_entropy(outputs.logits, batch["labels"], reduction="none")

    data = by_person(rows, people=["a", "c"] * 3, at_most=3, persons=["a", "b", "c"])
    found, plain = one_step(Texts(), loss, data, 3), one_step(Texts(), loss, rows, 6)
    assert found["out.weight"].norm() > 0.1 and plain["out.weight"].norm() > 0.1
    only = by_person(rows, people=["a"] * 6, at_most=6, persons=["b", "a"])
    x, y = only.rows(torch.tensor([0]))
    network, losses = only.seen(Texts(), loss)
    assert losses(network(x), y).tolist() == [0.0]


def masked(rows):
    """Labels that are drawn at random, as for a masked language model."""
    batch = padded(rows)
    return batch | {"weight": torch.bernoulli(torch.full((len(rows),), 0.5))}


def test_draws_of_a_collate_function_are_the_runs_own_and_a_run_goes_on(tmp_path):
    plan = DPSGDPlan(
        n=N, sample_rate=0.5, steps=6, max_grad_norm=CLIP, noise_multiplier=1.0, delta=1e-2
    )

    def run(steps=None, **options):
        model = Texts()
        train(
            model,
            weighted,
            items(),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            seed=2,
            collate_fn=masked,
            progress=False,
            **options,
        )
        return model.out.weight.detach()

    torch.manual_seed(5)
    whole = run()
    torch.manual_seed(6)
    assert torch.equal(whole, run(checkpoint=Checkpoint(tmp_path / "run.pt", every=2)))
    assert torch.equal(whole, run(checkpoint=Checkpoint(tmp_path / "run.pt", every=2)))


def test_accounts_follow_items_and_a_tracker_of_others_is_refused():
    plan = DPSGDPlan(
        n=N, sample_rate=0.3, steps=5, max_grad_norm=4.0, noise_multiplier=1.0, delta=1e-2
    )
    model, data = Texts(), items()
    run = dict(
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        seed=0,
        collate_fn=padded,
        progress=False,
    )
    history = train(
        model, weighted, data, plan, track=Track(clipping="individual", rounding=None), **run
    )
    assert len(history.epsilons().unique()) > 3 and history.epsilons().max() <= plan.epsilon()
    cut = [
        {"ids": row["ids"][:1], "mask": torch.ones(1), "labels": 0, "weight": 1.0} for row in data
    ]
    for other in (cut, by_person(data, people=range(N), at_most=1, collate_fn=padded)):
        tracker = NormTracker.for_plan(plan, model, weighted, other)
        refused("trackers", train, model, weighted, data, plan, trackers=[tracker], **run)


def unmasked(rows):
    batch = padded(rows)
    return batch | {"mask": torch.ones_like(batch["mask"])}


def balanced(rows):
    batch = padded(rows)
    counts = torch.bincount(batch["labels"], minlength=CLASSES)
    return batch | {"weight": 1 / counts[batch["labels"]]}


def mixup(rows):
    batch = padded(rows)
    return batch | {
        "weight": batch["weight"].lerp(
            batch["weight"][torch.randperm(len(rows))], float(torch.rand(()))
        )
    }


def rolled(rows):
    batch = padded(rows)
    return batch | {"weight": batch["weight"].lerp(batch["weight"].roll(1), float(torch.rand(())))}


def by_length(rows):
    return padded(sorted(rows, key=lambda row: -len(row["ids"])))


class Remembering:
    last = 0.0

    def __call__(self, rows):
        batch = padded(rows)
        batch["weight"], self.last = batch["weight"] + self.last, batch["weight"].mean()
        return batch


@pytest.mark.parametrize("collate", [unmasked, balanced, mixup, rolled, by_length, Remembering()])
def test_what_mixes_examples_on_the_way_into_a_batch_is_refused(collate):
    rows = items(40)
    for row in rows[20:]:  # not all weights differ by place alone
        row["weight"] = 3.0
    refused("collate_fn", one_step, Texts(), weighted, rows, 40, collate_fn=collate)
    with pytest.raises(ValueError, match="collate_fn"):
        one_step(
            Texts(),
            weighted,
            rows,
            20,
            collate_fn=collate,
            people=[i // 2 for i in range(40)],
            at_most=2,
        )


@pytest.mark.parametrize(
    "draw",
    [random.random, np.random.rand, lambda: float(torch.rand(()))],
    ids=["random", "numpy", "torch"],
)
def test_a_collate_function_that_mixes_some_batches_only_is_refused(draw):
    def sometimes(rows):
        return rolled(rows) if draw() < 0.3 else padded(rows)

    rows = items(40)
    for row in rows[20:]:
        row["weight"] = 3.0
    refused("collate_fn", one_step, Texts(), weighted, rows, 40, collate_fn=sometimes)


def mixing(outputs, batch):
    losses = weighted(outputs, batch)
    return losses / losses.detach().mean()


def packed(rows):
    return pack_sequence([row["ids"] for row in rows], enforce_sorted=False)


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@pytest.mark.parametrize(
    "options, word",
    [
        ({"collate_fn": 3}, "collate_fn"),
        ({"collate_fn": lambda rows: "text"}, "collate_fn"),
        ({"collate_fn": lambda rows: {"labels": torch.zeros(len(rows))}}, "labels"),
        ({"collate_fn": lambda rows: padded(rows) | {"text": ["a"] * len(rows)}}, "text"),
        ({"collate_fn": lambda rows: padded(rows)["ids"]}, "collate_fn"),
        ({"collate_fn": lambda rows: padded(rows[:1])}, "examples first"),
        ({"collate_fn": lambda rows: (packed(rows), padded(rows))}, "collate_fn .*PackedSequence"),
        ({"collate_fn": packed}, "collate_fn .*PackedSequence"),
        ({"collate_fn": lambda rows: Pair(padded(rows), 1)}, "collate_fn"),
        ({"collate_fn": None}, "data must have items .*; give a collate_fn, which pads"),
        ({"collate_fn": padded, "people": range(N)}, "at_most"),
        ({"collate_fn": padded, "at_most": 2}, "people"),
        ({"collate_fn": padded, "people": range(3), "at_most": 2}, "people"),
        ({"collate_fn": padded, "people": [0] * N, "at_most": 2}, "plan.n"),
        ({"collate_fn": padded, "method": "none"}, "method"),
        ({"collate_fn": lambda rows: padded(rows)}, "loss"),
    ],
)
def test_what_makes_no_batch_is_refused_before_any_work(options, word):
    model, loss = Texts(), mixing if word == "loss" else weighted
    before = model.out.weight.detach().clone()
    refused(word, one_step, model, loss, items(), N, **options)
    assert torch.equal(model.out.weight, before)


def test_tensors_take_no_collate_function():
    for data in (
        (torch.randn(4, 2), torch.zeros(4)),
        by_person(torch.randn(4, 2), torch.zeros(4), range(4), at_most=1),
    ):
        refused(
            "collate_fn", one_step, torch.nn.Linear(2, 2), cross_entropy, data, 4, collate_fn=list
        )


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_targets_may_be_drawn_by_any_generator_and_a_run_goes_on(draw, tmp_path):
    """The digest of such targets was another at each start."""
    plan = DPSGDPlan(
        n=N, sample_rate=0.5, steps=2, max_grad_norm=CLIP, noise_multiplier=1.0, delta=1e-2
    )
    for _ in range(2):
        model = Texts()
        history = train(
            model,
            weighted,
            items(),
            plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            seed=2,
            collate_fn=lambda rows: (
                padded(rows) | {"weight": torch.tensor([float(draw() < 0.5) for _ in rows])}
            ),
            checkpoint=Checkpoint(tmp_path / "run.pt"),
            progress=False,
        )
        assert history.steps == 2


def test_an_item_that_comes_twice_is_one_example_and_refused():
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    whole = TensorDataset(x, y)

    def fit(data, **options):
        model = torch.nn.Linear(3, 2)
        plan = DPSGDPlan(
            n=options.pop("n", len(data)),
            sample_rate=0.2,
            steps=2,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return train(
            model, cross_entropy, data, plan, optimizer=optimizer, seed=0, progress=False, **options
        )

    for twice in (
        Subset(whole, [*range(20), 3]),
        Subset(whole, [1, -19]),
        ConcatDataset([whole, whole]),
        ConcatDataset([Subset(whole, [0, 1]), Subset(whole, [1, 2])]),
        Subset(Subset(whole, [4, 4, 5]), [0, 1]),
    ):
        refused("each item once", fit, twice)
    fit(Subset(Subset(whole, [4, 4, 5]), [0, 2]))
    fit(ConcatDataset([Subset(whole, [0, 1]), TensorDataset(x, y)]))  # for all that is known
    unsized = type("Unsized", (), {"__getitem__": lambda self, i: (x[i], y[i])})()
    fit(Subset(unsized, [1, 2]))
    refused("each item once", fit, Subset(unsized, [1, 1]))
    rows = Subset(whole, [*range(20), 3])
    fit(rows, people=torch.tensor([*range(20), 3]), at_most=2, n=20)
