"""Where the engine's draws and noise come from, and that no two runs, processes or resumptions
share them.
"""

import io
import os
import stat
import warnings

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from dpcompanion.idp import IndividualizedPrivacyEngine
from dpcompanion.mechanism.noise import gaussian_noise, generators
from dpcompanion.mechanism.secure import SecureStream, grid_of

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:Full backward hook", "ignore:mean of empty", "ignore:.*multi-threaded, use of fork"
)
N, DELTA = 40, 1e-5


def private(*, model=None, mode="hooks", engine=None, loader_generator=None, **options):
    """An engine and what it returns, the criterion before the loader; by default nothing is seeded
    but the model.
    """
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % 3)
    model, engine = (
        model or nn.Linear(4, 3),
        engine or IndividualizedPrivacyEngine(accountant="rdp"),
    )
    dtype = next(model.parameters()).dtype
    data = TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    module, optimizer, *rest = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        grad_sample_mode=mode,
        data_loader=DataLoader(data, batch_size=10, generator=loader_generator),
        target_epsilons=torch.full((N,), 2.0),
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=0.5,
        method="scale",
        **options,
    )
    return engine, module, optimizer, *(rest if mode == "ghost" else (nn.CrossEntropyLoss(), *rest))


def trained(model, optimizer, criterion, loader):
    """One epoch; the noise of each step, in standard deviations, and the draws."""
    noise, draws, own, std = (
        [],
        [],
        optimizer.add_noise,
        optimizer.noise_multiplier * optimizer.max_grad_norm,
    )

    def noted():
        sums = torch.cat([p.summed_grad.detach().flatten().double() for p in optimizer.params])
        own()
        noise.append(
            (torch.cat([p.grad.flatten().double() for p in optimizer.params]) - sums) / std
        )
        draws.append(loader.batch_sampler.last)

    optimizer.add_noise = noted
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    optimizer.add_noise = own
    return torch.stack(noise), draws


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_without_a_generator_two_runs_of_one_script_share_neither_draws_nor_noise(mode):
    """PyTorch's seed, which scripts set, decides neither."""
    runs = []
    for _ in range(2):
        engine, *parts = private(mode=mode)
        assert all(isinstance(g, SecureStream) for g in engine.accountant.generators().values())
        runs.append(trained(*parts))
    (noise, draws), (others, other_draws) = runs
    assert draws != other_draws and float((noise - others).abs().max()) > 1
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("seeded", [False, True])
def test_the_noise_is_gaussian_and_independent_for_a_model_in_float32(seeded):
    _, *parts = private(
        model=nn.Linear(4, 6000),
        noise_generator=torch.Generator().manual_seed(1) if seeded else None,
    )
    noise, _ = trained(*parts)
    assert noise.shape == (4, 30_000)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-6
    assert abs(float(noise.pow(4).mean()) - 3) < 5 * (96 / noise.numel()) ** 0.5
    together = torch.corrcoef(noise)[~torch.eye(4, dtype=torch.bool)]
    assert float(together.abs().max()) < 5 / 30_000**0.5


def test_noise_is_drawn_and_added_in_float64_whatever_the_type_of_the_model():
    _, model, optimizer, criterion, loader = private(
        noise_generator=torch.Generator().manual_seed(1)
    )
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    state = optimizer.generator.get_state()
    optimizer.clip_and_accumulate()
    sums = torch.cat([p.summed_grad.flatten() for p in optimizer.params])
    optimizer.add_noise()
    expected = gaussian_noise(
        sums.shape, optimizer.noise_multiplier * 0.5, torch.Generator().set_state(state)
    )
    assert sums.dtype == torch.float32
    assert torch.equal(
        torch.cat([p.grad.flatten() for p in optimizer.params]), (sums.double() + expected).float()
    )


def test_sum_and_noise_of_a_release_lie_on_one_grid():
    _, model, optimizer, criterion, loader = private(model=nn.Linear(4, 3).double())
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.clip_and_accumulate()
    optimizer.add_noise()
    grid = grid_of(optimizer.noise_multiplier * optimizer.max_grad_norm)
    for p in optimizer.params:
        assert bool((p.summed_grad / grid != (p.summed_grad / grid).round()).any())
        assert torch.equal(p.grad / grid, (p.grad / grid).round())


def test_draws_of_a_release_are_the_coins_of_its_stream():
    engine, *_, loader = private()
    key, rates = loader.batch_sampler.generator.key, engine.sample_rates
    draws, stream = list(loader.batch_sampler), SecureStream(key=key)
    assert draws == [stream.coins(N, rates).nonzero().squeeze(1).tolist() for _ in range(4)]


def test_draws_from_a_generator_of_the_loader_are_said_and_warned_of():
    word = "sampling amplifies nothing"
    with pytest.warns(RuntimeWarning, match=f"data_loader.*seed 3.*{word}"):
        engine, *parts = private(loader_generator=torch.Generator().manual_seed(3))
    trained(*parts)
    assert word in engine.statement() and engine.accountant.origin is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        engines = [private()[0], private(seed=1)[0]]
    assert all(word not in engine.statement() for engine in engines)


