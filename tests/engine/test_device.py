"""No step of the engine waits for a device; what is left unasked there is said afterwards, and
privacy is as here.
"""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from waits import Waits

from dpcompanion.engine import optimizers, randomness
from dpcompanion.filters import ExactFilter
from dpcompanion.idp import IndividualizedPrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")
N = 60


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 4, generator=generator), torch.randint(3, (N,), generator=generator)


def private(*, x=None, device="cpu", mode="hooks", filter=None, seed=0, **options):
    """The engine and what it returns, the criterion before the loader."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).to(device)
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    own = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        "data_loader": DataLoader(
            TensorDataset(data()[0] if x is None else x, data()[1]), batch_size=15
        ),
        "epochs": 2,
        "grad_sample_mode": mode,
        **({"seed": seed} if isinstance(seed, int) else {"noise_generator": seed}),
        **options,
    }
    if filter is None:
        budgets = torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(20)
        own = {
            "target_epsilons": budgets,
            "target_delta": 1e-5,
            "max_grad_norm": 0.5,
            "method": "scale",
            **own,
        }
        made = engine.make_private_with_budgets(**own)
    else:
        made = engine.make_private_with_filter(filter=filter, **own)
    model, optimizer, *rest = made
    return engine, model, optimizer, *(rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest))


def step(model, optimizer, criterion, x, y):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OPTIONS = {
    "hooks": {},
    "ghost": {"mode": "ghost"},
    "functorch": {"mode": "functorch"},
    "a generator": {"seed": torch.Generator().manual_seed(0)},
    "ghost, a generator": {"mode": "ghost", "seed": torch.Generator().manual_seed(0)},
    "per layer": {"clipping": "per_layer", "max_grad_norm": [0.1] * 6},
    "persons": {"people": [i % 50 for i in range(N)], "at_most": 2, "target_epsilons": 2.0},
}


@pytest.mark.parametrize("name", [*OPTIONS, "filter"])
def test_a_step_waits_for_nothing(name):
    options = OPTIONS.get(name) or {}
    if name == "filter":
        filter = ExactFilter(
            N,
            sample_rate=0.25,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            levels=[1.0],
            costs=[1],
            budget=20,
            steps=8,
        )
        options = {"filter": filter, "norms": lambda: torch.ones(N)}
    engine, model, optimizer, criterion, loader = private(device="meta", prove=False, **options)
    for x, y in loader:
        x, y = (torch.empty_like(part, device="meta") for part in (x, y))
        with Waits() as waits:
            step(model, optimizer, criterion, x, y)
        assert not waits.seen
    assert len(engine.accountant) == 4 and all(p.device.type == "meta" for p in model.parameters())


@pytest.fixture
def away(monkeypatch):
    """A function after which the engine takes the processor for a device that it must not ask."""

    def begin():
        for module in (optimizers, randomness):
            monkeypatch.setattr(module, "on_accelerator", lambda tensor: True)

    return begin


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_run_on_a_device_ends_where_that_of_the_processor_does(mode, away):
    ends = []
    for begin in (lambda: None, away):
        begin()
        _, model, optimizer, criterion, loader = private(mode=mode)
        for x, y in loader:
            step(model, optimizer, criterion, x, y)
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_what_is_not_finite_contributes_nothing_on_a_device_either_and_is_counted(away, tmp_path):
    x = data()[0]
    x[:20] = math.inf
    ends = []
    for begin in (lambda: None, away):
        begin()
        engine, model, optimizer, criterion, loader = private(x=x)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for batch in loader:
                step(model, optimizer, criterion, *batch)
            in_steps = sum("contribute nothing" in str(w.message) for w in said)
        ends.append((weights(model), optimizer.dropped))
    assert (
        ends[1][1] == ends[0][1] > 0
        and torch.equal(ends[0][0], ends[1][0])
        and bool(ends[1][0].isfinite().all())
    )
    assert not in_steps
    with pytest.warns(RuntimeWarning, match="contribute nothing"):
        engine.get_epsilons(1e-5)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    with pytest.warns(RuntimeWarning, match="contribute nothing"):  # the last step looks too
        for batch in loader:
            step(model, optimizer, criterion, *batch)
    assert len(engine.accountant) == 8


@pytest.mark.parametrize("seed", [0, torch.Generator().manual_seed(0)])
def test_a_sum_that_one_gradient_spoils_leaves_no_number_behind_and_is_told_of(
    away, seed, tmp_path
):
    x = data()[0]
    x[:20] = math.inf
    away()
    engine, model, optimizer, criterion, loader = private(x=x, mode="ghost", seed=seed)
    for batch in loader:
        step(model, optimizer, criterion, *batch)
    assert not weights(model).isfinite().any()
    for read in (
        lambda: engine.get_epsilons(1e-5),
        lambda: engine.accountant.state_dict(),
        lambda: engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer),
    ):
        with pytest.raises(FloatingPointError, match="use hooks"):
            read()
    assert not list(tmp_path.iterdir())
    with pytest.raises(FloatingPointError, match="use hooks"):  # the last step at the latest
        for batch in loader:
            step(model, optimizer, criterion, *batch)
