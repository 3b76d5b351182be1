"""Whole models of transformers from tiny configurations, in full and with LoRA, by `train` and in
the engine: what autograd says of one example at a time, or a ValueError that names the layer.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.data import import_torchvision
from dpcompanion.engine import IndividualizedPrivacyEngine
from dpcompanion.training import DPSGDPlan, cross_entropy, gradient_norms, train

import_torchvision()  # transformers imports it, and beside a CPU build of PyTorch that takes help

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Full backward hook", "ignore:target_delta", "ignore:In CPU autocast"
    ),
]

N, CLASSES, TOKENS, LENGTH, CLIP = 6, 3, 11, 5, 0.3
ATTENTION = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {
    "vocab_size": TOKENS,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def vit():
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES}
    config = transformers.ViTConfig(**ATTENTION, **NO_DROPOUT, **sizes, attn_implementation="eager")
    return transformers.ViTForImageClassification(config)


def bert():
    config = transformers.BertConfig(
        **ATTENTION, **NO_DROPOUT, **TEXT, max_position_embeddings=LENGTH
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(**sizes, **off, **TEXT)
    )


def gpt2_of_tokens():
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, **TEXT))


def llama():
    config = transformers.LlamaConfig(
        **ATTENTION, **TEXT, num_key_value_heads=1, max_position_embeddings=LENGTH
    )
    return transformers.LlamaForSequenceClassification(config)


def t5():
    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, **TEXT))


#: How each is built, where LoRA goes, and what gets gradients beside it.
MODELS = {
    "ViT": (vit, ["q_proj", "v_proj"], "classifier"),
    "BERT": (bert, ["query", "value"], "classifier"),
    "GPT-2": (gpt2, ["c_attn"], "score"),
    "GPT-2 of tokens": (gpt2_of_tokens, ["c_attn"], None),
    "Llama": (llama, ["q_proj", "v_proj"], "score"),
    "T5": (t5, ["q", "v"], None),
    "T5, padded": (t5, ["q", "v"], None),
    "T5, padded, by a mask of four axes": (t5, ["q", "v"], None),
}


class Logits(nn.Module):
    """(n, classes) numbers of each example, from what a model puts out."""

    def __init__(self, model, images, masked):
        super().__init__()
        self.model, self.images, self.masked = model, images, masked

    def forward(self, x):
        if self.images:
            return self.model(pixel_values=x).logits
        mask = (x > 0).long()
        if self.masked == "by four axes":  # which transformers takes as it is
            mask = torch.where(x > 0, 0.0, torch.finfo(torch.float32).min)[:, None, None].expand(
                -1, 1, LENGTH, -1
            )
        found = self.model(input_ids=x, **({"attention_mask": mask} if self.masked else {}))
        logits = getattr(found, "logits", None)
        return (
            logits
            if logits is not None and logits.ndim == 2
            else (found[0] * (x > 0)[..., None]).mean(1)
        )


def made(name, lora):
    """A model, and (x, y)."""
    build, places, head = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        if lora:
            config = peft.LoraConfig(
                r=2,
                target_modules=places,
                modules_to_save=[head] if head else None,
                fan_in_fan_out=False,
            )
            model = peft.get_peft_model(model, config)
        for own, p in model.named_parameters():
            if "lora_B" in own:  # zero at first, so that lora_A has no gradient
                nn.init.normal_(p)
    generator = torch.Generator().manual_seed(0)
    images = name == "ViT"
    x = torch.randn(N, 1, 8, 8, generator=generator)
    if not images:
        x = torch.randint(1, TOKENS, (N, LENGTH), generator=generator)
        # the padding of short texts
        x[torch.arange(LENGTH)[None] > 1 + torch.arange(N)[:, None]] = 0
    masked = "by four axes" if "four axes" in name else name != "T5"
    return Logits(model, images, masked), x, torch.arange(N) % CLASSES


def alone(model, x, y):
    """The sum of clipped gradients {name: tensor}, and the norms, by plain autograd, one example at
    a time.
    """
    named = {own: p for own, p in model.named_parameters() if p.requires_grad}
    total, norms = {own: torch.zeros_like(p) for own, p in named.items()}, []
    for i in range(len(x)):
        value = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(
            value, list(named.values()), allow_unused=True, materialize_grads=True
        )
        norms.append(float(torch.stack([g.norm() for g in found]).norm()))
        for own, g in zip(named, found):
            total[own] += g * min(1.0, CLIP / norms[-1])
    return total, torch.tensor(norms)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def by_train(name, lora, method):
    """Whether `train` refuses a model; a step is else compared with autograd."""
    model, x, y = made(name, lora)
    expected, norms = alone(copy.deepcopy(model).eval(), x, y)
    before = [p.detach().clone() for p in trained(model)]
    plan = DPSGDPlan(
        n=N, sample_rate=1.0, steps=1, max_grad_norm=CLIP, noise_multiplier=0.0, delta=1e-3
    )
    optimizer = torch.optim.SGD(trained(model), lr=1.0)
    try:
        found = gradient_norms(copy.deepcopy(model).eval(), cross_entropy, x, y, method=method)
        train(
            model,
            cross_entropy,
            (x, y),
            plan,
            optimizer=optimizer,
            seed=0,
            method=method,
            progress=False,
        )
    except ValueError as error:
        assert "layer" in str(error) or str(error).startswith("model"), error
        return True
    assert torch.allclose(found, norms, rtol=1e-3)
    for p, old, g in zip(trained(model), before, expected.values()):
        assert (plan.expected_batch_size * (old - p.detach()) - g).norm() <= 1e-4 * CLIP * N
    return False


def private(model, x, y, mode):
    """What the engine returns for a model that all examples train at once, and that does not
    move.
    """
    return IndividualizedPrivacyEngine(accountant="rdp").make_private_with_budgets(
        module=model.train(),
        optimizer=torch.optim.SGD(trained(model), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N),
        target_epsilons=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=CLIP,
        seed=0,
        grad_sample_mode=mode,
    )


def by_engine(name, lora, mode):
    """Whether the engine refuses a model; a sum is else compared with autograd."""
    model, x, y = made(name, lora)
    expected, _ = alone(copy.deepcopy(model).eval(), x, y)
    try:
        module, optimizer, *rest = private(model, x, y, mode)
        criterion = rest[0] if mode == "ghost" else F.cross_entropy
        for inputs, targets in rest[-1]:
            criterion(module(inputs), targets).backward()
            assert optimizer.pre_step()
    except ValueError as error:
        assert "layer" in str(error) or "'model." in str(error), error
        return True
    for own, p in model.named_parameters():
        if p.requires_grad:
            assert (p.summed_grad - expected[own]).norm() <= 1e-4 * CLIP * N
    return False


# Which are refused: vmap takes no mask (n, T), of which transformers looks whether it masks
# anything; ViT has weights of its own around layers; T5 has one table of positions for all
# examples, and shares its words with a layer that it does not use.
BY_TRAIN = {
    ("ViT", False): {"mixed", "ghost"},
    ("BERT", False): {"func"},
    ("BERT", True): {"func"},
    ("GPT-2 of tokens", False): {"mixed", "ghost"},
    ("T5", False): {"mixed", "ghost"},
    ("T5, padded", False): {"auto", "mixed", "ghost", "func"},
    ("T5, padded", True): {"func"},
    ("T5, padded, by a mask of four axes", False): {"mixed", "ghost"},
}
BY_ENGINE = {
    **{(name, False): {"ew"} for name in MODELS},
    ("GPT-2 of tokens", False): {"ew", "ghost"},
    ("T5", False): {"hooks", "functorch", "ew", "ghost"},
    ("T5, padded", False): {"hooks", "functorch", "ew", "ghost"},
    ("T5, padded, by a mask of four axes", False): {"hooks", "functorch", "ew", "ghost"},
}


@pytest.mark.parametrize("name, lora", itertools.product(MODELS, [False, True]))
def test_a_whole_model_is_trained_as_autograd_says_or_refused(name, lora):
    refused = {
        method for method in ("auto", "mixed", "ghost", "func") if by_train(name, lora, method)
    }
    assert refused == BY_TRAIN.get((name, lora), set())


@pytest.mark.parametrize("name, lora", itertools.product(MODELS, [False, True]))
def test_a_whole_model_is_trained_in_the_engine_as_autograd_says_or_refused(name, lora):
    refused = {
        mode for mode in ("hooks", "functorch", "ew", "ghost") if by_engine(name, lora, mode)
    }
    assert refused == BY_ENGINE.get((name, lora), set())


def test_what_a_mask_of_two_axes_takes_is_said():
    model, x, y = made("T5, padded", False)
    with pytest.raises(ValueError, match=r"no method fits.*\(n, 1, T, T\)"):
        gradient_norms(model.eval(), cross_entropy, x, y)


def bf16_llama():
    """LoRA in float32 over a frozen base in bfloat16, as people fine-tune."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = llama().bfloat16().requires_grad_(False)
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        for own, p in model.named_parameters():
            if "lora_B" in own:
                nn.init.normal_(p)
    assert {p.dtype for p in trained(model)} == {torch.float32}
    return Logits(model, images=False, masked=True)


def test_lora_over_a_base_in_bfloat16_has_norms_as_autograd():
    model, (_, x, y) = bf16_llama(), made("Llama", False)
    _, norms = alone(copy.deepcopy(model).eval(), x, y)
    assert torch.allclose(
        gradient_norms(model.eval(), cross_entropy, x, y).float(), norms, rtol=2e-2
    )


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_lora_over_a_base_in_bfloat16_is_trained_in_the_engine(mode):
    model, (_, x, y) = bf16_llama(), made("Llama", False)
    expected, _ = alone(copy.deepcopy(model).eval(), x, y)
    module, optimizer, *rest = private(model, x, y, mode)
    criterion = rest[0] if mode == "ghost" else F.cross_entropy
    (batch,) = rest[-1]
    criterion(module(batch[0]), batch[1]).backward()
    assert optimizer.pre_step()
    for own, p in model.named_parameters():
        if p.requires_grad:
            assert (p.summed_grad - expected[own]).norm() <= 2e-2 * CLIP * N