def test_secure_mode_takes_no_generator_and_needs_no_other_package_than_the_stream():
    engine = IndividualizedPrivacyEngine(secure_mode=True)
    for options in (
        {"noise_generator": torch.Generator()},
        {"loader_generator": torch.Generator()},
    ):
        refused("secure", private, engine=engine, **options)
    _, *parts = private(engine=engine)
    trained(*parts)
    assert engine.secure_mode and len(engine.accountant) == 4


def test_a_run_with_keys_goes_on_where_it_stopped_and_its_checkpoint_does_not_hold_them(tmp_path):
    path, key = tmp_path / "run.pt", tmp_path / "run.pt.key"
    engine, model, optimizer, *rest = private()
    trained(model, optimizer, *rest)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    for stream in engine.accountant.generators().values():
        assert (
            stream.key not in path.read_bytes()
            and stream.key.hex().encode() not in path.read_bytes()
        )
    noise, draws = trained(model, optimizer, *rest)
    again, second, its_optimizer, *its_rest = private()
    again.load_checkpoint(path=path, module=second, optimizer=its_optimizer)
    later_noise, later_draws = trained(second, its_optimizer, *its_rest)
    assert (
        later_draws == draws
        and torch.equal(later_noise, noise)
        and torch.equal(weights(second), weights(model))
    )
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)  # the budgets are spent
    assert not key.exists()


def test_without_its_keys_a_run_goes_on_with_noise_of_its_own(tmp_path):
    path = tmp_path / "run.pt"
    engine, model, optimizer, *rest = private()
    trained(model, optimizer, *rest)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    os.remove(f"{path}.key")
    noise, draws = trained(model, optimizer, *rest)
    again, second, its_optimizer, *its_rest = private()
    with pytest.warns(RuntimeWarning, match="random numbers"):
        again.load_checkpoint(path=path, module=second, optimizer=its_optimizer)
    later_noise, _ = trained(second, its_optimizer, *its_rest)
    assert len(again.accountant) == 8 and float((later_noise - noise).abs().max()) > 1


def test_on_other_data_a_run_with_keys_goes_on_with_noise_of_its_own(tmp_path):
    """The difference of two models from one checkpoint would show the examples that differ, without
    noise.
    """
    path, noises = tmp_path / "run.pt", []
    engine, model, optimizer, *_ = private()
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    for changed in (False, True):
        again, second, its_optimizer, criterion, its_loader = private()
        its_loader.dataset.tensors[0][7] *= not changed  # the data set is the engine's
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            again.load_checkpoint(path=path, module=second, optimizer=its_optimizer)
        assert changed == any(
            "a run on other data, whose noise is not used again" in str(w.message) for w in said
        )
        noises.append(trained(second, its_optimizer, criterion, its_loader)[0])
    assert float((noises[0] - noises[1]).abs().max()) > 1


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_no_two_runs_from_one_checkpoint_give_one_noise_to_different_draws(mode, tmp_path):
    """Written between a draw and its step, a checkpoint gave the noise of the step to the draw
    after it.
    """
    path = tmp_path / "run.pt"
    engine, model, optimizer, criterion, loader = private(mode=mode)

    def step(x, y, model=model, optimizer=optimizer, criterion=criterion):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    draws = iter(loader)
    step(*next(draws))
    early, own = next(draws), loader.batch_sampler.last
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, second, its_optimizer, its_criterion, its_loader = private(mode=mode)
    other = next(iter(its_loader))
    again.load_checkpoint(path=path, module=second, optimizer=its_optimizer)
    refused("checkpoint", step, *other, second, its_optimizer, its_criterion)
    step(*early)  # the draw that was under way is that of both
    its_early = next(iter(its_loader))
    assert its_loader.batch_sampler.last == own
    step(*its_early, second, its_optimizer, its_criterion)
    assert torch.equal(weights(second), weights(model))
    noise, drawn = trained(model, optimizer, criterion, loader)
    later_noise, later_drawn = trained(second, its_optimizer, its_criterion, its_loader)
    assert later_drawn == drawn and torch.equal(later_noise, noise)


@pytest.mark.parametrize("generators", ["given", "one for both", "none"])
def test_neither_a_checkpoint_nor_a_pass_chooses_what_the_next_noise_is_added_to(
    generators, tmp_path
):
    """In the middle of a pass the loader's own use of its generator, and an evaluation, gave other
    draws.
    """
    path = tmp_path / "run.pt"
    one = torch.Generator().manual_seed(1)
    options = {
        "given": dict(loader_generator=torch.Generator().manual_seed(2), noise_generator=one),
        "one for both": dict(loader_generator=one, noise_generator=one),
        "none": {},
    }[generators]
    engine, model, optimizer, criterion, loader = private(**options)
    sampler = loader.batch_sampler

    def step(batch):
        optimizer.zero_grad()
        x, y = batch
        criterion(model(x), y).backward()
        optimizer.step()

    iterator = iter(loader)
    step(next(iterator))
    for place in (path, io.BytesIO()):
        coming = list(sampler)[:3]
        engine.save_checkpoint(path=place, module=model, optimizer=optimizer)
        assert list(sampler)[:3] == coming
        if place is not path:
            place.seek(0)
        engine.load_checkpoint(path=place, module=model, optimizer=optimizer)
        assert list(sampler)[:3] == coming
    assert trained(model, optimizer, criterion, loader)[1][:3] == coming


