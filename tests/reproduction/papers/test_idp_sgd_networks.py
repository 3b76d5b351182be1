"""ResNet-18 and a transformer go through IDP-SGD: by the trainer, and by the engine on Opacus."""

import copy

import pytest
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion import idp
from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.gradients import clipping
from dpcompanion.reproduction.papers.idp_sgd import networks
from dpcompanion.training import Callbacks, DPSGDPlan, cross_entropy, train

BUDGETS = (5.0, 6.0, 6.0, 7.0)
RUN = {"target_delta": 1e-5, "sample_rate": 0.5, "steps": 1, "accountant": "rdp"}
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:.*batching rule")


def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.tensor([0, 3, 3, 9])


def sentences(n=8):
    tokens = torch.randint(1, 40, (n, 7), generator=torch.Generator().manual_seed(2))
    tokens[: n // 2, 5:] = 0  # some are shorter than others
    return tokens, torch.arange(n) % 3


def small_encoder(seed=0):
    return networks.encoder(tokens=40, classes=3, width=8, heads=2, blocks=2, length=7, seed=seed)


def alone(model, x, y):
    """The norm of each example's gradient by plain autograd, one after the other."""
    own = [p for p in model.parameters() if p.requires_grad]
    return torch.stack(
        [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        cross_entropy(model(x[i : i + 1]), y[i : i + 1]).sum(), own
                    )
                ]
            ).norm()
            for i in range(len(x))
        ]
    )


def plan_for(method, n, *, steps=1, max_grad_norm=0.5):
    """A plan in which examples have the budgets in turn."""
    budgets = [BUDGETS[i % 4] for i in range(n)]
    run = RUN | {"steps": steps}
    if method == "sample":
        found = idp.sample_parameters(budgets, [1] * n, **run)
        rates, norms = found.sample_rates, max_grad_norm
    else:
        found = idp.scale_parameters(budgets, [1] * n, max_grad_norm=max_grad_norm, **run)
        rates, norms = 0.5, found.max_grad_norms
    return torch.tensor(budgets, dtype=torch.float64), DPSGDPlan(
        n=n,
        sample_rate=rates,
        steps=steps,
        max_grad_norm=norms,
        noise_multiplier=found.noise_multiplier,
        delta=1e-5,
    )


def weights(model, frozen):
    return {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad != frozen
    }


def test_resnet18_has_no_batch_norm_and_as_many_parameters_as_torchvisions():
    model = networks.resnet18()
    assert ModuleValidator.is_valid(model)
    assert sum(p.numel() for p in model.parameters()) == 11_181_642
    first, again, other = (networks.resnet18(seed=seed).fc.weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_gradients_of_resnet18_are_those_of_one_image_at_a_time():
    model, (x, y) = networks.resnet18(), images()
    found = clipping.gradient_norms(model, cross_entropy, x, y, method="mixed")
    assert torch.allclose(found, alone(model, x, y), rtol=1e-3)


@pytest.mark.slow
def test_resnet18_takes_a_step_of_idp_sgd_by_the_trainer():
    model, (x, y) = networks.resnet18(), images()
    budgets, plan = plan_for("scale", 4)
    before = weights(model, frozen=False)
    history = train(
        model,
        cross_entropy,
        (x, y),
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        seed=1,
    )
    after = weights(model, frozen=False)
    assert history.dropped == 0 and all(
        not torch.equal(before[name], after[name]) for name in before
    )
    assert (plan.epsilon(accountant="rdp") <= budgets).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sample", "scale"])
def test_resnet18_takes_a_step_of_idp_sgd_by_the_engine(method):
    model, data = networks.resnet18(), TensorDataset(*images())
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=2),
        target_epsilons=BUDGETS,
        target_delta=1e-5,
        epochs=1,
        max_grad_norm=0.5,
        method=method,
        noise_generator=torch.Generator().manual_seed(0),
    )
    before = weights(model, frozen=False)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in weights(model, frozen=False).items())
    spent, budgets = engine.get_epsilons(1e-5), torch.tensor(BUDGETS, dtype=torch.float64)
    assert (spent <= budgets).all() and torch.allclose(spent, budgets, rtol=0.01)


@pytest.mark.parametrize(
    "prepare", [lambda model: model, networks.fine_tune], ids=["all", "fine-tuned"]
)
def test_the_gradients_of_a_transformer_are_those_of_one_sentence_at_a_time(prepare):
    """Tokens that are not there must not matter, nor who else is in the batch."""
    model, (x, y) = prepare(small_encoder()).double(), sentences()
    found = clipping.gradient_norms(model, cross_entropy, x, y, method="func")
    assert torch.allclose(found, alone(model, x, y), rtol=1e-6)
    assert torch.allclose(model(x[:1]), model(x[:1, :5]))


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_fine_tuning_by_the_trainer_meets_budgets_and_leaves_the_backbone_alone(method):
    model, (x, y) = networks.fine_tune(small_encoder()), sentences()
    budgets, plan = plan_for(method, len(x), steps=3)
    frozen, trained = weights(model, frozen=True), weights(model, frozen=False)
    seen = []
    train(
        model,
        cross_entropy,
        (x, y),
        plan,
        method="func",
        seed=0,
        callbacks=Callbacks(on_step=lambda run: seen.append(len(run.indices))),
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )
    assert len(seen) == 3 and len(frozen) > 10
    assert all(torch.equal(frozen[name], p) for name, p in weights(model, frozen=True).items())
    assert all(
        not torch.equal(trained[name], p) for name, p in weights(model, frozen=False).items()
    )
    spent = plan.epsilon(accountant="rdp")
    assert (spent <= budgets).all() and (spent >= 0.99 * budgets).all()


def test_with_the_attention_of_opacus_gradients_are_those_of_one_sentence_at_a_time():
    model, (x, y) = ModuleValidator.fix(small_encoder()), sentences()
    expected = alone(copy.deepcopy(model), x, y)
    torch.nn.functional.cross_entropy(
        GradSampleModule(model, loss_reduction="mean")(x), y
    ).backward()
    parts = [p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]
    assert torch.allclose(torch.stack(parts).norm(dim=0), expected, rtol=1e-4)


@pytest.mark.parametrize("method", ["sample", "scale"])
def test_fine_tuning_by_the_engine_meets_budgets_and_leaves_the_backbone_alone(method):
    torch.manual_seed(0)
    model, (x, y) = networks.fine_tune(ModuleValidator.fix(small_encoder())), sentences()
    assert ModuleValidator.is_valid(model)
    frozen, trained = weights(model, frozen=True), weights(model, frozen=False)
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    budgets = torch.tensor(BUDGETS * 2, dtype=torch.float64)
    private, optimizer, loader = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
        target_epsilons=budgets,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=0.5,
        method=method,
        noise_generator=torch.Generator().manual_seed(0),
    )
    for _ in range(2):
        for tokens, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(private(tokens), labels).backward()
            optimizer.step()
    assert all(torch.equal(frozen[name], p) for name, p in weights(model, frozen=True).items())
    assert all(
        not torch.equal(trained[name], p) for name, p in weights(model, frozen=False).items()
    )
    spent = engine.get_epsilons(1e-5)
    assert (spent <= budgets).all() and torch.allclose(spent, budgets, rtol=0.01)
