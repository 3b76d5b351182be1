"""All that waits for a GPU in one command that may be cut off: tests, benchmarks, records.

    python tools/gpu.py                      everything that is not done yet
    python tools/gpu.py --minutes 9          as much of it as fits; the next call goes on
    python tools/gpu.py --list               what there is, and what is done
    python tools/gpu.py --device cpu --preset quick --out FOLDER idp-sgd/table-13
                                             a rehearsal, without a GPU

It needs torch, numpy, scipy, mpmath and this checkout, and no network; pytest for the tests,
torchvision for ResNet-18. DPCOMPANION_DATA names the folder of the data sets.

The records are those that the book's scoreboard lists as left to run; what takes days comes last.
`dpcompanion run` makes them from pieces, which it keeps as they end. When the time is up, the
command gets a Ctrl-C and half a minute. A task that ended well is noted in
FOLDER/done-DEVICE-PRESET.txt; one that failed is tried again at the next call.
"""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, wherever the call comes from
GRACE = 30


def tasks(options):
    """{name: command}, in order: all, or those that are named."""
    from dpcompanion.reproduction import experiments

    found = {"tests": ["pytest", "-q", "-p", "no:cacheprovider", "tests/training/test_gpu.py"]}
    found |= {f"benchmarks.{bench}": ["benchmarks", bench] for bench in ("networks", "ensembles")}
    left = remaining()
    for name in dict.fromkeys([*left, *options.names]):
        if name not in found and options.preset in experiments.get(name).presets:
            found[name] = [
                "dpcompanion",
                "run",
                name,
                "--preset",
                options.preset,
                "--device",
                options.device,
            ]
            found[name] += ["--out", str(options.out)]
            found[name] += (
                ["--seeds", *left[name]] if options.preset == "paper" and left.get(name) else []
            )
    return {
        name: [sys.executable, "-m", *found[name]]
        for name in options.names or found
        if name in found
    }


def remaining():
    """{record: seeds, none for its own} that the scoreboard lists as left, those of days last."""
    from dpcompanion.reproduction import scoreboard

    said = [
        how for one in scoreboard.exhibit_statuses() for how in (one.to_do, one.more_seeds) if how
    ]
    found = {}
    for _, how in sorted(said, key=lambda each: "day" in each[0]):
        for name, seeds in re.findall(
            r"dpcompanion run (\S+)[^&]*?(?: --seeds ([\d ]+))?(?: &&|$)", how
        ):
            found[name] = seeds.split() or found.get(name, [])
    return found


def attempt(command, seconds=None, into=None):
    """Run a command for at most so many seconds: its exit status, or None if it was cut off; output
    goes to `into`.
    """
    with contextlib.nullcontext() if into is None else into.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=output)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            # the whole group, so that every process keeps what it has
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def work(options):
    """Do the tasks left; the exit status: 1 where one failed, 3 where some are left, else 0."""
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    done = options.out / f"done-{options.device}-{options.preset}.txt"
    ended = done.read_text(encoding="utf-8").split() if done.is_file() else []
    if options.list:
        print(
            "\n".join(f"{'done' if name in ended else 'to do'}: {name}" for name in tasks(options))
        )
        return 0
    failed, left = (
        [],
        {name: command for name, command in tasks(options).items() if name not in ended},
    )
    for name, command in list(left.items()):
        seconds = None if until is None else until - time.monotonic()
        if seconds is not None and seconds <= 0:
            break
        print(f"== {' '.join(command)}", flush=True)
        status = attempt(
            command,
            seconds,
            options.out / f"{name}.txt" if name.startswith("benchmarks.") else None,
        )
        if status is None:
            break
        del left[name]
        if status:
            failed.append(name)
        else:
            with done.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
        print(f"== {name}: {f'failed ({status})' if status else 'done'}", flush=True)
    print(
        f"failed: {', '.join(failed) or 'none'}; left for the next call: "
        f"{', '.join(left) or 'none'}"
    )
    return 1 if failed else 3 if left else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="TASK", help="these tasks or records only")
    parser.add_argument("--minutes", type=float, help="stop after so many; no limit by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper", choices=("quick", "paper"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if not options.list:
        import torch

        if options.device.startswith("cuda") and not torch.cuda.is_available():
            parser.error(f"torch {torch.__version__} sees no GPU; a rehearsal takes --device cpu")
        options.out.mkdir(parents=True, exist_ok=True)
    # What ends a job in time sends SIGTERM, and a shell that begins one in the background has
    # SIGINT ignored.
    before = {
        sent: signal.signal(sent, signal.default_int_handler)
        for sent in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return work(options)
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)


if __name__ == "__main__":
    sys.exit(main())
