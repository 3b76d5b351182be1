"""The command line: privacy parameters at the prompt, and the book's records.

    dpcompanion epsilon --sample-rate 512/60000 --noise-multiplier 3.42529 --steps 9375 --delta 1e-5
    dpcompanion noise-multiplier --epsilon 1 --delta 1e-5 --sample-rate 0.01 --steps 1000
    dpcompanion sample-rate --epsilon 1 --delta 1e-5 --noise-multiplier 2 --steps 1000
    dpcompanion steps --epsilon 1 --delta 1e-5 --noise-multiplier 1 --sample-rate 0.01
    dpcompanion ledger run.json other.json --delta 1e-5
    dpcompanion list
    dpcompanion run idp-sgd/table-5 --preset paper
    dpcompanion run idp-sgd/figures-5-6 --preset paper --shard 2/5
    dpcompanion merge idp-sgd/figures-5-6 --preset paper

Every answer names the neighbouring relation, the sampler, the accountant and delta. It is rounded
to the safe side, what was given is not rounded, and `--json` gives all digits. A mistake ends in
one line on stderr and exit status 2.

>>> main(
...     [
...         "epsilon",
...         "--sample-rate",
...         "0.01",
...         "--noise-multiplier",
...         "1",
...         "--steps",
...         "1000",
...         "--delta",
...         "1e-5",
...         "--accountant",
...         "rdp",
...     ]
... )
epsilon 2.10137 at delta 1e-05 (add/remove one example, Poisson sampling, accountant rdp)
0
"""

import argparse
import json
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dpcompanion import __version__
from dpcompanion._rounding import exactly, rounded

# Each quantity: option, its other spelling if any, how it is read, and what it is.
_OPTIONS = {
    "sample_rate": (
        "--sample-rate",
        None,
        "RATE",
        "probability that an example enters a step; 0.01 or 512/60000",
    ),
    "noise_multiplier": (
        "--noise-multiplier",
        None,
        "SIGMA",
        "standard deviation of the noise over the clip norm",
    ),
    "steps": ("--steps", None, "T", "number of steps"),
    "delta": ("--delta", None, "DELTA", "the delta of (epsilon, delta)"),
    "target_epsilon": ("--epsilon", "--target-epsilon", "EPSILON", "the epsilon that may be spent"),
    "target_delta": ("--delta", "--target-delta", "DELTA", "the delta that may be spent"),
}

# Each command: the function in `accounting`, what it takes, and the side its answer is rounded to.
_QUESTIONS = {
    "epsilon": (
        "compute_epsilon",
        ("sample_rate", "noise_multiplier", "steps", "delta"),
        math.ceil,
        "what a run costs",
    ),
    "noise-multiplier": (
        "find_noise_multiplier",
        ("target_epsilon", "target_delta", "sample_rate", "steps"),
        math.ceil,
        "the least noise that keeps a budget",
    ),
    "sample-rate": (
        "find_sample_rate",
        ("target_epsilon", "target_delta", "noise_multiplier", "steps"),
        math.floor,
        "the largest sample rate within a budget",
    ),
    "steps": (
        "find_steps",
        ("target_epsilon", "target_delta", "sample_rate", "noise_multiplier"),
        math.floor,
        "the most steps within a budget",
    ),
}


class _Once(argparse.Action):
    """An option that is given at most once, by whichever name: of two values one would be lost."""

    def __call__(self, parser, namespace, values, option_string=None):
        given = vars(namespace).setdefault("given_options", set())
        if self.dest in given:
            parser.error(f"argument {'/'.join(self.option_strings)}: given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        # Of an abbreviation one letter decides what is meant: `--n 60000` would be a noise
        # multiplier of 60,000.
        super().__init__(**options, allow_abbrev=False)
        self.register("action", None, _Once)


def _number(text: str) -> float:
    """A number or a fraction such as 512/60000."""
    top, slash, bottom = text.partition("/")
    if top.isdigit() and not slash:
        return int(top)
    try:
        if "_" in text:  # which Python skips
            raise ValueError
        return float(top) / float(bottom) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a fraction such as 512/60000"
        ) from None


