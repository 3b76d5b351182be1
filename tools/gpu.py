"""All that waits for a GPU, in one command that may be cut off anywhere: tests, benchmarks, records.

    python tools/gpu.py                      everything that is not done yet
    python tools/gpu.py --minutes 9          as much of it as fits; the next call goes on
    python tools/gpu.py --list               what there is, and what is done
    python tools/gpu.py --device cpu --preset quick --out FOLDER     a rehearsal, without a GPU

It needs torch, numpy, scipy, cryptography, mpmath and this checkout (pytest for the tests, Opacus to be timed too);
no network. Data lie in the folder that DPCOMPANION_DATA names: what is missing is said and left out. Records come
most valuable first. Each is made by `dpcompanion run`, whose pieces are kept as they end, and trials of whose pieces
go on from their last epoch; when the time is up the command is interrupted as by Ctrl-C, and given half a minute.
Tests and benchmarks begin anew, so those that were cut off come last at the next call. What benchmarks print stands
in FOLDER/NAME.txt too. A task is done when it ended well; its name then stands in FOLDER/done-DEVICE-PRESET.txt,
which may be removed to do all again.
"""

import argparse
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
GRACE = 30
NEEDED = ("torch", "numpy", "scipy", "cryptography", "mpmath")
# What most exhibits lean on first, what takes a day last.
RECORDS = (
    "idp-sgd/table-8-cifar10-a",
    "idp-sgd/table-8-cifar10-b",
    "idp-sgd/table-2-cifar10-a",
    "idp-sgd/table-2-cifar10-b",
    "idp-sgd/figure-2",
    "individual-accounting/figure-3",
    "individual-accounting/figures-9-10",
    "gradients-look-alike/figure-2",
    "gradients-look-alike/figure-3",
    "gradients-look-alike/figure-4",
    "idp-sgd/figures-5-6",
    "idp-sgd/table-11",
    "idp-sgd/table-10",
    "idp-sgd/table-16",
    "per-instance-accounting/text-worst-case-share",
    "per-instance-accounting/figure-1-resnet20",
    "per-instance-accounting/figure-2-resnet20",
    "per-instance-accounting/figure-5-resnet20",
    "per-instance-accounting/figure-6-resnet20",
    "per-instance-accounting/table-2-resnet20",
    "per-instance-accounting/table-3",
    "per-instance-accounting/figure-7-resnet20",
    "per-instance-accounting/figure-3-resnet20",
    "per-instance-accounting/figure-8-resnet20",
    "per-instance-accounting/figure-4",
    "per-instance-accounting/figures-9-10-resnet20",
    "per-instance-accounting/table-1-resnet20",
    "idp-sgd/table-3-resnet18",
    "idp-sgd/table-8",
    "idp-sgd/table-2",
    "gradients-look-alike/figure-6",
    "gradients-look-alike/figure-7",
    "gradients-look-alike/figure-9",
    "individual-accounting/figure-2",
    "individual-accounting/figure-6",
    "individual-accounting/figure-1",
    "individual-accounting/figure-4",
    "individual-accounting/table-2",
    "individual-accounting/figure-5",
    "individual-accounting/table-3",
    "individual-accounting/figures-7-8",
    "individual-accounting/figure-11",
    "individual-accounting/figure-12",
    "individual-accounting/figures-13-14",
)


def tasks(options):
    """{name: command}, in order."""
    sys.path.insert(0, str(ROOT))
    from dpcompanion.reproduction import experiments

    python, found = sys.executable, {}
    if not importlib.util.find_spec("pytest"):
        print("left out: tests, for which pytest is not installed", flush=True)
    else:
        found["tests"] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/training/test_gpu.py"]
    for bench in ("networks", "ensembles"):
        found[f"benchmarks.{bench}"] = [python, "-m", "benchmarks", bench]
    for name in options.records or RECORDS:
        if options.preset in experiments.get(name).presets:
            found[name] = [
                python,
                "-m",
                "dpcompanion",
                "run",
                name,
                "--preset",
                options.preset,
                "--device",
                options.device,
                "--out",
                str(options.out),
            ]
    return {name: command for name, command in found.items() if not options.only or name in options.only}


def what_is_missing(device):
    """What keeps this machine from the tasks, in words; "" if nothing does."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}"
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; a rehearsal takes --device cpu"
    return ""


def attempt(command, until, into=None):
    """Run a command until a time: its exit status, or None where it was cut off. What it prints goes to the file `into`
    instead, if there is one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in the background of a shell, which says so to all that is begun from here; they must hear it below.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=None if into is None else into.open("w"),
    )
    try:
        return process.wait(None if until is None else max(0.0, until - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        # To the whole group, as a terminal does, so that every process keeps what it has.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if isinstance(stop, KeyboardInterrupt):
            raise
        return None


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="stop after so many; no limit by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper", choices=("quick", "paper"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="these tasks only")
    parser.add_argument("--records", nargs="+", metavar="NAME", help="these records instead of the usual ones")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if not options.list and (missing := what_is_missing(options.device)):
        parser.error(missing)
    if not options.list:
        options.out.mkdir(parents=True, exist_ok=True)
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    log = options.out / f"done-{options.device}-{options.preset}.txt"
    done = log.read_text().split() if log.is_file() else []
    cut = log.with_name(log.name.replace("done", "cut", 1))
    late = cut.read_text().split() if cut.is_file() else []
    failed, left = [], tasks(options)
    left = dict(sorted(left.items(), key=lambda task: task[0] in late))
    for name, command in list(left.items()):
        if name in done or options.list:
            print(f"{'done' if name in done else 'to do'}: {name}", flush=True)
            del left[name]
            continue
        if until is not None and time.monotonic() >= until:
            break
        print(f"== {' '.join(command)}", flush=True)
        started = time.monotonic()
        into = options.out / f"{name}.txt" if name.startswith("benchmarks.") else None
        status = attempt(command, until, into)
        if into is not None:
            print(into.read_text(), flush=True)
        if status is None:
            if into is not None or name == "tests":
                with cut.open("a") as file:
                    file.write(name + "\n")
            break
        del left[name]
        print(
            f"== {name}: {'done' if not status else f'failed ({status})'}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        if status:
            failed.append(name)
        else:
            with log.open("a") as file:
                file.write(name + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
