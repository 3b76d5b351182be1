"""An example's loss is what the model itself says of a batch of this one example."""

import pytest
import torch
from tiny import MODELS, bert, model_of, rows_of
from transformers import BertForNextSentencePrediction, BertModel, default_data_collator

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


@pytest.mark.parametrize("kind", [BertModel, BertForNextSentencePrediction])
def test_a_model_without_such_a_loss_is_refused_by_its_class(kind):
    with pytest.raises(ValueError, match=kind.__name__):
        per_example_loss(kind(bert().config))