def _answer(arguments: argparse.Namespace) -> None:
    from dpcompanion import accounting
    from dpcompanion.accounting.items import RELATION, SAMPLER

    name, parameters, toward, _ = _QUESTIONS[arguments.command]
    given = {parameter: getattr(arguments, parameter) for parameter in parameters}
    value = getattr(accounting, name)(**given, accountant=arguments.accountant)
    delta = given["delta"] if "delta" in given else given["target_delta"]
    if arguments.examples is not None and not arguments.examples >= 1:
        raise ValueError(f"examples must be at least 1, got {arguments.examples}")
    if arguments.examples is not None and delta * arguments.examples >= 1:
        print(
            f"dpcompanion {arguments.command}: warning: delta {exactly(delta)} is not below 1/n "
            f"for n = {exactly(arguments.examples)}: to publish an example at random would be as "
            "private",
            file=sys.stderr,
        )
    if arguments.json:
        key = arguments.command.replace("-", "_")
        said = {
            key: value if math.isfinite(value) else str(value),
            **given,
            "accountant": arguments.accountant,
            "neighbouring_relation": RELATION,
            "sampler": SAMPLER,
        }
        print(json.dumps(said, indent=1))
    else:
        budget = (
            f"for epsilon {exactly(given['target_epsilon'])} " if "target_epsilon" in given else ""
        )
        print(
            f"{arguments.command} {exactly(rounded(value, toward))} {budget}at delta "
            f"{exactly(delta)} (add/remove one example, Poisson sampling, accountant "
            f"{arguments.accountant})"
        )


def _of_file(path: str) -> Any:
    """The ledger of a file, or that of the plan in it. It is read once, as a pipe can be."""
    from dpcompanion import _files
    from dpcompanion.accounting import Ledger
    from dpcompanion.mechanism.plan import DPSGDPlan

    text = pathlib.Path(path).read_text(encoding="utf-8").strip()
    if not text.startswith(("{", "[")):
        raise ValueError(f"source must be a ledger in JSON, got {text[:80]!r}")
    held = _files.parsed(text, "ledger")
    if isinstance(held, dict) and "plan" in held:
        return Ledger().add(DPSGDPlan.from_json(text))
    return Ledger.from_json(text)


def _ledger(arguments: argparse.Namespace) -> None:
    from dpcompanion.accounting import Ledger
    from dpcompanion.accounting.items import SAMPLER

    parts = []
    for file in arguments.files:
        try:
            parts.append(_of_file(os.path.join(os.curdir, file)))
            if not parts[-1].items:
                raise ValueError("no run or release is in it")
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{file}: {reason}") from None
    stronger = "replace" if any(part.relation == "replace" for part in parts) else "add-remove"
    ledger = Ledger(relation=arguments.relation or stronger)
    for file, part in zip(arguments.files, parts):
        try:
            ledger = ledger.add(part)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    if arguments.json:
        epsilon = ledger.epsilon(arguments.delta)
        said = {
            "epsilon": epsilon if math.isfinite(epsilon) else str(epsilon),
            "delta": arguments.delta,
            "accountant": "pld",
            "neighbouring_relation": ledger.relation_in_words,
            "sampler": SAMPLER,
            **json.loads(ledger.to_json()),
        }
        print(json.dumps(said, indent=1))
    else:
        print(ledger.statement(arguments.delta))


