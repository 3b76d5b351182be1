import importlib
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from dpcompanion.estimator import DPLogisticRegression
from dpcompanion.training import DPSGDPlan, cross_entropy, train

DIGITS, LABELS = load_digits(return_X_y=True)
RUN = {
    "epsilon": 8.0,
    "classes": range(10),
    "lower": 0,
    "upper": 16,
    "epochs": 5,
    "random_state": 0,
}


@pytest.fixture(scope="module")
def fitted():
    return DPLogisticRegression(**RUN).fit(DIGITS, LABELS)


def test_digits_are_recognised_and_the_ledger_stays_within_epsilon(fitted):
    assert fitted.score(DIGITS, LABELS) > 0.85
    assert 0.85 * 8 < fitted.ledger_.epsilon(1e-5) <= 8
    chances = fitted.predict_proba(DIGITS[:5])
    assert chances.shape == (5, 10) and np.allclose(chances.sum(1), 1)
    assert (
        fitted.predict(DIGITS) == fitted.classes_[fitted.decision_function(DIGITS).argmax(1)]
    ).all()


def test_before_it_is_fitted_it_says_so():
    for ask in (DPLogisticRegression().predict, DPLogisticRegression().predict_proba):
        with pytest.raises(NotFittedError):
            ask(DIGITS)
    with pytest.raises(NotFittedError):
        DPLogisticRegression().score(DIGITS, LABELS)


def test_it_is_train_on_scaled_columns(fitted):
    """Weights equal those of a loop written by hand with the estimator's plan, to the bit."""
    x = fitted.scaler_.transform(torch.from_numpy(DIGITS.astype(np.float32)))
    model = torch.nn.Linear(64, 10)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    plan = DPSGDPlan.for_epsilon(
        7.2, n=1797, delta=0.9e-5, batch_size=256, epochs=5, max_grad_norm=1.0
    )
    assert fitted.history_.plan.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    train(
        model,
        cross_entropy,
        (x, torch.from_numpy(LABELS)),
        fitted.history_.plan,
        optimizer=optimizer,
        seed=0,
    )
    assert (fitted.coef_ == model.weight.detach().numpy()).all()
    assert (fitted.intercept_ == model.bias.detach().numpy()).all()


@pytest.mark.slow
def test_budgets_are_those_of_examples():
    x, y = (
        torch.randn(300, 2, generator=torch.Generator().manual_seed(0)),
        np.array(["no", "yes"] * 150),
    )
    budgets = np.where(np.arange(300) < 200, 1.0, 4.0)
    found = DPLogisticRegression(
        classes=("no", "yes"), lower=-3, upper=3, delta=1e-4, batch_size=30, epochs=2
    )
    epsilons = found.fit(x, y, budgets=budgets).ledger_.epsilons(1e-4).numpy()
    assert (epsilons <= budgets).all() and (epsilons > 0.8 * budgets).all()
    assert set(found.predict(x)) <= {"no", "yes"}
    # of a table that was shuffled they are taken by position, as its rows are
    pandas = pytest.importorskip("pandas")
    shuffled = np.random.RandomState(0).permutation(300)
    series = pandas.Series(budgets[shuffled], index=shuffled)
    again = found.fit(x[shuffled], y[shuffled], budgets=series).ledger_.epsilons(1e-4).numpy()
    assert (again <= budgets[shuffled]).all() and (again > 0.8 * budgets[shuffled]).all()


def test_persons_are_the_unit_and_copies_of_their_rows_cost_nothing():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y, people = (x[:, 0] > 0).long(), np.arange(200) % 50
    options = {
        "lower": -4,
        "upper": 4,
        "delta": 1e-4,
        "batch_size": 10,
        "epochs": 2,
        "unit": "patient",
    }
    regression = DPLogisticRegression(**options, random_state=1)
    once = regression.fit(x, y, people=people, at_most=3).ledger_
    rows = np.concatenate([np.arange(200), np.repeat(7, 30)])
    copied = clone(regression).fit(x[rows], y[rows], people=people[rows], at_most=3)
    assert copied.ledger_.epsilon(1e-4) == once.epsilon(1e-4) <= 1
    assert (
        copied.scaler_.n == copied.history_.plan.n == 50
        and "patient" in copied.history_.statement()
    )
    assert "of 50 patients" in copied.scaler_.statement() and once.units == ("patient",)


def test_the_scaler_of_persons_sees_one_row_each_within_the_bounds():
    """A person's rows may hold any numbers: what enters the means is one row a person, between the
    bounds.
    """
    x = np.zeros((100, 1), dtype=np.float32)
    x[:50] = 1e30
    options = {
        "lower": 0,
        "upper": 2,
        "delta": 1e-4,
        "batch_size": 10,
        "epochs": 1,
        "epsilon": 1e4,
        "random_state": 0,
    }
    regression = DPLogisticRegression(**options).fit(
        x, np.zeros(100), people=np.arange(100) % 50, at_most=2
    )
    assert float(regression.scaler_.mean) == pytest.approx(1, abs=0.05)


def test_it_is_an_estimator_of_scikit_learn():
    regression = DPLogisticRegression(**RUN | {"epochs": 2})
    assert clone(regression).get_params() == regression.get_params()
    assert "epsilon=8.0" in repr(regression)
    pipeline = make_pipeline(FunctionTransformer(lambda x: x / 1.0), regression)
    assert cross_val_score(pipeline, DIGITS, LABELS, cv=2).min() > 0.6


