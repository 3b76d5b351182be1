"""Logistic regression by DP-SGD as a scikit-learn estimator, with personal budgets (extra `data`).

`DPLogisticRegression` goes where a `LogisticRegression` goes: into pipelines, `clone`,
`cross_val_score`. It trains by a `DPSGDPlan`, from weights of zero, on columns that a
`private_scaler` scales between public bounds. The scaler takes a tenth of the smallest epsilon and
of delta, the training the rest (basic composition; `ledger_` has the exact sum).

Neighbouring relation: the data of one example (a row, or with `people` a person) are left out, n
public ("zero-out"). Nothing covers what happens around the fit: bounds or classes that are read off
the data, steps of a pipeline that learn from them (a `StandardScaler`), and hyperparameters chosen
by scores on private data (`accounting.select_best`).

>>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
>>> y = (x.sum(1) > 0).long()
>>> regression = DPLogisticRegression(epsilon=1.0, lower=-4, upper=4).fit(x, y)
>>> regression.score(x, y) > 0.9, regression.ledger_.epsilon(1e-5) <= 1.0
(True, True)
"""

import dataclasses
import math
from typing import Any

import numpy as np
import torch

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise ImportError(
        "the estimator is one of scikit-learn's: pip install 'dpcompanion[data]'"
    ) from error

from dpcompanion import _checks
from dpcompanion._rounding import rounded
from dpcompanion.accounting import Ledger
from dpcompanion.idp import budgets_for
from dpcompanion.idp.parameters import UnreachableBudget
from dpcompanion.mechanism.plan import DPSGDPlan
from dpcompanion.release import private_scaler
from dpcompanion.seeds import derive_key, keyed_generator
from dpcompanion.training import by_person, cross_entropy, train