def _shard(text: str) -> tuple[int, int]:
    """A share such as 2/5 as (2, 5)."""
    which, _, of = text.partition("/")
    if not (which.isdecimal() and of.isdecimal() and 1 <= int(which) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 2/5, from 1/5 to 5/5")
    return int(which), int(of)


def _run(arguments: argparse.Namespace) -> None:
    from dpcompanion.reproduction import comparison, experiments, records, workers

    folder = records.results_folder() if arguments.out is None else arguments.out
    try:
        record = experiments.run(
            arguments.name,
            preset=arguments.preset,
            device=arguments.device,
            out=folder,
            seeds=arguments.seeds,
            jobs=arguments.jobs,
            share=arguments.shard,
        )
    except workers.Missing as error:
        if arguments.command == "merge":
            raise ValueError(f"not merged: {error}") from None
        print(f"the share {arguments.shard[0]}/{arguments.shard[1]} is done; {error}")
        return
    path = records.path_of(record.name, record.preset, folder)
    if arguments.json:
        print(path.read_text(encoding="utf-8"))
    else:
        try:
            table = experiments.compare(record, folder=arguments.out)
        except ValueError as error:  # of the paper's record, which is no part of what was asked for
            print(
                f"dpcompanion run: warning: not compared with the recorded numbers: {error}",
                file=sys.stderr,
            )
            table = comparison.compare(record.name, live=record)
        print(table)
        print(f"live: this run, preset {record.preset}; recorded, if there: preset paper")
        print(f"the record: {path}")


def _list(arguments: argparse.Namespace) -> None:
    from dpcompanion.reproduction import experiments

    entries = experiments.catalogue(arguments.out)
    if arguments.json:
        print(json.dumps([vars(entry) for entry in entries], indent=1))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        # Quick runs are shown live and seldom recorded: that there is no record says nothing.
        states = ", ".join(
            preset if (preset, state) == ("quick", "missing") else f"{preset} {state}"
            for preset, state in entry.records.items()
        )
        print(f"{entry.name:{width}}  {entry.title}  [{states}]")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dpcompanion",
        description="Privacy accounting for DP-SGD, and the records of the book.",
    )
    parser.add_argument("--version", action="version", version=f"dpcompanion {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser
    )
    for command, (_, parameters, _, what) in _QUESTIONS.items():
        words = f"{what}: add/remove one example, Poisson sampling"
        sub = commands.add_parser(command, help=what, description=words[0].upper() + words[1:])
        for parameter in parameters:
            option, other, metavar, meaning = _OPTIONS[parameter]
            sub.add_argument(
                *filter(None, (option, other)),
                dest=parameter,
                type=_number,
                required=True,
                metavar=metavar,
                help=meaning,
            )
        sub.add_argument(
            "--examples",
            type=_number,
            metavar="N",
            help="number of examples: warns of a delta of 1/N or more",
        )
        sub.add_argument(
            "--accountant", default="pld", help="pld (tight, the default) or rdp (fast)"
        )
        sub.set_defaults(do=_answer)
    ledger = commands.add_parser(
        "ledger",
        help="what several runs and releases on the same people's data cost together",
        description="Compose ledgers and runs, each in a JSON file: what `dpcompanion epsilon "
        "--json` prints, or what the to_json of a Ledger or a DPSGDPlan writes.",
    )
    ledger.add_argument(
        "files", nargs="+", metavar="FILE", help="JSON of a ledger, a run or a plan"
    )
    ledger.add_argument(
        "--delta", type=_number, default=1e-5, metavar="DELTA", help="1e-5 by default"
    )
    ledger.add_argument(
        "--relation",
        choices=("add-remove", "replace"),
        help="how neighbours differ: in one example that takes part or not, or by one that "
        "replaces another; by default as the files say, or else add-remove",
    )
    ledger.set_defaults(do=_ledger)
    _add_experiments(commands)
    for sub in commands.choices.values():
        sub.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_experiments(commands):
    """The commands that make and list records."""
    run = commands.add_parser(
        "run",
        help="make a record of an experiment",
        description="Run an experiment and write its record.",
    )
    merge = commands.add_parser(
        "merge",
        help="make the record of a run that shards have done",
        description="Make the record of a run whose pieces are all there; computes none.",
    )
    for sub in (run, merge):
        sub.add_argument("name", help="such as idp-sgd/table-5; `dpcompanion list` names them all")
        sub.add_argument("--preset", help="quick or paper; DPCOMPANION_PRESET or quick by default")
        sub.add_argument("--device", default="cpu", help="cpu or cuda")
        sub.add_argument("--seeds", type=int, nargs="+", help="instead of the seeds of the preset")
    run.add_argument(
        "--jobs", type=int, help="processes that do the pieces of the run; 1 by default"
    )
    run.add_argument(
        "--shard",
        type=_shard,
        metavar="K/N",
        help="every N-th piece alone, from the K-th; the last shard to end writes the record",
    )
    run.set_defaults(do=_run)
    merge.set_defaults(do=_run, jobs=None, shard=(0, 1))
    listing = commands.add_parser(
        "list",
        help="the experiments and their records",
        description="List the experiments and, in brackets, their presets, each with how its "
        "record stands: fresh, stale (made with other settings than today's) or missing. A quick "
        "preset without a word has no record, which few have.",
    )
    listing.set_defaults(do=_list)
    for sub in (run, merge, listing):
        sub.add_argument(
            "--out",
            metavar="FOLDER",
            help="where records lie; by default `results` of the checkout that dpcompanion is "
            "imported from, whose records are replaced, and without one ./results",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.do(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. The rest goes nowhere, or Python
        # complains as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a process that SIGPIPE ends
    except (ValueError, OSError, ImportError) as error:
        print(f"dpcompanion {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; the same command goes on from here" if arguments.command == "run" else ""
        print(f"stopped{goes_on}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
