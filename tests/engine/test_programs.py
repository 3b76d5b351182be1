"""Programs of users in which one person could move what others contribute: each is refused by name
before a step.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.training import Callbacks, DPSGDPlan, cross_entropy, train

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:In CPU autocast")
N = 24
HOOKS = ["hooks", "functorch"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def run(step, *, model=None, mode="hooks", collate_fn=None, **options):
    """Two epochs, each step by `step(module, inner model, optimizer, criterion, x, y)`; how many
    were taken.
    """
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)
    inner = model or Net()
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    module, optimizer, *rest = engine.make_private_with_budgets(
        module=inner,
        optimizer=torch.optim.SGD(inner.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=12, collate_fn=collate_fn),
        target_epsilons=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        seed=0,
        grad_sample_mode=mode,
        **options,
    )
    criterion = rest[0] if len(rest) == 2 else F.cross_entropy
    for _ in range(2):
        for x, y in rest[-1]:
            optimizer.zero_grad()
            step(module, inner, optimizer, criterion, x, y)
    return len(engine.accountant)


def plain(module, inner, optimizer, criterion, x, y):
    criterion(module(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("in_place", [True, False])
def test_per_example_gradients_stay_as_the_backward_pass_left_them(mode, in_place):
    def centred(module, inner, optimizer, criterion, x, y):
        criterion(module(x), y).backward()
        for p in inner.parameters():
            if in_place:
                p.grad_sample.sub_(p.grad_sample.mean(0))
            else:
                p.grad_sample = p.grad_sample - p.grad_sample.mean(0)
        optimizer.step()

    refused("grad_sample must stay", run, centred, mode=mode)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("given", [True, False])
def test_a_hook_on_the_outputs_that_mixes_is_seen(mode, given):
    def hooked(module, inner, optimizer, criterion, x, y):
        outputs = module(x)
        outputs.register_hook(lambda g: g - len(g) * g.mean(0))
        criterion(outputs, y).backward()
        optimizer.step()

    refused("loss", run, hooked, mode=mode, **{"criterion": nn.CrossEntropyLoss()} if given else {})


@pytest.mark.parametrize("mode", HOOKS)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_loss_of_what_a_hook_took_from_inside_is_seen(mode, given, late):
    """A contrastive loss of features beside an honest one: nothing of it comes back to the
    outputs.
    """
    model, kept, steps = Net(), [], []
    model.first.register_forward_hook(lambda layer, inputs, outputs: kept.append(outputs))

    def contrastive(module, inner, optimizer, criterion, x, y):
        loss = criterion(module(x), y)
        features = F.normalize(kept[-1])
        steps.append(1)
        if not late or len(steps) > 1:
            loss = loss + (features @ features.T).mean()
        loss.backward()
        optimizer.step()

    with pytest.raises(ValueError, match="another way"):
        run(
            contrastive,
            model=model,
            mode=mode,
            **({"criterion": nn.CrossEntropyLoss()} if given else {}),
        )
    assert len(steps) == 1 + late


def test_outputs_that_a_hook_keeps_and_nobody_uses_are_no_reason():
    model, kept = Net(), []
    model.first.register_forward_hook(lambda layer, inputs, outputs: kept.append(outputs))
    assert run(plain, model=model) == 4


def stacked(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def mixup(items):
    x, y = stacked(items)
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def centring(items):
    x, y = stacked(items)
    return x - x.mean(0), y


@pytest.mark.parametrize("collate_fn", [mixup, centring])
def test_a_collate_function_that_mixes_is_refused(collate_fn):
    refused("collate_fn that makes each row of one example", run, plain, collate_fn=collate_fn)


class Texts(torch.utils.data.Dataset):
    """Rows of 1 to 5 words."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.arange(1, 2 + i % 5), torch.tensor(i % 3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dropped", [True, False])
def test_padding_on_either_side_and_words_left_out_at_random_mix_nothing(side, dropped):
    def collate(items):
        longest = max(len(x) for x, _ in items)
        rows = [
            F.pad(x, (longest - len(x), 0) if side == "left" else (0, longest - len(x)))
            for x, _ in items
        ]
        x = torch.stack(rows)
        return (x * (torch.rand(x.shape) < 0.9) if dropped else x), torch.stack(
            [y for _, y in items]
        )

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids):
            return self.out(self.embedding(ids).sum(1))

    model = Words()
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(Texts(), batch_size=12, collate_fn=collate),
        target_epsilons=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )


class Remembering(nn.Module):
    """Subtracts what it put out for the batch before, kept in an attribute or outside of the
    module.
    """

    def __init__(self, inside):
        super().__init__()
        self.layer, self.inside, kept = nn.Linear(4, 3), inside, {}
        self.get, self.put = kept.get, kept.__setitem__
        self.__dict__["last"] = None

    def forward(self, x):
        outputs = self.layer(x)
        last = self.last if self.inside else self.get("last")
        found = outputs if last is None else outputs - last
        if self.training and len(x):
            mean = outputs.detach().mean(0)
            self.__dict__["last"] = mean
            self.put("last", mean)
        return found


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_module_that_remembers_the_batch_before_is_refused(mode, inside):
    refused(
        "module must keep nothing of its examples", run, plain, model=Remembering(inside), mode=mode
    )


class Noisy(nn.Module):
    """Draws at random, as a regulariser does: that is nobody's data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        outputs = self.layer(x)
        return outputs + 0.1 * torch.randn_like(outputs)


def test_noise_on_the_outputs_is_no_memory():
    assert run(plain, model=Noisy()) == 4


def test_a_forward_method_that_is_exchanged_is_proved_again(monkeypatch):
    def exchanging(module, inner, optimizer, criterion, x, y):
        plain(module, inner, optimizer, criterion, x, y)

        def mixing(self, x):
            hidden = torch.tanh(self.first(x))
            return self.last(hidden - hidden.mean(0))

        monkeypatch.setattr(Net, "forward", mixing)

    refused("mixes examples", run, exchanging)


def test_a_layer_that_is_wrapped_after_the_proof_is_proved_again():
    class Centred(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x - x.mean(0))

    def wrapping(module, inner, optimizer, criterion, x, y):
        plain(module, inner, optimizer, criterion, x, y)
        if not isinstance(inner.last, Centred):
            inner.last = Centred(inner.last)

    refused("mixes examples", run, wrapping)


def test_a_layer_that_is_exchanged_is_refused():
    def exchanging(module, inner, optimizer, criterion, x, y):
        plain(module, inner, optimizer, criterion, x, y)
        inner.last = nn.Linear(5, 3)

    refused("module must keep the trainable parameters", run, exchanging)


@pytest.mark.parametrize("way", ["no zero_grad", "twice", "two batches"])
def test_gradients_of_two_backward_passes_are_never_joined(way):
    count = []

    def step(module, inner, optimizer, criterion, x, y):
        loss = criterion(module(x), y)
        loss.backward(retain_graph=way == "twice")
        count.append(1)
        if way == "twice":
            loss.backward()
        if way == "two batches" and len(count) % 2:
            criterion(module(x), y).backward()
        optimizer.step()
        if way == "no zero_grad":
            criterion(module(x), y).backward()

    refused("accumulation|twice|cleared|gradients", run, step)


def test_a_closure_takes_one_step_as_without():
    def step(module, inner, optimizer, criterion, x, y):
        def closure():
            optimizer.zero_grad()
            losses.append(criterion(module(x), y))
            losses[-1].backward()
            return losses[-1]

        assert optimizer.step(closure) is losses[-1]

    losses = []
    assert run(step) == 4


class MixedWithLast(Dataset):
    """Mixup within the data set: with the item that was read before, by a share that is drawn at
    random.
    """

    def __init__(self):
        self.x, self.last = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), None

    def __len__(self):
        return N

    def __getitem__(self, i):
        own = self.x[i]
        before, self.last = own if self.last is None else self.last, own
        share = 0.5 + torch.rand(()) / 2
        return share * own + (1 - share) * before, i % 3


class Flipped(MixedWithLast):
    """Augmentation at random, by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, i):
        sign = 1 if torch.rand((), generator=self.generator) < 0.5 else -1
        return sign * self.x[i] + torch.randn(4), i % 3


def by_engine(data):
    model = Net()
    IndividualizedPrivacyEngine(accountant="rdp").make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=12),
        target_epsilons=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )


