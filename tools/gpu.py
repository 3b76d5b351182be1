"""Everything that waits for a GPU, in one command that may be cut off anywhere: tests, benchmarks, records.

    python tools/gpu.py                      everything that is not done yet
    python tools/gpu.py --minutes 9          as much of it as fits; the next call goes on
    python tools/gpu.py --list               what there is, and what is done
    python tools/gpu.py --out FOLDER --keep FILE.tar     on a machine that loses its disk
    python tools/gpu.py --device cpu --preset quick --out FOLDER     a rehearsal, without a GPU

It needs torch, numpy, scipy, mpmath and this checkout, and no network; pytest for the tests, torchvision for ResNet-18.
DPCOMPANION_DATA names the folder of the data sets.

The records are those that the book's scoreboard lists as left to run; what takes days comes last. `dpcompanion run`
makes them from pieces, which are kept as they end. When the time is up, the command gets a Ctrl-C and half a minute. A
task that ended well is noted in FOLDER/done-DEVICE-PRESET.txt. A record whose data set is missing fails in one line and
is tried again at the next call.

`--keep FILE.tar` packs pieces, unfinished states and FOLDER into one file when the call ends, by Ctrl-C and SIGTERM
too, and unpacks what is not there when the next call begins.
"""

import argparse
import contextlib
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, wherever the call comes from
GRACE = 30


def tasks(options):
    """{name: command}, in order."""
    from dpcompanion.reproduction import experiments

    found = {"tests": ["pytest", "-q", "-p", "no:cacheprovider", "tests/training/test_gpu.py"]}
    found |= {f"benchmarks.{bench}": ["benchmarks", bench] for bench in ("networks", "ensembles")}
    left = remaining()
    for name in options.records or left:
        if options.preset in experiments.get(name).presets:
            found[name] = ["dpcompanion", "run", name, "--preset", options.preset, "--device", options.device]
            found[name] += ["--out", str(options.out)]
            found[name] += ["--seeds", *left[name]] if options.preset == "paper" and left.get(name) else []
    return {
        name: [sys.executable, "-m", *command]
        for name, command in found.items()
        if not options.only or name in options.only
    }


def remaining():
    """{record: seeds, none for its own} that the scoreboard lists as left to run, those that take days last."""
    from dpcompanion.reproduction import scoreboard

    said = [how for one in scoreboard.exhibit_statuses() for how in (one.to_do, one.more_seeds) if how]
    found = {}
    for _, how in sorted(said, key=lambda each: "day" in each[0]):
        for name, seeds in re.findall(r"dpcompanion run (\S+)[^&]*?(?: --seeds ([\d ]+))?(?: &&|$)", how):
            found[name] = seeds.split() or found.get(name, [])
    return found


def folders(options):
    """{first part of a name in the file that is kept: (where it lies, the patterns of what is kept)}."""
    from dpcompanion import data
    from dpcompanion.reproduction import pieces

    return {"data": (data.data_folder().resolve(), pieces.FILES), "out": (options.out, ["*"])}


def keep(options):
    """Write what would be lost with the disk: pieces and states of the data folder, all of the folder of records."""
    options.keep.parent.mkdir(parents=True, exist_ok=True)
    part = options.keep.with_name(f".{options.keep.name}.part")
    with tarfile.open(part, "w", dereference=True) as tar:
        for first, (folder, patterns) in folders(options).items():
            for path in sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}):
                data_in_out = first == "out" and path.is_relative_to(folders(options)["data"][0])
                if path not in (part, options.keep) and not data_in_out:
                    tar.add(path, f"{first}/{path.relative_to(folder)}")
    os.replace(part, options.keep)


def put_back(options):
    """Unpack what `keep` wrote; a file that is there stays as it is. Raises tarfile.TarError, OSError."""
    with tarfile.open(options.keep) as tar:
        found = []
        for member in tar.getmembers():
            first, _, name = member.name.partition("/")
            if first not in folders(options):
                raise tarfile.TarError(f"{member.name} has no place in it")
            folder, _ = folders(options)[first]
            found.append((tarfile.data_filter(member.replace(name=name, deep=False), str(folder)), folder))
        # What a piece refers to comes first.
        for member, folder in sorted(found, key=lambda each: each[0].name.endswith(".json")):
            if not (folder / member.name).exists():
                tar.extract(member, folder, filter="data")


def deadline(minutes):
    """A function that says whether so many minutes are over."""
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    return lambda: time.monotonic() >= until


def attempt(command, is_over, into=None):
    """Run a command until the time is over: its exit status, or None where it was cut off; output goes to `into`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that begins this in the background passes that on to all processes, which must hear Ctrl-C below.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.nullcontext() if into is None else into.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=output)
    try:
        while process.poll() is None and not is_over():
            time.sleep(0.1)
        return process.returncode
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # the whole group, so that every process keeps what it has
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def work(options):
    """Do the tasks that are left; the exit status: 1 where one failed, 3 where some are left, else 0."""
    is_over = deadline(options.minutes)
    done = options.out / f"done-{options.device}-{options.preset}.txt"
    ended = done.read_text(encoding="utf-8").split() if done.is_file() else []
    if options.list:
        print("\n".join(f"{'done' if name in ended else 'to do'}: {name}" for name in tasks(options)))
        return 0
    failed = []
    left = {name: command for name, command in tasks(options).items() if name not in ended}
    for name, command in list(left.items()):
        if is_over():
            break
        print(f"== {' '.join(command)}", flush=True)
        into = options.out / f"{name}.txt" if name.startswith("benchmarks.") else None
        status = attempt(command, is_over, into)
        if status is None:
            break
        del left[name]
        if status:
            failed.append(name)
        else:
            with done.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
        print(f"== {name}: {f'failed ({status})' if status else 'done'}", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}; left for the next call: {', '.join(left) or 'none'}")
    return 1 if failed else 3 if left else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, help="stop after so many; no limit by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper", choices=("quick", "paper"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="these tasks only")
    parser.add_argument("--records", nargs="+", metavar="NAME", help="these records instead of those that are left")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE.tar", help="go on from this file, and write it anew")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if options.list:
        return work(options)
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU; a rehearsal takes --device cpu")
    if options.keep and options.out == ROOT / "results":
        parser.error("--keep needs an --out of its own")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.keep is None:
        return work(options)
    options.keep = options.keep.resolve()
    if options.keep.exists():
        try:
            put_back(options)
        except (tarfile.TarError, OSError) as error:
            parser.error(f"--keep {options.keep} cannot be read: {error}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what ends a job in time sends it
    try:
        return work(options)
    finally:
        keep(options)
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
