"""Deliberate faults: the short run of the tests must catch every one.

Each fault replaces one exact text in one file of the package, such as a noise of half the size or a
direction of a divergence that is forgotten, and names the tests that must then fail. `python -m
tests.mutations` (part of `make prove`) first runs these tests without a fault; then it applies each
fault to a copy of the package in a temporary folder, runs the named tests against that copy, and
says for each fault whether it was caught, by which test and in how much processor time. The exit
status is 1 unless every fault is caught.

    python -m tests.mutations --jobs 2
    python -m tests.mutations --only noise      # faults whose names contain a text

Change a line that a fault replaces, and `tests/test_mutations.py` asks for the fault to be written
again.

What takes most of the time is to import PyTorch and its like: one process does it and is forked for
each fault, before it has imported anything of the package.
"""

import argparse
import contextlib
import dataclasses
import importlib
import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What tests import, besides the package; what is not installed is left to the tests that need it.
OTHERS = (
    "torch",
    "scipy.stats",
    "scipy.optimize",
    "scipy.integrate",
    "mpmath",
    "hypothesis.strategies",
    "pytest",
    "_pytest.doctest",
    "opacus",
    "dp_accounting.pld.privacy_loss_distribution",
    "dp_accounting.rdp",
    "sklearn.metrics",
    "joblib",
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One faulty text in place of another, and the tests that must fail because of it."""

    name: str
    file: str
    text: str
    faulty: str
    tests: tuple

    def found(self):
        """How often the text stands in its file, which should be once."""
        return (ROOT / "dpcompanion" / self.file).read_text(encoding="utf-8").count(self.text)

    def apply(self, package):
        """Write the faulty text into a copy of the package."""
        path = package / self.file
        path.write_text(
            path.read_text(encoding="utf-8").replace(self.text, self.faulty), encoding="utf-8"
        )


def fault(name, file, text, faulty, *tests):
    return Fault(name, file, text, faulty, tuple(f"tests/{test}" for test in tests))


FAULTS = (
    # Accounting
    fault(
        "RDP at integer orders leaves out its last term",
        "accounting/rdp.py",
        "k = torch.arange(2, int(a.max()) + 1, dtype",
        "k = torch.arange(2, int(a.max()), dtype",
        "accounting/test_rdp.py::test_integer_orders_agree_with_the_binomial_sum_in_high_precision",
    ),
    fault(
        "RDP orders end at 64",
        "accounting/rdp.py",
        "64 * 16 ** (j / 56)) for j in range(57)",
        "64 * 16 ** (j / 56)) for j in range(1)",
        "accounting/test_runs.py::test_divergences_of_high_orders_are_near_the_loss_distribution_where_noise_is_large",
    ),
    fault(
        "the RDP of a full batch has a factor of two",
        "accounting/rdp.py",
        "full_batch = alphas / (2 * sigma",
        "full_batch = alphas / (4 * sigma",
        "accounting/test_rdp.py::test_a_full_batch_is_the_gaussian_mechanism",
    ),
    fault(
        "the density ratio has sample rate 1 - q",
        "accounting/rdp.py",
        "small = torch.log1p(q * torch.expm1(u.clamp(max=30)))",
        "small = torch.log1p((1 - q) * torch.expm1(u.clamp(max=30)))",
        "accounting/test_rdp.py::test_fractional_orders_agree_with_an_integral_in_high_precision",
    ),
    fault(
        "RDP becomes epsilon by a division by the order",
        "accounting/conversions.py",
        "(log_inverse_delta - torch.log(orders)) / (orders - 1)",
        "(log_inverse_delta - torch.log(orders)) / orders",
        "accounting/test_conversions.py::test_the_conversion_of_balle_et_al_is_that_of_dp_accounting",
    ),
    fault(
        "epsilon by RDP is composed for one step less",
        "accounting/runs.py",
        "in rdp_to_epsilon(rdp, orders, delta))",
        "in rdp_to_epsilon(rdp * (1 - 1 / steps), orders, delta))",
        "accounting/test_pld.py::test_the_reference_point",
    ),
    fault(
        "the loss distribution is composed for one step less",
        "accounting/pld.py",
        "first, masses = convolve(first, masses, steps, start",
        "first, masses = convolve(first, masses, steps - 1, start",
        "accounting/test_pld.py::test_two_steps_agree_with_quadrature",
    ),
    fault(
        "the grid of losses rounds down",
        "accounting/loss.py",
        ".index_add_(0, index + 1, upper_mass)",
        ".index_add_(0, index, upper_mass)",
        "accounting/test_pld.py::test_the_whole_curve_of_one_step_is_an_upper_bound_wherever_it_was_composed",
    ),
    fault(
        "masses are shared for Q as for P",
        "accounting/loss.py",
        "(torch.expm1(-(loss - cell[:, None] * interval)) / math.expm1(-interval))",
        "(torch.expm1(loss - cell[:, None] * interval) / math.expm1(interval))",
        "accounting/test_pld.py::test_a_curve_on_a_grid_far_coarser_than_its_losses_is_an_upper_bound_still",
    ),
    fault(
        "what a window leaves out is not added to delta",
        "accounting/pld.py",
        "log_capped=step.log_capped + math.log(steps),",
        "log_capped=-math.inf,",
        "accounting/test_pld.py::test_one_step_is_never_below_the_closed_form_and_close_to_it",
    ),
    fault(
        "calibration returns the end that misses the target",
        "accounting/search.py",
        "return good[0]\n",
        "return bad[0]\n",
        "accounting/test_search.py::test_a_crossing_is_found_from_anywhere_on_the_side_that_meets",
    ),
    fault(
        "the ratio of a Gaussian mechanism is rounded up",
        "accounting/gaussian.py",
        "torch.exp(found) * (1 - 1e-12)",
        "torch.exp(found) * (1 + 1e-12)",
        "accounting/test_gaussian.py::test_the_largest_ratio_meets_delta_and_nothing_larger_does",
    ),
    # Individual accounts
    fault(
        "norms are rounded down to a level",
        "individual/accountant.py",
        "level = torch.searchsorted(self._levels, share).clamp(max=len(self._levels) - 1)",
        "level = (torch.searchsorted(self._levels, share, right=True) - 1).clamp(min=0)",
        "test_individual.py::test_rounding_is_upwards_and_by_at_most_one_level",
    ),
    fault(
        "a norm in single precision is charged as it reads",
        "individual/norm_history.py",
        "share = share * margin(norms.dtype)",
        "share = share * 1",
        "test_individual.py::test_norms_in_single_precision_are_rounded_up",
    ),
    fault(
        "a running estimate charges the new norm for the steps before",
        "training/tracking.py",
        "self.norms[examples], steps=",
        "norms, steps=",
        "training/test_tracking.py::test_running_estimates_charge_as_if_everybody_were_charged_at_every_step",
    ),
    # Filters
    fault(
        "a Rényi filter lets the last step through",
        "filters/renyi.py",
        "(after <= self._budgets).all(dim=1)",
        "(self._spent <= self._budgets).all(dim=1)",
        "filters/test_renyi.py::test_no_budget_is_exceeded_and_inactive_examples_stay_inactive",
    ),
    fault(
        "an exact filter pays for a level below the one it serves",
        "filters/exact.py",
        "self._spent = self._spent + self._cost_of(index) * blocks",
        "self._spent = self._spent + self._cost_of((index - 1).clamp(min=0)) * blocks",
        "filters/test_exact.py::test_levels_are_recorded_at_what_they_cost_and_refused_where_they_cannot_be_paid",
    ),
    fault(
        "the game's adversary only adds",
        "filters/game.py",
        "for direction in (DIRECTIONS if sample_rate < 1 else DIRECTIONS[:1])",
        "for direction in DIRECTIONS[1:]",
        "filters/test_game.py::test_one_level_is_the_account_by_loss_distributions",
    ),
    fault(
        "the game's adversary takes the least of what is left",
        "filters/game.py",
        "now = np.maximum(last, values.max(axis=0))",
        "now = np.maximum(last, values.min(axis=0))",
        "filters/test_game.py::test_on_short_games_it_is_the_best_of_all_strategies",
    ),
    # Individualized budgets
    fault(
        "sample and scale: clip norms rise with the noise",
        "idp/parameters.py",
        "noises[groups.which], (max_grad_norm * pooled / noises)[groups.which]\n    )",
        "noises[groups.which], (max_grad_norm * noises / pooled)[groups.which]\n    )",
        "test_idp.py::test_scale_spends_each_budget_and_keeps_the_mean_clip_norm",
    ),
    fault(
        "many budgets are rounded up",
        "idp/groups.py",
        "torch.minimum(\n        first * torch.exp(_APART * torch.floor(torch.log(budgets / first) "
        "/ _APART)), budgets\n    )",
        "first * torch.exp(_APART * torch.ceil(torch.log(budgets / first) / _APART))",
        "test_idp.py::test_a_million_budgets_are_rounded_down_to_few",
    ),
    # The engine
    fault(
        "an engine's epsilon is the mean of the examples'",
        "engine/account.py",
        "float(self.get_epsilons(delta).max())",
        "float(self.get_epsilons(delta).mean())",
        "engine/test_private.py::test_every_example_spends_its_own_budget",
        "engine/test_private.py::test_everybodys_epsilon_and_an_examples_are_by_one_accountant",
    ),
    fault(
        "the engine clips without regard to the bias",
        "engine/optimizers.py",
        "norms = added_up(squares).sqrt()",
        "norms = added_up([s for s, g in zip(squares, samples) if g.ndim > 2]).sqrt()",
        "engine/test_private.py::test_every_gradient_is_clipped_to_its_own_norm_and_the_sum_is_divided_by_a_public_number",
    ),
    fault(
        "the engine lets a NaN gradient through",
        "engine/optimizers.py",
        "            if unfit:\n",
        "            if not unfit:\n",
        "engine/test_private.py::test_a_gradient_that_is_not_finite_contributes_nothing_and_is_counted",
    ),
    fault(
        "the engine adds noise once per two steps",
        "engine/optimizers.py",
        "noisy(sums, std, self.generator, self.ranks.released)",
        "noisy(sums, (1 - self._accountant.steps % 2) * std, self.generator, self.ranks.released)",
        "engine/test_private.py::test_noise_has_the_deviation_that_was_told_and_empty_batches_take_a_step_of_noise",
    ),
    fault(
        "the engine lets a loop leave out one empty batch",
        "engine/optimizers.py",
        "if self.draws.passed_over > 0:",
        "if self.draws.passed_over > 1:",
        "engine/test_private.py::test_a_single_empty_draw_that_is_left_out_is_refused",
    ),
    fault(
        "a batch may be used twice",
        "engine/optimizers.py",
        "if self._ended or (batch and batch[0] <= self._taken):",
        "if self._ended and not batch:",
        "engine/test_private.py::test_a_batch_serves_one_step_only",
    ),
    fault(
        "a person's first row stands for all of them in the engine",
        "engine/loading.py",
        "for place in range(max(sizes, default=0)):",
        "for place in range(min(1, max(sizes, default=0))):",
        "engine/test_people.py::test_a_person_is_clipped_once_to_the_sum_over_at_most_k_of_their_rows",
    ),
    fault(
        "each rank of the engine takes the whole draw",
        "engine/loading.py",
        "self.last = self.whole[self._share(len(self.whole))]",
        "self.last = self.whole[:]",
        "training/test_distributed.py::test_the_engine_on_two_ranks_ends_where_it_does_on_one",
    ),
    # Training
    fault(
        "noise has half its standard deviation",
        "mechanism/noise.py",
        "noise = torch.randn(shape, dtype=torch.float64, generator=generator, "
        "device=generator.device)",
        "noise = 0.5 * torch.randn(shape, dtype=torch.float64, generator=generator, "
        "device=generator.device)",
        "mechanism/test_sampling.py::test_noise_has_the_promised_distribution",
    ),
    fault(
        "noise and draws have one seed",
        "mechanism/noise.py",
        "derive_key(seed, name) for name in STREAMS",
        "derive_key(seed, STREAMS[0]) for name in STREAMS",
        "mechanism/test_sampling.py::test_streams_of_one_seed_differ_and_repeat",
    ),
    fault(
        "batches have a fixed size",
        "mechanism/sampling.py",
        "self._uniforms(count, self.n) < self.sample_rate",
        "self._uniforms(count, self.n).argsort(1).argsort(1) < (self.n * self.sample_rate).round()",
        "mechanism/test_sampling.py::test_examples_and_steps_are_independent_so_that_batch_sizes_are_binomial",
    ),
    fault(
        "coins of a cipher come up at 1 - q",
        "mechanism/secure.py",
        "up = sure | (words < whole)",
        "up = sure | (words >= whole)",
        "mechanism/test_secure.py::test_coins_come_up_as_often_as_they_should",
    ),
    fault(
        "the sum is divided by the realised batch size",
        "training/loop.py",
        "/ cast(float, plan.expected_batch_size)",
        "/ max(1, len(drawn))",
        "training/test_loop.py::test_a_step_is_the_noisy_clipped_sum_over_the_public_constant",
    ),
    fault(
        "an empty batch has no noise",
        "training/loop.py",
        'lambda total: plan.noisy(total, self.generators["noise"])',
        'lambda total: plan.noisy(total, self.generators["noise"]) if len(drawn) else total',
        "training/test_loop.py::test_an_empty_draw_is_a_step_of_noise_alone_with_the_promised_spread",
    ),
    fault(
        "the sums of ranks are not added up",
        "training/distributed.py",
        "self._call(dist.reduce, there, 0, group=group)",
        "pass",
        "training/test_distributed.py::test_two_ranks_end_where_one_process_does",
    ),
    fault(
        "ranks have weights of their own",
        "training/distributed.py",
        "self._call(dist.broadcast, there, 0, group=group)",
        "there = there if self.first else noisy(there)",
        "training/test_distributed.py::test_two_ranks_end_where_one_process_does",
    ),
    fault(
        "a checkpoint lets noise be used again",
        "training/loop.py",
        "self.generators[name].set_state(state)",
        'self.generators[name].set_state(state) if name == "sampling" else None',
        "training/test_loop.py::test_a_run_that_was_cut_off_ends_bit_for_bit_where_it_would_have_ended",
    ),
    fault(
        "an example counts twice where a batch is cut",
        "gradients/clipping.py",
        "slice(start, start + size) for start",
        "slice(max(0, start - 1), start + size) for start",
        "training/test_loop.py::test_physical_batches_and_methods_give_the_same_run",
    ),
    fault(
        "the bias is not clipped",
        "gradients/layers.py",
        "total.baddbmm_(factors[..., where].to(dtype), part",
        "total.baddbmm_(factors[..., where].to(dtype) ** (name != 'bias'), part",
        "gradients/test_clipping.py::test_clipping_equals_explicit_gradients_one_by_one",
    ),
    fault(
        "norms leave out the bias",
        "gradients/layers.py",
        "return self.weight_squares() + self.bias_squares()",
        "return self.weight_squares()",
        "gradients/test_clipping.py::test_clipping_equals_explicit_gradients_one_by_one",
    ),
    fault(
        "a gradient may be a hair longer than its clip norm",
        "gradients/sums.py",
        "norms * margin(norms.dtype)",
        "norms / margin(norms.dtype)",
        "gradients/test_clipping.py::test_in_float32_no_clipped_gradient_is_longer_than_the_clip_norm",
    ),
    fault(
        "floats have all of delta, and the account as well",
        "mechanism/floats.py",
        "found = float(epsilon_at(delta * (1 - part)))",
        "found = float(epsilon_at(delta))",
        "mechanism/test_floats.py::test_the_distance_of_the_sampler_is_paid_for",
    ),
    fault(
        "a seed counts with 32 bits",
        "seeds.py",
        'seed.to_bytes((seed.bit_length() + 7) // 8, "little")',
        '(seed % 2**32).to_bytes(4, "little")',
        "test_seeds.py::test_every_bit_of_a_seed_counts",
        "mechanism/test_sampling.py::test_seeds_that_agree_in_32_bits_have_different_batches_and_noise",
    ),
    # One example, output perturbation, releases
    fault(
        "an added example is accounted for as a removed one",
        "per_instance/steps.py",
        'if direction == "remove":\n        found = rdp',
        "if direction:\n        found = rdp",
        "per_instance/test_steps.py::test_the_other_direction_agrees_with_quadrature",
    ),
    fault(
        "the orders of theorem 3.3 are the printed ones",
        "per_instance/composition.py",
        'fixed = 1.0 if recursion == "proof"',
        'fixed = 1.0 if recursion != "proof"',
        "per_instance/test_composition.py::test_the_orders_are_those_of_the_recursion",
    ),
    fault(
        "a sensitivity has a factor of two less",
        "output_perturbation/bounds.py",
        "2 * passes * lipschitz * learning_rate / batch_size",
        "passes * lipschitz * learning_rate / batch_size",
        "output_perturbation/test_bounds.py::test_the_bound_rounds_passes_up_and_the_papers_value_does_not",
    ),
    fault(
        "an empirical sensitivity is the mean of the pairs'",
        "output_perturbation/bounds.py",
        "return float(pairwise_sensitivity(weights).max())",
        "return float(pairwise_sensitivity(weights).mean())",
        "output_perturbation/test_bounds.py::test_pairwise_sensitivity_is_the_distance_of_every_pair_under_one_seed",
    ),
    fault(
        "parts of a release share delta, and not the noise",
        "release.py",
        "noise_ratio(epsilon, delta) / math.sqrt(parts)",
        "noise_ratio(epsilon, delta) / parts**0.25",
        "test_release.py::test_releases_that_split_a_budget_compose_to_it",
    ),
    fault(
        "a vote moves one class",
        "pate.py",
        "noise_std = math.sqrt(2 * queries) / mean",
        "noise_std = math.sqrt(queries) / mean",
        "test_pate.py::test_moving_a_groups_vote_changes_the_label_by_no_more_than_is_said",
        "test_pate.py::test_queries_cost_what_as_many_gaussian_mechanisms_cost",
    ),
    # Attacks and audits
    fault(
        "two rates are bounded with the confidence of one",
        "attacks/rates.py",
        "each = (1 + confidence) / 2\n    bounds",
        "each = confidence\n    bounds",
        "test_attacks.py::test_the_two_rates_of_a_bound_share_its_confidence",
    ),
    fault(
        "an audit forgets delta",
        "audit/bounds.py",
        "+ 2 * m * delta * (window / np.arange(1, v + 1)).max()",
        "+ 0 * m * delta * (window / np.arange(1, v + 1)).max()",
        "test_audit.py::test_a_mechanism_that_reveals_all_with_probability_delta_is_rarely_refuted",
    ),
    # The reproduction
    fault(
        "a number matches within three deviations",
        "reproduction/published.py",
        "min(2 * math.hypot",
        "min(3 * math.hypot",
        "reproduction/test_published.py::test_the_verdict_follows_the_rule_of_two_standard_deviations_then_ten_percent",
    ),
    fault(
        "a deviation has the other sign",
        "reproduction/comparison.py",
        "percent = 100 * (ours - paper) / abs(paper)",
        "percent = 100 * (paper - ours) / abs(paper)",
        "reproduction/test_comparison.py::test_lists_become_one_row_for_each_entry",
    ),
    fault(
        "an interval has one tail of its confidence",
        "reproduction/intervals.py",
        "reach = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * spread",
        "reach = float(special.stdtrit(n - 1, confidence)) * spread",
        "reproduction/test_intervals.py::test_means_and_differences_are_those_of_student_and_welch",
    ),
    fault(
        "what is undecided holds",
        "reproduction/intervals.py",
        'return "holds" if self.low > limit else "fails" if self.high <= limit else "undecided"',
        'return "holds" if self.high > limit else "fails"',
        "reproduction/test_intervals.py::test_an_outcome_is_decided_where_the_whole_interval_lies_on_one_side",
    ),
)


class Attempt:
    """The named tests in a process of their own, against a copy of the package with a fault, or
    with None.
    """

    def __init__(self, fault, tests):
        self.fault, self.tests = fault, tests
        self._folder = tempfile.TemporaryDirectory(prefix="mutation-")
        self.folder = Path(self._folder.name)
        for path in ROOT.iterdir():
            if path.name != "dpcompanion" and not path.name.startswith((".venv", ".git", "_build")):
                (self.folder / path.name).symlink_to(path)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "dpcompanion", self.folder / "dpcompanion", ignore=ignored)
        if fault is not None:
            fault.apply(self.folder / "dpcompanion")
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            self._run()

    def _run(self):
        """In the child: never returns."""
        status = 70
        try:
            said = os.open(self.folder / "said.txt", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(said, 1), os.dup2(said, 2)
            os.chdir(self.folder)
            os.environ |= {
                "PYTHONPATH": str(self.folder),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HYPOTHESIS_PROFILE": "unshrunk",
            }
            sys.path[:] = [
                str(self.folder),
                *(path for path in sys.path if Path(path or ".").resolve() != ROOT),
            ]
            sys.dont_write_bytecode = True
            sys.modules.pop("tests", None)
            import pytest

            import dpcompanion

            assert Path(dpcompanion.__file__).is_relative_to(self.folder), dpcompanion.__file__
            options = [
                "-x",
                "-m",
                "not slow",
                "--tb=no",
                "-rfE",
                "-p",
                "no:cacheprovider",
                f"--rootdir={self.folder}",
            ]
            status = int(pytest.main([*options, *dict.fromkeys(self.tests)]))
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)

    def end(self, status, used):
        """(whether the tests failed as they should, what to say of it, processor seconds)."""
        said = (self.folder / "said.txt").read_text(encoding="utf-8", errors="replace")
        self._folder.cleanup()
        code, seconds = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", said, re.MULTILINE)
        if self.fault is None:
            return (
                code == 0,
                f"pytest ended with {code}\n{said[-2000:]}" if code else "all pass",
                seconds,
            )
        if code == 1 and failed:
            return True, f"caught by {failed[0]}", seconds
        if code == 0:
            return False, f"NOT caught by {', '.join(self.tests)}", seconds
        return False, f"NOT tried, as pytest ended with {code}\n{said[-2000:]}", seconds


def attempts(faults, jobs):
    """(fault, caught, words, seconds) of each fault, several at a time, as they end."""
    waiting, running = list(reversed(faults)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop()
            one = Attempt(fault, fault.tests)
            running[one.process] = one
        process, status, used = os.wait4(-1, 0)
        if process in running:
            one = running.pop(process)
            yield one.fault, *one.end(status, used)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults tried at a time"
    )
    parser.add_argument("--only", default="", help="faults whose names contain this text")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if options.only in fault.name]
    lost = [fault for fault in faults if fault.found() != 1]
    for fault in lost:
        print(
            f"{fault.name}: its text stands {fault.found()} times in {fault.file}, not once: write "
            "it again"
        )
    if lost or not faults:
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"  # no threads before a fork
    for name in OTHERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    clean = Attempt(None, [test for fault in faults for test in fault.tests])
    sound, words, total = clean.end(*os.wait4(clean.process, 0)[1:])
    print(f"without a fault: {words} ({total:.1f} s of processor time)", flush=True)
    if not sound:
        return 1
    missed = 0
    for fault, caught, words, seconds in attempts(faults, max(1, options.jobs)):
        print(f"{fault.name}: {words} ({seconds:.1f} s)", flush=True)
        missed, total = missed + (not caught), total + seconds
    print(
        f"{len(faults) - missed} of {len(faults)} faults caught, in {total:.0f} s of processor time"
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