#: The part of epsilon and delta that the scaler takes.
SHARE = 0.1


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class DPLogisticRegression(ClassifierMixin, BaseEstimator):
    """Multinomial logistic regression whose fit is (epsilon, delta)-private; see the module's text.

    Args:
        epsilon, delta: what scaler and training may cost together, for every example without a
            budget of its own.
        classes: all labels that y may hold, a public list.
        lower, upper: public bounds of all columns, or (d,) of each, by which a private scaler
            brings columns to one scale; without them columns are taken as they are. Columns of
            large values then drown the others, since gradients are clipped: give bounds, or values
            between about -1 and 1.
        batch_size, epochs: the mean size of a batch, all n examples at most, and how often an
            example is sampled on average.
        max_grad_norm, learning_rate: to which the gradient of an example is clipped, and the rate
            of plain SGD.
        method: "sample" or "scale", how budgets are met (`DPSGDPlan.for_epsilons`).
        unit: what one of the n examples is, a word of the statements of scaler, training and
            ledger.
        random_state: None, for a model that is released, or a whole number, for research (`train`).

    Attributes:
        coef_, intercept_: (k, d) and (k,), of the scaled columns.
        classes_, n_features_in_: the classes in their order, and d.
        scaler_: the `PrivateScaler`, or None without bounds.
        history_: the `History` of the training.
        ledger_: the `Ledger` of scaler and training; `ledger_.epsilons` is for each example.
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    classes: Any = (0, 1)
    lower: Any = None
    upper: Any = None
    batch_size: float = 256.0
    epochs: float = 20.0
    max_grad_norm: float = 1.0
    learning_rate: float = 2.0
    method: str = "sample"
    unit: str = "example"
    random_state: int | None = None

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        budgets: Any = None,
        people: Any = None,
        at_most: Any = None,
        sample_weight: Any = None,
    ) -> "DPLogisticRegression":
        """Fit to X, (rows, d), and y, (rows,).

        Args:
            budgets: an epsilon for each example in place of `epsilon`, for scaler and training
                together: (n,), or {budget: share}. With `people` one a person, as
                `by_person(...).per_person(column)` makes of a column.
            people: whose each row is, (rows,); the examples are then persons, sorted, of whom at
                most `at_most` rows enter a step (`by_person`).
            sample_weight: must be None.

        Raises:
            ValueError: an argument outside its range, a label that is not in `classes`, or a
                sample_weight.
        """
        if sample_weight is not None:
            raise ValueError(
                "sample_weight must be None: weights void the account; give budgets= to protect "
                "some more"
            )
        if (people is None) != (at_most is None):
            raise ValueError(f"people and at_most must be given together, got at_most={at_most!r}")
        if (self.lower is None) != (self.upper is None):
            raise ValueError(
                f"lower and upper must be given together, got {self.lower!r} and {self.upper!r}"
            )
        if budgets is None:
            _checks.number("epsilon", self.epsilon, 0, math.inf, closed="neither")
        _checks.number("delta", self.delta, 0, 1, closed="neither")
        _checks.number("learning_rate", self.learning_rate, 0, math.inf, closed="neither")
        _checks.number("batch_size", self.batch_size, 0, math.inf, closed="neither")
        if self.random_state is not None:
            _checks.seed("random_state", self.random_state)
        x, names = _columns(X), _names(X)
        lower, upper = _bound("lower", self.lower, names), _bound("upper", self.upper, names)
        classes = _classes(self.classes)
        targets = _targets(y, classes, len(x))
        rows = None if people is None else by_person(x, targets, people, at_most=at_most)
        n = len(x) if rows is None else len(rows)
        persons = None if rows is None else rows.persons
        budgets = budgets_for(self.epsilon, n) if budgets is None else _budgets(budgets, n, persons)
        scales = self.lower is not None
        share = SHARE if scales else 0.0
        unit = "person" if rows is not None and self.unit == "example" else self.unit
        # Before anything is released: what the plan refuses costs nothing.
        plan = self._plan(budgets, share, n, unit)
        scaler = None
        if scales:
            means = x if rows is None else _means(x, rows, lower, upper)
            paid = {"epsilon": share * float(budgets.min()), "delta": share * self.delta}
            scaler = self._scaler_of(means, lower=lower, upper=upper, unit=unit, **paid)
            x = scaler.transform(x)
        x = x.float()
        model = torch.nn.Linear(x.shape[1], len(classes))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate)
        options = {"seed": self.random_state, "people": people, "at_most": at_most}
        history = train(model, cross_entropy, (x, targets), plan, optimizer=optimizer, **options)
        # All of one fit, or nothing: what an error left half done is no release beside the ledger.
        vars(self).pop("feature_names_in_", None)
        if names is not None:  # as scikit-learn does
            self.feature_names_in_ = np.asarray(names, dtype=object)
        self.classes_, self.n_features_in_ = classes, x.shape[1]
        self.scaler_, self.history_ = scaler, history
        self.ledger_ = Ledger([] if scaler is None else [scaler]).add(history)
        self.coef_, self.intercept_ = (
            parameter.detach().numpy() for parameter in model.parameters()
        )
        return self

    def _plan(self, budgets, share, n, unit):
        """The plan of the training, to which the scaler leaves what it does not take."""
        scaler = share * float(budgets.min())
        try:
            return DPSGDPlan.for_epsilons(
                budgets - scaler,
                n=n,
                delta=(1 - share) * self.delta,
                batch_size=min(self.batch_size, n),
                epochs=self.epochs,
                max_grad_norm=self.max_grad_norm,
                method=self.method,
                unit=unit,
            )
        except UnreachableBudget as error:
            most = rounded(error.most + scaler, math.floor, 4)
            raise ValueError(
                f"budgets must not exceed {most:g} here, got {float(budgets.max()):g}: not even a "
                "sample rate of 1 would use it up, beside a mean batch_size of "
                f"{self.batch_size:g}; take a smaller batch_size, or method='scale'"
            ) from None

    def _scaler_of(self, means, **options):
        seed = self.random_state
        generator = None if seed is None else keyed_generator(derive_key(seed, "scaler"))
        return private_scaler(means, generator=generator, **options)

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits of each class, (rows, k); for two classes their difference, (rows,)."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def _logits(self, X):
        check_is_fitted(self)
        x = _columns(X)
        if x.shape[1] != self.n_features_in_:
            raise ValueError(f"X must have {self.n_features_in_} columns, got {x.shape[1]}")
        names, fitted = _names(X), getattr(self, "feature_names_in_", None)
        if names is not None and fitted is not None and names != list(fitted):
            raise ValueError(f"X must have the columns {list(fitted)} in this order, got {names}")
        x = x if self.scaler_ is None else self.scaler_.transform(x)
        return x.float().numpy() @ self.coef_.T + self.intercept_

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, (rows, k)."""
        return torch.from_numpy(self._logits(X)).softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row, (rows,)."""
        check_is_fitted(self)  # before `classes_` is looked for
        return self.classes_[self._logits(X).argmax(1)]


def _budgets(budgets, n, persons):
    try:
        if persons is None:  # as scikit-learn takes y
            return budgets_for(_checks.unlabelled(budgets), n)
        return budgets_for(budgets, n, persons=persons)
    except ValueError as error:
        raise ValueError(str(error).replace("target_epsilons", "budgets")) from None


def _classes(classes):
    try:
        found = np.unique(np.asarray(list(classes)))
    except TypeError:
        found = np.zeros(0)
    if len(found) < 1 or found.dtype.kind == "O":
        raise ValueError(f"classes must be a list of labels of one type, got {classes!r:.80}")
    return found


def _bound(name, bound, columns):
    """A bound in the order of the columns, where both have names."""
    index = getattr(bound, "index", None)
    if columns is None or index is None or callable(index):
        return _checks.unlabelled(bound)
    names = list(index)
    if names and all(isinstance(each, str) for each in names):
        if sorted(names) != sorted(columns):
            raise ValueError(f"{name} must name the columns {columns}, got {names}")
        bound = bound[columns]
    return _checks.unlabelled(bound)


def _targets(y, classes, rows):
    labels = np.asarray(_checks.unlabelled(y))
    if labels.dtype.kind == "O" and any(
        label is None or type(label).__name__ in ("NAType", "NaTType")
        for label in labels.ravel().tolist()
    ):
        raise ValueError("y must hold a label in each row, got a row without one")
    if labels.shape != (rows,):
        raise ValueError(f"y must hold a label for each of {rows} rows, got shape {labels.shape}")
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    if (strange := classes[places] != labels).any():
        raise ValueError(
            f"y must hold one of the classes {classes.tolist()} in each row, got "
            f"{labels[strange].tolist()[0]!r:.80}"
        )
    return torch.from_numpy(places)


def _means(x, rows, lower, upper):
    """The mean of each person's rows, (persons, d), between the bounds."""
    inside = x.clamp(*(torch.as_tensor(bound, dtype=x.dtype) for bound in (lower, upper)))
    sums = x.new_zeros(len(rows), x.shape[1]).index_add(0, rows.owners, inside)
    return sums / rows.counts[:, None]


def _names(X):
    """The names of the columns of a data frame, or None."""
    names = list(getattr(X, "columns", ()))
    return names if names and all(isinstance(name, str) for name in names) else None


def _columns(X):
    if hasattr(X, "toarray"):
        raise ValueError(f"X must be dense, got a {type(X).__name__}: give X.toarray()")
    try:
        # float64 until columns are scaled: float32 holds no seconds of a timestamp
        entries = np.asarray(_checks.unlabelled(X))
        if entries.dtype.kind == "c":
            raise ValueError("they are complex")
        x = torch.from_numpy(np.array(entries, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"X must be numbers in each row and column, but {error}") from None
    if x.ndim != 2 or not x.numel():
        raise ValueError(
            f"X must be of shape (rows, d), one of each at least, got {tuple(x.shape)}"
        )
    if not (finite := x.isfinite()).all():
        row, column = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"X must be finite numbers, got {float(x[row, column])} in row {row}, column {column}"
        )
    return x
