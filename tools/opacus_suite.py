"""Opacus's own tests with `IndividualizedPrivacyEngine` in place of its `PrivacyEngine`.

    python tools/opacus_suite.py [--examples 3] [-k WORDS] [--write results/opacus_suite.json]

The tests are those that the installed version of Opacus brings.  An adapter gives `make_private` to the engine: equal
budgets that come out at the noise that a test asks for.  What cannot be asked of the engine that way (noise of zero,
batches without Poisson sampling) is `not offered`.
"""

import argparse
import collections
import contextlib
import fnmatch
import importlib
import json
import math
import pathlib
import sys
import unittest
import warnings

import torch

from dpcompanion import idp
from dpcompanion.data import import_torchvision
from dpcompanion.engine import IndividualizedPrivacyEngine

MODULES = (
    "privacy_engine_test",
    "privacy_engine_validation_test",
    "batch_memory_manager_test",
    "gradient_accumulation_test",
    "randomness_test",
    "accounting_noise_multiplier_test",
    "mixed_precision_test",
    "schedulers.grad_clip_scheduler_test",
    "schedulers.noise_scheduler_test",
)
NOT_OFFERED = "not offered"
# Tests that fail because of what is not offered, without asking the adapter for it. Those of texts put the examples on
# the second axis and do not say so.
DIFFERENT = {
    "*.test_deterministic_run": "runs that PyTorch's seed repeats",
    "*.PrivacyEngineSecureModeTest.test_global_seed": "runs that PyTorch's seed repeats",
    "*.PrivacyEngineText*.test_make_private_with_epsilon": "examples on another axis than batch_first says",
}


class NotOffered(Exception):
    pass


class Adapter(IndividualizedPrivacyEngine):
    """`make_private` in the words of Opacus: one budget for all, for a hundred epochs, with the noise that is asked."""

    def __init__(self, *, accountant="rdp", secure_mode=False):
        super().__init__(accountant="rdp", secure_mode=secure_mode)

    def make_private(
        self,
        *,
        module,
        optimizer,
        data_loader,
        noise_multiplier,
        max_grad_norm,
        poisson_sampling=True,
        rand_on_empty=False,
        clipping="flat",
        **options,
    ):
        if not poisson_sampling:
            raise NotOffered("batches without Poisson sampling")
        if not noise_multiplier:
            raise NotOffered("noise of zero")
        if rand_on_empty:
            raise NotOffered("random examples in place of none")
        if clipping == "adaptive" or options.pop("target_unclipped_quantile", None) is not None:
            raise NotOffered("adaptive clipping")
        n, steps = len(data_loader.dataset), 100 * len(data_loader)
        rate, delta = 1 / len(data_loader), 1e-5
        budget = float(
            idp.rdp_epsilons(
                torch.tensor([rate]).double(), torch.tensor([noise_multiplier]).double(), steps=steps, delta=delta
            )[0]
        )
        private = self.make_private_with_budgets(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            target_epsilons=[budget] * n,
            target_delta=delta,
            epochs=100,
            max_grad_norm=max_grad_norm,
            method="scale",
            clipping=clipping,
            **options,
        )
        # The budget says the noise but for its last bits, which tests of schedulers compare.
        if math.isclose(private[1].noise_multiplier, noise_multiplier, rel_tol=1e-9):
            private[1].noise_multiplier = noise_multiplier
        return private

    def make_private_with_epsilon(self, *, data_loader, target_epsilon, poisson_sampling=True, **options):
        if not poisson_sampling:
            raise NotOffered("batches without Poisson sampling")
        return self.make_private_with_budgets(
            data_loader=data_loader,
            method="scale",
            **options,
            target_epsilons=[target_epsilon] * len(data_loader.dataset),
        )


class Outcome(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.of = collections.OrderedDict()

    def _note(self, test, what, error=None):
        name = test.id() if not hasattr(test, "test_case") else test.test_case.id()
        if error and error[1] is not None and "NotOffered" in "".join(self._chain(error[1])):
            what = (NOT_OFFERED, next(line for line in self._chain(error[1]) if "NotOffered" in line).split(": ")[-1])
        elif error and isinstance(error[1], (AssertionError, ValueError)) and self._different(name):
            what = (NOT_OFFERED, self._different(name))
        elif error:
            what = ("fails", f"{type(error[1]).__name__}: {error[1]}"[:200])
        self.of[name.removeprefix("opacus.tests.")] = what

    def _different(self, name):
        return next((reason for pattern, reason in DIFFERENT.items() if fnmatch.fnmatch(name, pattern)), None)

    def _chain(self, error):
        while error is not None:
            yield f"{type(error).__name__}: {error}"
            error = error.__cause__ or error.__context__

    def addSuccess(self, test):
        self.of.setdefault(test.id().removeprefix("opacus.tests."), ("pass", ""))

    def addError(self, test, error):
        self._note(test, None, error)

    def addFailure(self, test, error):
        self._note(test, None, error)

    def addSubTest(self, test, subtest, error):
        if error:
            self._note(test, None, error)

    def addSkip(self, test, reason):
        self.of[test.id().removeprefix("opacus.tests.")] = ("skipped by Opacus", reason)


def run(words=(), examples=3):
    """{test: (what came out, why)} for the tests whose names hold one of the words, or all."""
    from hypothesis import settings

    settings.register_profile("few", max_examples=examples, deadline=None, derandomize=True, database=None)
    settings.load_profile("few")
    with contextlib.suppress(ImportError):
        import_torchvision()
    suite = unittest.TestSuite()
    for name in MODULES:
        module = importlib.import_module(f"opacus.tests.{name}")
        if not hasattr(module, "PrivacyEngine"):
            continue
        module.PrivacyEngine = Adapter
        for tests in unittest.defaultTestLoader.loadTestsFromModule(module):
            for test in tests:
                if not words or any(word in test.id() for word in words):
                    suite.addTest(test)
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite.run(outcome)
    return outcome.of


def write(path, version, found):
    """Add outcomes to the file: {"opacus": its version, "totals": ..., "tests": {name: [outcome, reason]}}."""
    tests = {}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        tests = before["tests"] if before["opacus"] == version else {}
    tests = dict(sorted({**tests, **{name: list(what) for name, what in found.items()}}.items()))
    totals = dict(sorted(collections.Counter(outcome for outcome, _ in tests.values()).items()))
    path.write_text(
        json.dumps({"opacus": version, "totals": totals, "tests": tests}, indent=1) + "\n", encoding="utf-8"
    )


def main():
    import opacus

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--examples", type=int, default=3, help="examples that hypothesis tries in each of its tests")
    parser.add_argument("-k", nargs="*", default=(), help="run the tests whose names hold one of these words")
    parser.add_argument("--write", type=pathlib.Path, help="the file that the outcomes are added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.k, options.examples)
    for name, (outcome, reason) in found.items():
        print(f"{outcome:18} {name}  {reason}")
    totals = collections.Counter(outcome for outcome, _ in found.values())
    print(dict(totals))
    if options.write:
        write(options.write, opacus.__version__, found)
    return int(totals["fails"] > 0)


if __name__ == "__main__":
    sys.exit(main())
