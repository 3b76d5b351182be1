"""The calculator's script against the library, by node, and its page under a keyboard, in a
headless Chromium.
"""

import json
import math
import random
import re
from pathlib import Path

import pytest
from scipy.stats import norm

from dpcompanion.accounting import (
    compute_delta,
    compute_epsilon,
    gaussian_epsilon,
    rdp_sampled_gaussian,
    rdp_to_epsilon,
)
from dpcompanion.filters import adaptive_delta

from .soundness.calculator import game_of, promises_of

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"


@pytest.fixture
def page(chromium, browser_check):
    """An empty page in a headless Chromium."""
    with browser_check.browser(chromium) as context:
        yield context.new_page()


RUNS = [  # sample rate, noise multiplier, steps, delta
    (512 / 60_000, 3.42529, 9375, 1e-5),
    (0.01, 1.0, 1000, 1e-5),
    (0.01, 0.8, 500, 1e-9),
    (0.5, 5.0, 100, 1e-5),
    (0.001, 0.6, 20_000, 1e-6),
    (1.0, 10.0, 10, 1e-5),
    (512 / 60_000, 34.2529, 9375, 1e-5),
    (0.05, 0.5, 10, 1e-3),
    (0.2, 2.0, 1, 1e-4),
]


# What the page admits at its ends: epsilons of millions and of millionths, full batches, a delta of
# 1e-9.
ENDS = [
    (1.0, 0.3, 1_000_000, 1e-5),
    (0.5, 0.3, 20_000, 1e-5),
    (1e-5, 0.3, 1_000_000, 1e-9),
    (1e-5, 5000.0, 10_000, 1e-9),
    (0.999, 0.3, 1, 1e-9),
    (0.3, 100.0, 100_000, 1e-9),
    (1e-5, 0.3, 1, 1e-2),
    (1.0, 100.0, 1, 1e-2),
]


def inputs(generator):
    """A run from the page's whole range: rate, noise over the norm, steps, delta."""

    def logarithmic(low, high):
        return math.exp(generator.uniform(math.log(low), math.log(high)))

    rate = 1.0 if generator.random() < 0.03 else logarithmic(1e-5, 1)
    return (
        rate,
        logarithmic(0.3, 100) / generator.uniform(0.02, 1),
        round(logarithmic(1, 1e6)),
        logarithmic(1e-9, 1e-2),
    )


@pytest.fixture(scope="module")
def answers(run_script):
    both = "[accountant.epsilonByRenyi(...run), accountant.epsilonByLosses(...run)]"
    return run_script(f"{json.dumps(RUNS)}.map(run => {both})")


def test_renyi_epsilons_are_those_of_the_library_at_the_same_orders(answers, run_script):
    orders = run_script("accountant.ORDERS")
    for (rate, noise, steps, delta), (by_renyi, _) in zip(RUNS, answers):
        rdp = steps * rdp_sampled_gaussian(sample_rate=rate, noise_multiplier=noise, orders=orders)
        assert math.isclose(by_renyi, float(rdp_to_epsilon(rdp, orders, delta)[0]), rel_tol=1e-9)


def test_epsilons_by_losses_are_bounds_within_the_error_that_is_shown(answers):
    for (rate, noise, steps, delta), (_, by_losses) in zip(RUNS, answers):
        exact = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=delta)
        assert exact <= by_losses["epsilon"] <= exact + by_losses["error"] + 2e-6
        assert by_losses["error"] <= 0.005 * exact


@pytest.mark.slow
def test_no_epsilon_is_below_the_librarys_anywhere_on_the_page(run_script):
    """A few of the inputs that tests/soundness tries by the thousand, and the ends of the range."""
    generator = random.Random(0)
    runs = ENDS + [inputs(generator) for _ in range(6)]
    both = "[accountant.epsilonByRenyi(...run), accountant.epsilonByLosses(...run)]"
    for (rate, noise, steps, delta), answer in zip(
        runs, run_script(f"{json.dumps(runs)}.map(run => {both})")
    ):
        by_renyi, by_losses = answer[0], answer[1]["epsilon"]
        assert by_renyi is not None and by_losses is not None, "JSON has no NaN and no infinity"
        exact = compute_epsilon(sample_rate=rate, noise_multiplier=noise, steps=steps, delta=delta)
        assert exact <= min(by_renyi, by_losses) <= 1.05 * exact + 1e-6, (rate, noise, steps, delta)


