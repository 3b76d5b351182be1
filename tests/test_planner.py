"""The planner's script against the library, by node, and its page in a headless Chromium."""

import json
import math
import re
from pathlib import Path

import pytest

from dpcompanion.accounting import (
    best_true_positive_rate,
    compute_delta,
    compute_epsilon,
    find_noise_multiplier,
)

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"


def noise_for(run_script, shape, delta, measure, limit):
    run = json.dumps({**shape, "delta": delta, "measure": measure, "limit": limit})
    return run_script(f"planner.finished(planner.noiseFor({run}))")


@pytest.mark.slow
@pytest.mark.parametrize("rate, steps, delta, limit", [(0.01, 100, 1e-5, 1.0), (0.2, 5, 1e-6, 3.0)])
def test_noise_for_an_epsilon_is_enough_by_the_library_and_hardly_more(
    run_script, rate, steps, delta, limit
):
    noise = noise_for(run_script, {"rate": rate, "steps": steps}, delta, "epsilon", limit)
    least = find_noise_multiplier(
        target_epsilon=limit, target_delta=delta, sample_rate=rate, steps=steps
    )
    assert least <= noise <= 1.02 * least
    odds = noise_for(run_script, {"rate": rate, "steps": steps}, delta, "odds", math.exp(limit))
    assert abs(odds / noise - 1) < 0.01


@pytest.mark.slow
def test_noise_for_an_attacker_keeps_the_attacker_below_the_limit_by_the_library(run_script):
    run = {"sample_rate": 0.01, "steps": 500}
    found = noise_for(run_script, {"rate": 0.01, "steps": 500}, 1e-5, "found", 0.01)
    exact = float(best_true_positive_rate(noise_multiplier=found, **run, false_positive_rate=0.001))
    assert 0.009 < exact <= 0.01
    advantage = noise_for(run_script, {"rate": 0.01, "steps": 500}, 1e-5, "advantage", 0.1)
    assert 0.095 < compute_delta(noise_multiplier=advantage, epsilon=0.0, **run) <= 0.1


@pytest.mark.slow
def test_what_the_planner_says_of_a_plan_is_no_less_than_the_library_says(run_script):
    said = run_script("planner.outcome({rate: 0.01, steps: 500, delta: 1e-5, noise: 1})")
    run = {"sample_rate": 0.01, "steps": 500, "noise_multiplier": 1.0}
    exact = compute_epsilon(**run, delta=1e-5)
    assert exact <= said["epsilon"] <= 1.01 * exact and said["odds"] == pytest.approx(
        math.exp(said["epsilon"])
    )
    assert exact < said["byRenyi"] and compute_delta(**run, epsilon=0.0) <= said["advantage"]
    assert run_script("[planner.shown(2.0001), planner.shown(2), planner.shown(0.012345)]") == [
        "2.01",
        "2",
        "0.0124",
    ]


def test_limits_that_guessing_reaches_and_shapes_of_runs(run_script):
    shape = {"rate": 0.01, "steps": 500}
    assert noise_for(run_script, shape, 1e-5, "found", 0.001) is None  # NaN
    assert noise_for(run_script, shape, 1e-5, "odds", 1.0) is None
    assert run_script("planner.runOf(60000, 512, 80)") == {"rate": 512 / 60000, "steps": 9375}
    assert run_script("planner.runOf(1000, 300, 1).steps") == 4


def test_delta_is_proposed_as_a_power_of_ten_at_or_below_a_tenth_of_one_over_n(run_script):
    sizes = [2, 9, 1000, 9_999, 10_000, 10_001, 60_000, 100_000_000]
    proposed = run_script(f"{json.dumps(sizes)}.map(planner.deltaFor)")
    assert proposed == [0.01, 0.01, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6, 1e-9]
    assert all(0.01 < 10 * n * delta <= 1 for n, delta in zip(sizes[1:], proposed[1:]))


@pytest.mark.parametrize(
    "unit, whom",
    [pytest.param("row", "one row", marks=pytest.mark.slow), ("person", "all rows of that person")],
)
def test_the_program_trains_and_its_epsilon_is_the_one_of_the_paragraph(
    run_script, capsys, unit, whom
):
    plan = {"n": 1000, "batch": 10, "steps": 20, "delta": 1e-4, "noise": 1.0, "unit": unit}
    program, paragraph = run_script(
        f"(plan => [planner.code(plan), planner.paragraph({{...plan, epsilon: "
        f"planner.outcome({{...plan, rate: 0.01}}).epsilon}})])({json.dumps(plan)})"
    )
    exec(program, {})  # the page shows it to be run
    printed = capsys.readouterr().out
    shown = float(re.search(r"\(([\d.]+), 0\.0001\)", paragraph)[1])
    assert 0.98 * shown <= float(re.search(r"Epsilon ([\d.]+\d)", printed)[1]) <= 1.001 * shown
    assert "zero-out" in printed and "zero-out" in paragraph and whom in paragraph
    assert f"one {unit}" in printed and "floats" in printed and "exact arithmetic" in paragraph
    assert max(map(len, program.splitlines())) <= 76


@pytest.mark.slow
def test_the_worked_example_is_what_the_planner_gives(run_script):
    text = (ROOT / "book" / "choose-epsilon.md").read_text(encoding="utf-8")
    example = text.partition("## A worked example")[2].partition("\n## ")[0]
    run, strict = run_script(
        "[[1.29, 1e-6], [1.29, 1e-5]].map(([noise, delta]) => "
        "planner.outcome({...planner.runOf(60000, 512, 80), noise, delta}))"
    )
    assert 0.0098 < run["found"] <= 0.01  # noise multipliers have three digits
    for epsilon in (run["epsilon"], strict["epsilon"]):
        assert run_script(f"planner.shown({epsilon})") in example


@pytest.mark.slow
def test_the_page_plans_and_says_what_is_wrong(chromium, browser_check):
    (body,) = re.findall(
        r"```\{raw\} html\n(.*?)```",
        (ROOT / "book" / "choose-epsilon.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    body = re.sub(r"<script src=.*?</script>", "", body)
    with browser_check.browser(chromium) as context:
        page = context.new_page()
        page.set_content(f"<!DOCTYPE html><html lang=en><body>{body}</body></html>")
        for script in ("accountant.js", "planner.js"):
            page.add_script_tag(path=STATIC / script)
        assert all(
            page.locator(":is(input, select)").evaluate_all(
                "all => all.map(c => c.labels.length === 1)"
            )
        )
        done = "document.getElementById('planner-said').textContent.startsWith('Noise multiplier')"
        page.wait_for_function(done, timeout=120_000)
        assert float(page.text_content("#plan-found").rstrip("%")) <= 1
        assert page.input_value("[name=delta]") == "0.000001"
        page.fill("[name=n]", "600000")
        assert page.input_value("[name=delta]") == "1e-7"
        page.fill("[name=delta]", "0.000001")
        page.fill("[name=n]", "60000")
        assert page.input_value("[name=delta]") == "0.000001"
        page.select_option("[name=measure]", "epsilon")
        page.select_option("[name=unit]", "person")
        page.wait_for_function(
            f"{done} && Number(document.getElementById('plan-epsilon').textContent) <= 3",
            timeout=120_000,
        )
        assert page.text_content("#plan-n-label") == "People" and "all rows" in page.text_content(
            "#plan-paragraph"
        )
        page.fill("[name=batch]", "70000")
        page.wait_for_function(
            "document.getElementById('planner-said').textContent.includes('must lie between')"
        )
        assert (
            page.text_content("#plan-code") == ""
            and page.get_attribute("[name=batch]", "aria-invalid") == "true"
        )
