"""Opacus's own tests with `IndividualizedPrivacyEngine` in place of its `PrivacyEngine`.

    python -m benchmarks.opacus_suite [--write] [options of pytest, such as -k WORDS]

The tests are those that the installed version of Opacus brings, run by pytest; Hypothesis tries
three examples in each of its own. An adapter gives `make_private` to the engine: equal budgets that
come out at the noise that a test asks for. What cannot be asked of the engine that way (noise of
zero, batches without Poisson sampling) is `not offered`.
"""

import argparse
import collections
import contextlib
import fnmatch
import json
import math
import os
import pathlib
import sys
import unittest

import hypothesis
import opacus
import pytest
import torch

from dpcompanion import idp
from dpcompanion.data import import_torchvision
from dpcompanion.engine import IndividualizedPrivacyEngine

FILE = pathlib.Path(__file__).with_suffix(".json")
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
# Tests that fail because of what is not offered, without asking the adapter for it. Those of texts
# put the examples on the second axis and do not say so.
DIFFERENT = {
    "*.test_deterministic_run": "runs that PyTorch's seed repeats",
    "*.PrivacyEngineSecureModeTest.test_global_seed": "runs that PyTorch's seed repeats",
    "*.PrivacyEngineText*.test_make_private_with_epsilon": "examples on another axis than "
    "batch_first says",
}


class NotOffered(Exception):
    pass


class Adapter(IndividualizedPrivacyEngine):
    """`make_private` in the words of Opacus: one budget for all, for a hundred epochs, with the
    noise that is asked.
    """

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
                torch.tensor([rate]).double(),
                torch.tensor([noise_multiplier]).double(),
                steps=steps,
                delta=delta,
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

    def make_private_with_epsilon(
        self, *, data_loader, target_epsilon, poisson_sampling=True, **options
    ):
        if not poisson_sampling:
            raise NotOffered("batches without Poisson sampling")
        return self.make_private_with_budgets(
            data_loader=data_loader,
            method="scale",
            **options,
            target_epsilons=[target_epsilon] * len(data_loader.dataset),
        )


class Suite:
    """The plug-in of pytest: the adapter in every module, and {test: (what came out, why)}."""

    def __init__(self):
        self.of = {}

    def pytest_collection_modifyitems(self, items):
        for module in {item.module for item in items}:
            if hasattr(module, "PrivacyEngine"):
                module.PrivacyEngine = Adapter
        items[:] = [item for item in items if hasattr(item.module, "PrivacyEngine")]

    def pytest_runtest_makereport(self, item, call):
        name = ".".join(
            [item.module.__name__.removeprefix("opacus.tests."), item.cls.__name__, item.name]
        )
        error = call.excinfo and call.excinfo.value
        if error is None:
            if call.when == "call":
                self.of.setdefault(name, ("pass", ""))
        elif isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
            self.of[name] = ("skipped by Opacus", str(error))
        elif refused := next((one for one in chain(error) if isinstance(one, NotOffered)), None):
            self.of[name] = (NOT_OFFERED, str(refused))
        elif isinstance(error, (AssertionError, ValueError)) and (reason := different(name)):
            self.of[name] = (NOT_OFFERED, reason)
        else:
            self.of[name] = ("fails", f"{type(error).__name__}: {error}"[:200])


def different(name):
    return next(
        (reason for pattern, reason in DIFFERENT.items() if fnmatch.fnmatch(f".{name}", pattern)),
        None,
    )


def chain(error):
    """An error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--write", action="store_true", help="write the outcomes to opacus_suite.json"
    )
    options, for_pytest = parser.parse_known_args()
    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "few", max_examples=3, deadline=None, derandomize=True, database=None
    )
    hypothesis.settings.load_profile("few")
    with contextlib.suppress(ImportError):
        import_torchvision()
    suite = Suite()
    quiet = [
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-q",
        "--tb=no",
        "-W",
        "ignore",
        "--pyargs",
    ]
    pytest.main(
        [*quiet, *for_pytest, *(f"opacus.tests.{name}" for name in MODULES)], plugins=[suite]
    )
    for name, (outcome, reason) in suite.of.items():
        print(f"{outcome:18} {name}  {reason}")
    totals = dict(sorted(collections.Counter(outcome for outcome, _ in suite.of.values()).items()))
    print(totals)
    if options.write:
        found = {
            "opacus": opacus.__version__,
            "totals": totals,
            "tests": dict(sorted(suite.of.items())),
        }
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(totals.get("fails", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