def by_train(data):
    model = Net()
    plan = DPSGDPlan(
        n=N, sample_rate=0.5, steps=1, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    )
    train(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        seed=0,
        progress=False,
    )


@pytest.mark.parametrize("by", [by_engine, by_train])
def test_a_data_set_that_mixes_an_item_with_the_last_one_is_refused_and_augmentation_is_not(by):
    refused("changes when item", by, MixedWithLast())
    by(Flipped())


class Shifted(Net):
    """Subtracts a mean over the batch from what it puts out, through which no gradient goes."""

    def forward(self, x):
        outputs = super().forward(x)
        return outputs - outputs.detach().mean(0) if len(x) else outputs


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_outputs_that_mix_by_a_detached_number_are_refused(mode):
    refused("mixes examples", run, plain, model=Shifted(), mode=mode)


def test_a_small_share_of_a_loss_of_the_batch_is_seen():
    def spread(module, inner, optimizer, criterion, x, y):
        outputs = module(x)
        loss = criterion(outputs, y)
        (loss + 1e-4 * outputs.var(0).sum() if len(x) > 1 else loss).backward()
        optimizer.step()

    refused("loss", run, spread)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_per_example_gradients_that_are_written_without_a_version_are_seen(mode):
    def centred(module, inner, optimizer, criterion, x, y):
        criterion(module(x), y).backward()
        for p in inner.parameters():
            p.grad_sample.data.sub_(p.grad_sample.mean(0))
        optimizer.step()

    refused("grad_sample must stay", run, centred, mode=mode)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_proved_again(mode, kind):
    """In ghost mode what it multiplies has been clipped before."""
    steps = []

    def scaled(module, inner, optimizer, criterion, x, y):
        steps.append(1)
        if len(steps) == 2:
            for p in inner.parameters():
                getattr(p, kind)(
                    lambda g: 1000 * g if kind == "register_hook" else g.grad.mul_(1000)
                )
        plain(module, inner, optimizer, criterion, x, y)

    refused("module must", run, scaled, mode=mode, criterion=nn.CrossEntropyLoss())
    assert len(steps) == 2


@pytest.mark.parametrize("way", ["set back", "exchanged"])
def test_noise_that_comes_twice_is_refused(way):
    """Two steps from one state of the generator have the same noise: their difference is that of
    two clipped sums.
    """
    generator, model = torch.Generator().manual_seed(1), Net()
    engine = IndividualizedPrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private_with_budgets(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(N, 4), torch.arange(N) % 3), batch_size=12),
        target_epsilons=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        noise_generator=generator,
    )
    with pytest.raises(ValueError, match="generator must"):
        for _ in range(2):
            if way == "set back":
                generator.manual_seed(1)
            for x, y in loader:
                optimizer.zero_grad()
                plain(module, model, optimizer, F.cross_entropy, x, y)
                if way == "exchanged":
                    optimizer.generator = torch.Generator().manual_seed(1)
    assert len(engine.accountant) == (2 if way == "set back" else 1)


def balanced(y):
    return len(y) / (3 * torch.bincount(y, minlength=3).clamp(min=1))


@pytest.mark.parametrize(
    "mode, way",
    [
        ("hooks", "buffer"),
        ("hooks", "closure"),
        ("hooks", "argument"),
        ("ghost", "buffer"),
        ("ghost", "closure"),
    ],
)
def test_weights_of_the_classes_in_a_batch_are_said(mode, way):
    weighted, kept = nn.CrossEntropyLoss(weight=torch.ones(3)), {}

    def closing(outputs, y, weight=None):
        weight = kept["weight"] if weight is None else weight
        return F.cross_entropy(outputs, y, reduction="none") * weight[y]

    def step(module, inner, optimizer, criterion, x, y):
        weight = kept["weight"] = balanced(y)
        if way == "buffer":
            weighted.weight.copy_(weight)
        criterion(module(x), y, **({"weight": weight} if way == "argument" else {})).backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="criterion must weigh every batch alike"):
        run(step, mode=mode, criterion=weighted if way == "buffer" else closing)