FILTERS = [  # sample rate, noise multiplier, steps, delta, norm over the clip norm
    (512 / 60_000, 3.42529, 9375, 1e-5, 0.25),
    (512 / 60_000, 3.42529, 9375, 1e-5, 0.3),
    (0.01, 1.0, 1000, 1e-5, 0.5),
    (0.01, 0.8, 500, 1e-9, 0.25),
    (0.2, 2.0, 1, 1e-4, 1.0),
    (1.0, 10.0, 10, 1e-5, 0.5),
    (0.05, 0.5, 10, 1e-3, 0.5),
]


def filter_inputs(generator):
    rate, noise, steps, delta = inputs(generator)
    return rate, max(noise, 0.5), steps, delta, generator.uniform(0.02, 1)


def check_filter(run, answer):
    """The library finds no larger delta at the page's epsilons; True if they were worth a curve."""
    delta, norm = run[3:]
    if "reason" in answer:
        return False
    assert len(answer["promises"]) == answer["blocks"] + 1 and answer["promises"][0] == 0
    assert (
        norm <= answer["level"] == min(level for level in (0.25, 0.5, 0.75, 1.0) if norm <= level)
    )
    for i in promises_of(answer):
        game, epsilon = game_of(run, answer, i), answer["promises"][i]
        assert adaptive_delta(**game, epsilon=epsilon) <= delta, (run, i)
        if i == answer["blocks"]:
            # Not far above it either: what the grid adds is said.
            less = max(0.0, epsilon - answer["error"] - 1e-6) * 0.97
            assert not less or adaptive_delta(**game, epsilon=less) > delta, (run, i)
    return True


@pytest.mark.slow
def test_exact_filters_are_bounds_within_the_error_that_is_shown(run_script):
    call = f"{json.dumps(FILTERS)}.map(run => exactFilter.finished(exactFilter.promised(...run)))"
    for run, answer in zip(FILTERS, run_script(call)):
        assert check_filter(run, answer), (run, answer)


@pytest.mark.slow
def test_no_exact_filter_is_below_the_librarys_on_random_inputs(run_script):
    generator = random.Random(1)
    runs = [filter_inputs(generator) for _ in range(8)]
    answers = run_script(
        f"{json.dumps(runs)}.map(run => exactFilter.finished(exactFilter.promised(...run)))"
    )
    small = [(run, answer) for run, answer in zip(runs, answers) if answer.get("budget", 0) <= 300]
    assert sum(check_filter(run, answer) for run, answer in small) >= 2


@pytest.mark.slow
def test_an_exact_filter_costs_more_than_fixed_norms_and_less_than_a_renyi_filter(run_script):
    for rate, noise, steps, delta, share in (FILTERS[0], FILTERS[2], FILTERS[5]):
        run = json.dumps([rate, noise / share, steps, delta])[1:-1]
        by_renyi, by_losses = run_script(
            f"[accountant.epsilonByRenyi({run}), accountant.epsilonByLosses({run}).epsilon]"
        )
        game = json.dumps([rate, noise, steps, delta, share])[1:-1]
        answer = run_script(f"exactFilter.finished(exactFilter.promised({game}))")
        assert by_losses < answer["promises"][-1] < 0.96 * by_renyi
        assert answer["promises"] == sorted(answer["promises"])


@pytest.mark.parametrize(
    "run",
    [
        "1, 0.3, 1000000, 1e-5, 1",
        "1.1677191184149519e-05, 2613.3876888811565, 218, 4e-4, 0.72",  # prices are rounding errors
        "1e-9, 1e9, 1, 1e-12, 0.3",
    ],
)
def test_where_a_filter_is_not_computed_the_reason_is_said(run_script, run):
    answer = run_script(f"exactFilter.finished(exactFilter.promised({run}))")
    assert "beyond 20" in answer["reason"] and "promises" not in answer


def test_full_batches_are_the_gaussian_mechanism_to_delta_1e_9(run_script):
    for mu in (0.01, 0.5, 5.0, 800.0):
        found = run_script(f"accountant.epsilonByLosses(1, {1 / mu}, 1, 1e-9)")
        exact = float(gaussian_epsilon(mu, 1e-9))
        assert exact <= found["epsilon"] <= exact * (1 + 3e-4)


