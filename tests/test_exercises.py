"""Exercises: every chapter has three, each followed by its solution; what a solution says in
numbers is computed here.

Solutions that are hidden cells compute their own numbers; these are the ones that are written out.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from dpcompanion.accounting import compute_delta, compute_epsilon, rdp_sampled_gaussian
from dpcompanion.filters import adaptive_delta
from dpcompanion.per_instance import step_divergence
from dpcompanion.reproduction import experiments, published
from dpcompanion.reproduction.papers.idp_sgd import TABLE_5

BOOK = Path(__file__).resolve().parent.parent / "book"
PAGES = [
    "attacker",
    "accounting-in-pictures",
    "which-guarantee",
    "accounting",
    "exact-filters",
    "your-own-model",
    "your-epsilon",
    "papers/intrinsic-privacy",
    "papers/per-instance-accounting",
    "papers/individual-accounting",
    "papers/idp-sgd",
    "papers/gradients-look-alike",
    "papers/gradients-look-alike-proofs",
]
QUESTION = r":::\{admonition\} Exercise (\d+)(?:: [^\n]+)?\n:class: exercise\n\n(.+?)\n:::\n"
ANSWER = (
    r"\n(?::::\{dropdown\} Solution\n(.+?)\n:::\n"
    r"|```\{code-cell\} ipython3\n:tags: \[hide-cell\]\n(.+?)\n```\n)"
)


def solutions(page):
    """The written or computed solution of each exercise of a page."""
    text = (BOOK / f"{page}.md").read_text(encoding="utf-8").partition("\n## Exercises\n")[2]
    return [
        written or code for _, _, written, code in re.findall(QUESTION + ANSWER, text, re.DOTALL)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_chapter_has_three_exercises_in_one_look_each_with_its_solution(page):
    text = (BOOK / f"{page}.md").read_text(encoding="utf-8")
    section = text.partition("\n## Exercises\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"\} Exercise (\d+)", section)]
    assert len(numbers) >= 3 and numbers == list(range(1, len(numbers) + 1))
    assert len(solutions(page)) == len(numbers) == text.count(":class: exercise")


def test_intrinsic_privacy_sigmas_of_neighbours_agree():
    median, *_ = solutions("papers/intrinsic-privacy")
    values = experiments.get("intrinsic-privacy/table-3").record("paper").values
    smallest, largest = (
        values[f"mnist-binary.sigma_i_{which}"] for which in ("smallest", "largest")
    )
    assert "agree to a part in twenty thousand" in median and largest / smallest - 1 < 1 / 20_000
    assert f"about {100 / math.sqrt(2 * 98):.0f}%" in median


def test_intrinsic_privacy_a_shifted_uniform_leaves_its_support_with_the_chance_that_is_said():
    said = solutions("papers/intrinsic-privacy")[2]
    a, d = 1.7, 0.3
    outside = (
        ((torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 2 - 1) * a + d > a)
        .double()
        .mean()
    )
    assert "$d/(2a)$" in said and abs(float(outside) - d / (2 * a)) < 0.002


def test_per_instance_accounting_rounding_and_handing_over_the_draws():
    rounding, draws, *_ = solutions("papers/per-instance-accounting")
    assert f"= {(0.1 / 0.149) ** 2:.2f}$" in rounding and f"= {(0.2 / 0.149) ** 2:.1f}$" in rounding
    low, true = (
        compute_epsilon(
            sample_rate=1024 / 60_000,
            noise_multiplier=2.5 / norm,
            steps=5860,
            delta=1e-5,
            accountant="rdp",
        )
        for norm in (0.1, 0.149)
    )
    assert "a third in epsilon" in rounding and 0.28 < 1 - low / true < 0.38
    q, sigma, alpha = 0.064, 2.5, 8
    known = math.log1p(q * math.expm1((alpha**2 - alpha) / (2 * sigma**2))) / (alpha - 1)
    secret = float(rdp_sampled_gaussian(sample_rate=q, noise_multiplier=sigma, orders=[alpha])[0])
    assert "some ninety times" in draws and 85 < known / secret < 95


def test_handing_over_the_draws_costs_what_the_formula_says():
    # Both worlds draw; only in one of them does the draw move the output. The divergence is a sum
    # over the draw.
    q, sigma, alpha, z = 0.3, 1.3, 3.0, 0.7
    x = torch.linspace(-12, 14, 200_001, dtype=torch.float64)
    p, noise = (torch.exp(-((x - centre) ** 2) / (2 * sigma**2)) for centre in (z, 0.0))
    moment = (1 - q) + q * float((p**alpha * noise ** (1 - alpha)).sum() / noise.sum())
    formula = math.log(1 - q + q * math.exp((alpha**2 - alpha) * z**2 / (2 * sigma**2))) / (
        alpha - 1
    )
    assert abs(math.log(moment) / (alpha - 1) - formula) < 1e-9


def test_gradients_look_alike_higher_orders_cost_more():
    orders = [8.0, 8.5, 9.0, 16.0]
    costs = step_divergence(sample_rate=0.05, noise_multiplier=1.2, sensitivity=0.6, orders=orders)
    assert (costs.diff() > 0).all()


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 2.5, 3.0, 7.3])
def test_proofs_the_moment_is_convex_in_the_squared_length(alpha):
    omega = torch.linspace(0, 1, 1001, dtype=torch.float64)
    factor = 2 + 4 * (alpha - 2) * omega + (alpha - 2) * (alpha - 3) * omega**2
    assert float(factor.min()) >= (2 - 0.25 if alpha >= 2 else (alpha - 1) * alpha - 1e-12)
    squares = torch.linspace(0.01, 6, 60, dtype=torch.float64)
    moment = torch.exp(
        (alpha - 1)
        * step_divergence(
            sample_rate=0.2, noise_multiplier=1.0, orders=alpha, sensitivity=squares.sqrt()
        )
    )
    assert (moment[2:] - 2 * moment[1:-1] + moment[:-2] > 0).all()


def test_exact_filters_adaptivity_is_free_at_equal_costs():
    one, epsilon = dict(sample_rate=0.01, noise_multiplier=1.0), 0.4
    delta = compute_delta(**one, steps=20, epsilon=epsilon)
    assert (
        delta
        <= adaptive_delta(**one, levels=[0.5, 1.0], costs=(1, 1), budget=20, epsilon=epsilon)
        < 1.05 * delta
    )


def test_your_own_model_two_copies():
    said = solutions("your-own-model")[0]
    factor = f"{(1 + math.exp(4)) / 10:.1f}"
    assert "that is 8 and" in said and f"{factor}\\cdot10^{{-4}}" in said


def test_your_epsilon_five_pictures():
    # Group privacy of the promise; five accounts of one run add up to no promise.
    said = solutions("your-epsilon")[1]
    delta = 1e-5 * math.expm1(5 * 2.4) / math.expm1(2.4)
    assert "Not 4.5" in said and "$5\\cdot 2.4 = 12$" in said and f"\\approx {delta:.2f}$" in said


def test_errata_table_7_of_mnist_breaks_budgets_by_rdp_and_none_by_pld():
    # Noise multiplier of a group: the printed sigma_scale times the mean clip norm, over the
    # printed clip norm.
    text = (BOOK / "errata.md").read_text(encoding="utf-8")
    printed, training = published.exhibit("idp-sgd/table-7"), TABLE_5["mnist"]
    broken = {}
    for group in "AB":
        for i, budget in enumerate((1, 2, 3)):
            noise = (
                float(printed[f"mnist.{group}.sigma_scale"])
                * training.clip
                / printed[f"mnist.{group}.c_p"][i]
            )
            run = dict(
                sample_rate=training.sample_rate,
                steps=training.steps,
                noise_multiplier=noise,
                delta=1e-5,
            )
            assert compute_epsilon(**run) < budget
            if (spent := compute_epsilon(**run, accountant="rdp")) > budget:
                broken[group, budget] = f"{spent:.2f}"
    assert broken == {("A", 1): "1.08", ("A", 2): "2.01", ("B", 1): "1.06"}
    assert "epsilon of 1.08 (A) or 1.06 (B) by RDP" in text and "epsilon of 2.01 (A)" in text
