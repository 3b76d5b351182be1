"""An example's loss is what the model itself says of a batch of this one example."""

import pytest
import torch
from tiny import MODELS, bert, gpt2, model_of, rows_of
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertForNextSentencePrediction,
    BertModel,
    XLMConfig,
    XLMWithLMHeadModel,
    XLNetConfig,
    XLNetLMHeadModel,
    default_data_collator,
)

from dpcompanion.huggingface import per_example_loss


@pytest.mark.parametrize("name", MODELS)
def test_an_example_has_the_loss_of_a_batch_of_its_own(name):
    model = model_of(name, lora=name == "gpt2").eval()
    keep = ("input_ids", "attention_mask", "pixel_values", "labels")
    batch = default_data_collator(
        [{k: v for k, v in row.items() if k in keep} for row in rows_of(name, 5)]
    )
    found = per_example_loss(model)(model(**batch), batch)
    alone = torch.stack(
        [model(**{k: t[i : i + 1] for k, t in batch.items()}).loss for i in range(5)]
    )
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, labels",
    [
        ({"num_labels": 1}, torch.tensor([0.5, 1.0, -1.0])),
        (
            {"problem_type": "regression", "num_labels": 2},
            torch.tensor([[0.5, 1.0], [0.0, 1.0], [2.0, 1.0]]),
        ),
        ({"num_labels": 2}, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])),
    ],
)
def test_regression_and_several_labels_are_those_of_the_model(options, labels):
    torch.manual_seed(0)
    model, ids = bert(**options).eval(), torch.arange(12).view(3, 4)
    found = per_example_loss(model)(model(input_ids=ids), {"labels": labels})
    alone = [model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss for i in range(3)]
    torch.testing.assert_close(found, torch.stack(alone))


_DECODER = dict(
    vocab_size=20, d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8
)
UNSHIFTED = {
    XLNetLMHeadModel: XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8),
    XLMWithLMHeadModel: XLMConfig(vocab_size=20, emb_dim=8, n_layers=1, n_heads=2),
    BartForCausalLM: BartConfig(**_DECODER),
}


@pytest.mark.parametrize("kind", UNSHIFTED)
def test_labels_are_not_shifted_where_the_model_does_not_shift_them(kind):
    torch.manual_seed(0)
    model, ids = kind(UNSHIFTED[kind]).eval(), torch.arange(3, 13).view(2, 5)
    found = per_example_loss(model)(model(input_ids=ids), ids)
    alone = [model(input_ids=row[None], labels=row[None]).loss for row in ids]
    torch.testing.assert_close(found, torch.stack(alone))


def test_a_causal_model_with_another_loss_of_its_own_is_refused_by_its_class():
    class DoubledLMHeadModel(type(gpt2())):
        def forward(self, **options):
            outputs = super().forward(**options)
            outputs.loss = 2 * outputs.loss
            return outputs

    class LengthsLMHeadModel(type(gpt2())):
        def forward(self, lengths, **options):
            return super().forward(**options)

    for kind in (DoubledLMHeadModel, LengthsLMHeadModel):
        with pytest.raises(ValueError, match=f"model must .*{kind.__name__}.*loss of your own"):
            per_example_loss(kind(gpt2().config))


@pytest.mark.parametrize("kind", [BertModel, BertForNextSentencePrediction])
def test_a_model_without_such_a_loss_is_refused_by_its_class(kind):
    with pytest.raises(ValueError, match=kind.__name__):
        per_example_loss(kind(bert().config))