@pytest.mark.slow
def test_a_coarser_grid_gives_a_larger_bound(run_script):
    for run in (RUNS[0], RUNS[1], RUNS[8]):
        call = f"grid => accountant.epsilonByLosses(...{json.dumps(run)}, grid)"
        fine, coarse = run_script(f"[undefined, 1 << 13].map({call})")
        assert (
            fine["epsilon"] <= coarse["epsilon"] * (1 + 1e-9)
            and coarse["epsilon"] <= 1.02 * fine["epsilon"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("run", [RUNS[1], RUNS[8]], ids=str)
def test_no_delta_of_a_profile_is_below_the_librarys_and_the_attacker_is_near_the_best(
    run_script, run
):
    rate, noise, steps, _ = run
    call = f"({rate}, {noise}, {steps})"
    profile = run_script(f"accountant.profileOf{call}")[::50]
    rates = [1e-4, 1e-2, 0.3]
    found = run_script(f"{rates}.map(accountant.attackerOf{call})")
    deltas = [
        compute_delta(sample_rate=rate, noise_multiplier=noise, steps=steps, epsilon=epsilon)
        for epsilon, _ in profile
    ]
    assert all(exact <= delta for exact, (_, delta) in zip(deltas, profile))
    for false, true in zip(rates, found):
        exact = min(
            min(delta + math.exp(epsilon) * false, 1 - math.exp(-epsilon) * (1 - delta - false))
            for delta, (epsilon, _) in zip(deltas, profile)
        )
        assert false < true <= 1.01 * exact


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [(0.46, 1.009, 17_353), (0.0902, 4.8213, 128_203), (0.0454, 2.51, 58_546)], ids=str
)
def test_where_nearly_all_is_lost_a_profile_is_not_below_the_librarys_either(run_script, run):
    """Far from where its grids are accurate, where rounding in the transform is large beside what
    is read.
    """
    for epsilon, delta in run_script(f"accountant.profileOf(...{json.dumps(run)})")[:80:20]:
        rate, noise, steps = run
        exact = compute_delta(
            sample_rate=rate, noise_multiplier=noise, steps=steps, epsilon=epsilon
        )
        assert exact <= delta


def test_against_full_batches_the_attacker_is_neyman_and_pearsons(run_script):
    rates = [1e-4, 1e-2, 0.3, 0.99]
    for mu in (0.1, 1.0, 3.0):
        found = run_script(f"{rates}.map(accountant.attackerOf(1, {1 / mu}, 1))")
        for false, true in zip(rates, found):
            exact = norm.cdf(norm.ppf(false) + mu)
            assert exact <= true <= 1.02 * exact


@pytest.mark.slow
def test_the_attacker_finds_nothing_beyond_delta_for_nothing_and_everything_for_everything(
    run_script,
):
    for rate, noise, steps, _ in ENDS:
        none, some, all_ = run_script(
            f"[0, 0.01, 1].map(accountant.attackerOf({rate}, {noise}, {steps}))"
        )
        assert 0 <= none <= some <= all_ == 1 and some >= 0.01


def test_axes_are_marked_at_round_places(run_script):
    assert run_script("chart.ticks(0, 1.03, false)") == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert run_script("chart.ticks(0, 9375, false)") == [0, 2000, 4000, 6000, 8000]
    assert run_script("chart.ticks(1e-4, 1, true)") == [1e-4, 1e-3, 1e-2, 0.1, 1]
    named = run_script("[0, 0.0001, 9000, 20000, 1.5e6, 4e8].map(chart.named)")
    assert named == ["0", "0.0001", "9000", "20k", "1.5M", "4e8"]
    for high in (1e-6, 0.9, 3.0, 5.6e6):
        marks = run_script(f"chart.ticks(0, {high}, false)")
        assert 3 <= len(marks) <= 8 and marks[0] == 0 and marks[-1] <= high * (1 + 1e-9)


def test_the_tail_of_the_normal_distribution_keeps_its_relative_accuracy(run_script):
    points = [-5.0, -1.0, 0.0, 0.5, 2.9, 3.1, 6.0, 12.0, 30.0]
    for x, found in zip(points, run_script(f"{points}.map(accountant.upperTail)")):
        assert math.isclose(found, 0.5 * math.erfc(x / math.sqrt(2)), rel_tol=1e-12)


@pytest.mark.slow
def test_the_page_answers_to_the_keyboard_and_refuses_what_is_out_of_range(page):
    (body,) = re.findall(
        r"```\{raw\} html\n(.*?)```",
        (ROOT / "book" / "calculator.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    body = re.sub(r"<script src=.*?</script>", "", body)
    page.set_content(f"<!DOCTYPE html><html lang=en><body>{body}</body></html>")
    for script in ("accountant.js", "planner.js", "filter.js", "chart.js", "calculator.js"):
        page.add_script_tag(path=STATIC / script)
    controls = page.locator("input").all()
    assert len(controls) == 13 and all(
        control.evaluate("c => c.labels.length || c.ariaLabel") for control in controls
    )
    said = page.locator("#calculator-said")
    assert said.get_attribute("aria-live") == "polite" and "at most 0.916" in said.text_content()
    page.focus("[name=norm-slider]")
    page.keyboard.press("End")
    text = "document.getElementById('{}-pld').textContent"
    page.wait_for_function(f"{text.format('one')} === {text.format('all')}")
    assert page.input_value("[name=norm]") == "1"
    page.fill("[name=noise]", "1")
    page.wait_for_function("Number(document.getElementById('all-rdp').textContent) > 2")
    exact = compute_epsilon(sample_rate=0.00853, noise_multiplier=1.0, steps=9375, delta=1e-5)
    assert exact <= float(page.text_content("#all-pld")) <= 1.01 * exact
    page.wait_for_function(
        "document.getElementById('calculator-pictures').ariaBusy === 'false'", timeout=120_000
    )
    assert page.locator("#picture-attacker polyline").count() == 3
    assert page.locator("#picture-steps polyline").count() == 4
    assert (
        exact <= float(page.text_content("#one-exact")) <= float(page.text_content("#adapting-rdp"))
    )
    assert "by the exact filter" in page.text_content("#picture-steps title")
    assert "every 293 steps" in page.text_content("#calculator-filter")
    for picture in ("#picture-steps", "#picture-attacker"):
        assert page.get_attribute(picture, "role") == "img" and "at most" in page.text_content(
            f"{picture} title"
        )
        assert "NaN" not in page.inner_html(picture)
    assert page.text_content("#all-pld") in page.text_content("#picture-steps title")
    assert float(page.text_content("#all-tpr-0").rstrip("%")) > 1 and page.text_content(
        "#all-tpr-2"
    ).endswith("%")
    for name, entered in (("n", "60000"), ("batch", "600"), ("epochs", "10")):
        page.fill(f"[name={name}]", entered)
    assert (page.input_value("[name=rate]"), page.input_value("[name=steps]")) == ("0.01", "1000")
    page.fill("[name=steps]", "9375")
    assert page.input_value("[name=epochs]") == ""
    page.fill("[name=rate]", "0.00853")
    page.wait_for_function("document.getElementById('calculator-pictures').ariaBusy === 'true'")
    page.wait_for_function(
        "document.getElementById('calculator-pictures').ariaBusy === 'false'", timeout=120_000
    )
    page.focus("#calculator-copy")
    page.evaluate("""() => Object.defineProperty(
        navigator, "clipboard", {value: {writeText: async text => { window.copied = text }}})""")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('calculator-copied').textContent === 'Copied.'")
    assert page.evaluate("window.copied") == page.text_content("#calculator-python")
    page.evaluate(
        "() => { navigator.clipboard.writeText = async () => { throw new Error('refused') } }"
    )
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.getElementById('calculator-copied').textContent.startsWith('Marked')"
    )
    assert "compute_epsilon" in page.evaluate("getSelection().toString()")
    page.fill("[name=noise]", "0.3")  # epsilons of many thousands, which e^epsilon cannot hold
    page.fill("[name=rate]", "1")
    page.wait_for_function("Number(document.getElementById('all-pld').textContent) > 10000")
    exact = compute_epsilon(sample_rate=1.0, noise_multiplier=0.3, steps=9375, delta=1e-5)
    shown = float(page.text_content("#all-pld"))
    assert exact <= shown <= 1.01 * exact and f"at most {shown:.0f}." in said.text_content()
    page.fill("[name=steps]", "1.5")
    page.wait_for_function(
        "document.getElementById('calculator-said').textContent.includes('whole number')"
    )
    page.fill("[name=steps]", "10")
    page.fill("[name=rate]", "2")
    page.wait_for_function(
        "document.getElementById('calculator-said').textContent.includes('Sample rate must lie')"
    )
    assert page.get_attribute("[name=rate]", "aria-invalid") == "true"
    # What was said before the wrong number is an answer to another question.
    cells = page.locator("#calculator .live").all_text_contents()
    cells += [
        page.text_content(f"#{name}")
        for name in ("all-error", "one-error", "exact-error", "calculator-python")
    ]
    assert (
        len(cells) == 16
        and set(cells) == {"\u2013"}
        and page.text_content("#calculator-filter") == ""
    )
    assert page.locator("#calculator svg :not(title)").count() == 0
    assert page.locator("#calculator svg title").all_text_contents() == ["\u2013"] * 2
    page.fill("[name=rate]", "0.01")
    page.wait_for_function("Number(document.getElementById('all-pld').textContent) > 0")
    page.wait_for_selector("#picture-steps polyline", state="attached", timeout=120_000)
    assert page.text_content("#calculator-python").startswith("from dpcompanion")
