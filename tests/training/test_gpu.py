"""On a GPU: steps wait for nothing there, and end where those of the processor do."""

import copy

import pytest
import ranks
import torch

from dpcompanion.accounting import Gaussian, Ledger
from dpcompanion.attacks import auc, clopper_pearson
from dpcompanion.audit import audit_scores
from dpcompanion.individual import IndividualAccountant
from dpcompanion.per_instance import exact_composition
from dpcompanion.training import (
    DPSGDPlan,
    NormTracker,
    Performance,
    clipped_sum,
    cross_entropy,
    loop,
    models,
    train,
    train_ensemble,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu"),
]
N = 256
PLAN = DPSGDPlan(
    n=N, sample_rate=0.25, steps=8, max_grad_norm=0.4, noise_multiplier=1.0, delta=1e-3
)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 1, 28, 28, generator=generator), torch.randint(
        10, (N,), generator=generator
    )


@pytest.fixture
def watched():
    """A function that turns waiting for the GPU into an error."""
    try:
        yield lambda: torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def as_pytorch_begins():
    """Convolutions may round to TF32, products of matrices may not: the defaults of PyTorch."""
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "options", [None, {}, {"clipping": "individual"}, {"running": True, "updates_per_epoch": 0}]
)
def test_a_step_waits_for_nothing(data, watched, options):
    x, y = (part.cuda() for part in data)
    model = models.mnist_cnn(seed=0).cuda()
    trackers = (
        []
        if options is None
        else [NormTracker.for_plan(PLAN, model, cross_entropy, (x, y), device="cuda", **options)]
    )
    found = loop.TrainingLoop(
        model,
        cross_entropy,
        (x, y),
        PLAN,
        optimizer_of(model),
        seed=0,
        performance=Performance(device="cuda", microbatch_size=512),
        trackers=trackers,
    )
    found.step()  # which proves the passes
    watched()
    for _ in range(PLAN.steps - 1):
        found.step()


def test_a_record_waits_for_nothing(watched):
    account = IndividualAccountant(
        N, sample_rate=0.25, noise_multiplier=1.0, max_grad_norm=1.0, device="cuda"
    )
    norms, some = torch.rand(N, device="cuda"), torch.arange(5, device="cuda")
    watched()
    account.record(norms)
    account.record(norms[:5], steps=some, examples=some)


@pytest.mark.parametrize("clipping", ["maximum", "individual"])
def test_a_run_ends_where_that_of_the_processor_does(data, clipping):
    ends = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(models.mnist_cnn(seed=0)).double()
        own = (data[0].double(), data[1])
        tracker = NormTracker.for_plan(
            PLAN, model, cross_entropy, own, device=device, clipping=clipping
        )
        history = train(
            model,
            cross_entropy,
            own,
            PLAN,
            optimizer=optimizer_of(model.to(device)),
            seed=0,
            device=device,
            trackers=[tracker],
            progress=False,
        )
        ends.append(
            [
                *(p.detach().cpu() for p in model.parameters()),
                history.losses.cpu(),
                tracker.estimated_epsilon(1e-3).cpu(),
            ]
        )
    for one, other in zip(*ends):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["mixed", "ghost", "func"])
def test_convolutions_round_nothing_to_tf32(method):
    model = models.resnet20(seed=0).cuda()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, 32, 32, generator=generator).cuda()
    y = torch.arange(12).cuda() % 10
    found = clipped_sum(model, cross_entropy, x, y, 0.1, method=method)
    exact = clipped_sum(model.double(), cross_entropy, x.double(), y, 0.1, method="func")
    assert torch.backends.cudnn.allow_tf32
    torch.testing.assert_close(found.norms.double(), exact.norms, rtol=1e-4, atol=0)
    for name, g in found.gradients.items():
        assert (g - exact.gradients[name]).norm() < 1e-4 * exact.gradients[name].norm()


def test_runs_side_by_side_end_where_those_of_the_processor_do(data):
    one, other = (
        train_ensemble(
            models.mnist_cnn(seed=0).double(),
            cross_entropy,
            (data[0].double(), data[1]),
            PLAN,
            seeds=[0, 1],
            learning_rate=0.1,
            device=device,
            progress=False,
        ).vectors.cpu()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_step_of_the_engine_waits_for_nothing(data, watched, mode):
    pytest.importorskip("opacus")
    from dpcompanion.engine import IndividualizedPrivacyEngine

    model = models.mnist_cnn(seed=0).cuda()
    model, optimizer, *rest = IndividualizedPrivacyEngine(
        accountant="rdp"
    ).make_private_with_budgets(
        module=model,
        optimizer=optimizer_of(model),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*data), batch_size=64
        ),
        target_epsilons=torch.full((N,), 4.0),
        target_delta=1e-3,
        epochs=3,
        max_grad_norm=0.5,
        seed=0,
        grad_sample_mode=mode,
    )
    criterion, loader = rest if mode == "ghost" else (torch.nn.CrossEntropyLoss(), *rest)
    for number, (x, y) in enumerate(batch for _ in range(2) for batch in loader):
        x, y = x.cuda(), y.cuda()
        if number & (number + 1):  # the batches 1, 2, 4, 8, ... are looked at
            watched()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.dropped == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "options", [{}, {"filter": 4.0}, {"plan": {"sample_rate": 0.03, "steps": 20}}], ids=str
)
def test_several_gpus_end_where_one_process_does(options, tmp_path):
    pool = ranks.Pool(2, tmp_path, backend="nccl")
    try:
        one, other = pool("fit", device="cuda", **options)
    finally:
        pool.close()
    alone = ranks.fit(**options)
    assert torch.equal(one["weights"], other["weights"]) and one["sizes"].equal(alone["sizes"])
    torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(one["epsilons"], alone["epsilons"], rtol=1e-6, atol=1e-8)


def test_masses_on_a_gpu_bound_as_those_of_the_processor_do():
    masses = torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here, there = (
        exact_composition(masses.to(device), order=4, worst_case=1.0) for device in ("cpu", "cuda")
    )
    for name in ("estimate", "upper_bound"):  # the interval is a bootstrap's, drawn there
        torch.testing.assert_close(
            getattr(there, name).cpu(), getattr(here, name), rtol=1e-12, atol=1e-12
        )


def test_scores_coins_and_rates_may_lie_on_a_gpu():
    generator = torch.Generator().manual_seed(0)
    included = torch.randint(2, (200,), generator=generator) == 1
    scores = included + torch.randn(200, generator=generator)
    here, there = (
        (
            auc(scores[included].to(device), scores[~included].to(device)),
            audit_scores(scores.to(device), included.to(device), delta=1e-5),
            clopper_pearson(torch.arange(3, device=device), 10).upper,
            Ledger([Gaussian(2.0)]).trade_off(torch.tensor([0.1, 0.5], device=device)),
        )
        for device in ("cpu", "cuda")
    )
    assert there[:2] == here[:2] and all(map(torch.equal, there[2:], here[2:]))