def test_without_bounds_columns_are_taken_as_they_are():
    x = np.random.default_rng(0).normal(size=(100, 2))
    found = DPLogisticRegression(delta=1e-3, batch_size=10, epochs=1).fit(x, x[:, 0] > 0)
    assert (
        found.scaler_ is None
        and found.history_.plan.epsilon(1e-3) <= 1
        and found.n_features_in_ == 2
    )
    with pytest.raises(ValueError, match="X must have 2 columns, got 1"):
        found.predict(x[:, :1])


@pytest.mark.parametrize(
    ("options", "given", "named"),
    [
        ({}, {"sample_weight": np.ones(100)}, "sample_weight"),
        ({"lower": 0}, {}, "lower and upper"),
        ({"classes": (0, 2)}, {}, "classes"),
        ({"epsilon": -1.0}, {}, "^epsilon must"),
        ({"delta": 0}, {}, "^delta must"),
        ({"learning_rate": -1}, {}, "^learning_rate must"),
        ({"batch_size": 0}, {}, "batch_size"),
        ({}, {"people": np.arange(100)}, "at_most"),
        ({}, {"X": np.full((100, 2), np.nan)}, "X must be finite.* got nan in row 0, column 0"),
        ({}, {"X": np.ones(100)}, "X must be of shape"),
        ({"random_state": np.random.RandomState(0)}, {}, "^random_state must be a whole number"),
        ({}, {"budgets": {1.0: 0.5}}, "^budgets' shares must"),
        ({}, {"budgets": np.arange(100)}, "^budgets must .* got 0: leave the data of persons"),
        (
            {"batch_size": 75, "epochs": 10, "lower": -4, "upper": 4},
            {"budgets": {0.5: 0.5, 40.0: 0.5}},
            r"^budgets must not exceed .* got 40: .* smaller batch_size, or method='scale'",
        ),
        ({}, {"y": np.full(100, 7)}, "y must hold one of .* got 7"),
        ({}, {"y": np.zeros(99)}, "y must"),
    ],
)
def test_what_it_refuses(options, given, named):
    data = {"X": np.ones((100, 2)), "y": np.arange(100) % 2}
    with pytest.raises(ValueError, match=named):
        DPLogisticRegression(**{"delta": 1e-3} | options).fit(**data | given)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "dpcompanion.estimator")
    with pytest.raises(ImportError, match=r"dpcompanion\[data\]"):
        importlib.import_module("dpcompanion.estimator")


def test_two_classes_have_one_decision_as_scikit_learn_asks():
    few = LABELS < 2
    found = DPLogisticRegression(**RUN | {"classes": (0, 1)}).fit(DIGITS[few], LABELS[few])
    decision = found.decision_function(DIGITS[few])
    assert decision.shape == (few.sum(),)
    assert (found.predict(DIGITS[few]) == found.classes_[(decision > 0).astype(int)]).all()
    assert roc_auc_score(LABELS[few], decision) > 0.9


def columns(rows=200):
    g = np.random.default_rng(0)
    x = g.normal(size=(rows, 2))
    return x, (x[:, 0] > 0).astype(int)


def test_a_fit_that_fails_leaves_the_one_before():
    x, y = columns()
    model = DPLogisticRegression(epochs=2, lower=-4, upper=4, random_state=0).fit(x, y)
    before = dict(vars(model))
    for wrong in ({"method": "x"}, {"classes": ("no", "yes")}, {"epochs": -1}):
        with pytest.raises(ValueError):
            model.set_params(**wrong).fit(x, y)
        model.set_params(**{name: before[name] for name in wrong})
        assert all(vars(model)[name] is value for name, value in before.items())


def test_bounds_with_names_are_those_of_their_columns():
    pandas = pytest.importorskip("pandas")
    x, y = columns()
    table = pandas.DataFrame(x * [1, 1000], columns=["age", "income"])
    bounds = {"income": 4000.0, "age": 4.0}
    upper = pandas.Series(bounds)
    model = DPLogisticRegression(epochs=1, lower=-upper, upper=upper).fit(table, y)
    assert model.scaler_.upper.tolist() == [4.0, 4000.0]
    model.set_params(upper=upper.rename({"age": "weight"}))
    with pytest.raises(ValueError, match="upper must name the columns"):
        model.fit(table, y)


def test_columns_with_a_large_offset_keep_their_digits():
    seconds = 1.7e9 + np.linspace(0, 100, 600)[:, None]
    late = (seconds[:, 0] > 1.7e9 + 50).astype(int)
    run = dict(epsilon=50.0, epochs=10, lower=1.7e9, upper=1.7e9 + 100, random_state=0)
    assert DPLogisticRegression(**run).fit(seconds, late).score(seconds, late) > 0.95


def test_what_is_no_table_of_numbers_is_refused_by_name():
    sparse = pytest.importorskip("scipy.sparse")
    x, y = columns()
    model = DPLogisticRegression(epochs=1)
    for given, labels, words in (
        (sparse.csr_matrix(x), y, "X must be dense"),
        (x * 1j, y, "X must be numbers"),
        ([["a", "b"]] * len(y), y, "X must be numbers"),
        (x, [None] * len(y), "y must hold a label in each row"),
    ):
        with pytest.raises(ValueError, match=words):
            model.fit(given, labels)
    for name, value in (("batch_size", "a"), ("classes", ()), ("classes", None)):
        with pytest.raises(ValueError, match=name):
            clone(model).set_params(**{name: value}).fit(x, y)


def test_with_persons_the_statement_is_of_persons():
    x, y = columns()
    model = DPLogisticRegression(epochs=1).fit(x, y, people=np.arange(200) // 2, at_most=2)
    assert "one person" in model.ledger_.statement()