def test_weights_that_stay_are_no_reason(recwarn):
    for mode in HOOKS:
        run(plain, mode=mode, criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    assert not [w for w in recwarn if "criterion" in str(w.message)]


class Normalised(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return super().forward(x - self.mean)


@pytest.mark.parametrize("mode", HOOKS)
def test_statistics_that_the_loop_keeps_in_a_buffer_are_said(mode):
    def step(module, inner, optimizer, criterion, x, y):
        plain(module, inner, optimizer, criterion, x, y)
        inner.mean.mul_(0.9).add_(0.1 * x.sum(0))

    with pytest.warns(RuntimeWarning, match="buffer 'mean'"):
        run(step, model=Normalised(), mode=mode)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda net: torch.compile(net, backend="eager")]
)
def test_compiled_modules_are_refused_by_name(make):
    refused("torch.jit|torch.compile", run, plain, model=nn.Sequential(make(Net())))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("options", [{}, {"prove": False}, {"wrap_model": False}], ids=str)
@pytest.mark.parametrize("mode", [*HOOKS, "ghost"])
def test_the_returned_module_is_not_compiled_where_it_is_trained(mode, options):
    """The compiler had an error of its own, or took it."""
    criterion = {"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}

    def step(module, inner, optimizer, criterion, x, y):
        called = module if isinstance(module, nn.Module) else inner  # where it is not wrapped
        plain(torch.compile(called, backend="eager"), inner, optimizer, criterion, x, y)

    refused("must not be compiled", run, step, mode=mode, **criterion, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_returned_module_is_compiled_for_evaluation():
    def step(module, inner, optimizer, criterion, x, y):
        plain(module, inner, optimizer, criterion, x, y)
        module.eval()
        with torch.no_grad():
            compiled = torch.compile(module, backend="eager")(x)
        assert torch.allclose(compiled, module(x))
        module.train()

    assert run(step)


class CentredTogether(MixedWithLast):
    """Subtracts the mean of the items that are asked for together."""

    def __getitem__(self, i):
        return self.x[i], i % 3

    def __getitems__(self, indices):
        mean = self.x[indices].mean(0)
        return [(self.x[i] - mean, i % 3) for i in indices]


class FlippedTogether(CentredTogether):
    def __getitems__(self, indices):
        signs = (torch.rand(len(indices)) < 0.5).float() * 2 - 1
        return [(sign * self.x[i], i % 3) for sign, i in zip(signs, indices)]


class CentredAtTimes(CentredTogether):
    def __getitems__(self, indices):
        if float(torch.rand(())) < 0.08:
            return super().__getitems__(indices)
        return [(self.x[i], i % 3) for i in indices]


@pytest.mark.parametrize("by", [by_engine, by_train])
def test_a_data_set_that_mixes_items_that_are_asked_for_together_is_refused_and_augmentation_is_not(
    by,
):
    refused("__getitems__", by, CentredTogether())
    refused("__getitems__", by, CentredAtTimes())
    by(FlippedTogether())


def trained(on_step=None, model=None):
    model = model or Net()
    plan = DPSGDPlan(
        n=N, sample_rate=0.5, steps=2, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-3
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
    callbacks = Callbacks(on_step=None if on_step is None else lambda run: on_step(run, *data))
    train(
        model,
        cross_entropy,
        data,
        plan,
        optimizer=optimizer,
        seed=0,
        callbacks=callbacks,
        progress=False,
    )


def test_parameters_that_a_callback_adds_to_the_optimizer_are_refused():
    scale, seen = nn.Parameter(torch.ones(3)), []

    def adding(run, x, y):
        seen.append(run)
        run.optimizer.add_param_group({"params": [scale]})
        (scale * x[:, :3]).sum().backward()

    refused("optimizer must hold parameters of the model only", trained, adding)
    assert bool((scale == 1).all())
    # found before anything of another step is drawn
    assert seen[-1].step == seen[-1].history.steps == len(seen)


def test_another_optimizer_that_a_callback_steps_is_said():
    def beside(run, x, y):
        F.cross_entropy(run.model(x), y).backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()

    with pytest.warns(RuntimeWarning, match="trained by a SGD beside"):
        trained(beside)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_scripted_modules_are_refused_by_train():
    refused("torch.jit", trained, model=torch.jit.script(Net()))