def test_a_stream_is_never_set_back_and_a_spoilt_key_leaves_none_of_it_behind(tmp_path):
    path = tmp_path / "run.pt"
    engine, model, optimizer, *rest = private()
    start = engine.accountant.state_dict()
    stream = engine.accountant.generators()["noise"]
    stream.words(1)
    engine.accountant.load_state_dict(start)
    assert stream.get_state() == {"calls": 1}
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    keys = (tmp_path / "run.pt.key").read_text(encoding="utf-8")
    (tmp_path / "run.pt.key").write_text(
        keys.replace('"sampling": "', '"sampling": "x'), encoding="utf-8"
    )
    again, second, its_optimizer, *_ = private()
    refused("damaged", again.load_checkpoint, path=path, module=second, optimizer=its_optimizer)
    assert all(g.key.hex() not in keys for g in again.accountant.generators().values())


def test_a_run_with_a_seed_and_one_without_do_not_go_on_from_each_other():
    seeded, unseeded = private(noise_generator=torch.Generator().manual_seed(0))[0], private()[0]
    for engine, other in ((seeded, unseeded), (unseeded, seeded)):
        refused("generators", engine.accountant.load_state_dict, other.accountant.state_dict())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_run_draws_noise_of_its_own():
    _, model, optimizer, criterion, loader = private()
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    optimizer.clip_and_accumulate()

    def gradient():
        optimizer.add_noise()
        return torch.cat([p.grad.flatten() for p in optimizer.params])

    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, gradient().detach().numpy().tobytes())
        finally:
            os._exit(0)
    mine = gradient()
    theirs = torch.frombuffer(bytearray(os.read(reader, 4 * mine.numel())), dtype=torch.float32)
    os.waitpid(child, 0)
    assert theirs.shape == mine.shape and float((theirs - mine).abs().min()) > 0


def test_a_seed_repeats_the_run_and_is_that_of_train():
    runs = []
    for _ in range(2):
        engine, *parts = private(seed=2**80 + 5)
        runs.append(trained(*parts))
        streams = generators(2**80 + 5)
        assert {name: g.key for name, g in engine.accountant.generators().items()} == {
            name: g.key for name, g in streams.items()
        }
    assert runs[0][1] == runs[1][1] and torch.equal(runs[0][0], runs[1][0])
    other, _ = trained(*private(seed=2**80 + 5 + 2**32)[1:])
    assert float((other - runs[0][0]).abs().max()) > 1
    for options in (
        {"noise_generator": torch.Generator()},
        {"loader_generator": torch.Generator()},
    ):
        refused("seed", private, seed=1, **options)
    refused("seed", private, seed=-1)
    refused("secure", private, engine=IndividualizedPrivacyEngine(secure_mode=True), seed=1)


def test_a_seeded_run_goes_on_where_it_stopped_without_keys_and_with_its_own_seed_only(tmp_path):
    path = tmp_path / "run.pt"
    engine, model, optimizer, *rest = private(seed=3)
    trained(model, optimizer, *rest)
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "seeds-used.json"]
    noise, draws = trained(model, optimizer, *rest)
    again, second, its_optimizer, *its_rest = private(seed=3)
    again.load_checkpoint(path=path, module=second, optimizer=its_optimizer)
    later_noise, later_draws = trained(second, its_optimizer, *its_rest)
    assert later_draws == draws and torch.equal(later_noise, noise)
    for options in ({"seed": 4}, {}, {"noise_generator": torch.Generator().manual_seed(3)}):
        other, third, its_optimizer, *_ = private(**options)
        refused(
            "generators", other.load_checkpoint, path=path, module=third, optimizer=its_optimizer
        )


@pytest.mark.parametrize(
    "source", [lambda: {"seed": 7}, lambda: {"noise_generator": torch.Generator().manual_seed(7)}]
)
def test_noise_that_was_used_on_other_data_in_the_same_folder_is_warned_of(source, tmp_path):
    def saved(name, data=None, **options):
        engine, model, optimizer, *_ = private(**options)
        engine.dataset = engine.dataset if data is None else data
        engine.save_checkpoint(path=tmp_path / name, module=model, optimizer=optimizer)

    changed = TensorDataset(torch.zeros(N, 4), torch.arange(N) % 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*same noise")
        (
            saved("one.pt", **source()),
            saved("one.pt", **source()),
            saved("free.pt"),
            saved("other.pt", changed),
        )
    with pytest.warns(RuntimeWarning, match="seed"):
        saved("two.pt", changed, **source())
    with pytest.warns(RuntimeWarning, match="same noise"):
        saved("three.pt", Subset(changed, range(N)), **source())
    with pytest.warns(RuntimeWarning, match="same noise"):
        saved("four.pt", Subset(changed, [1, *range(1, N)]), **source())
