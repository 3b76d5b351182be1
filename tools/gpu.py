"""All that waits for a GPU, in one command that may be cut off anywhere: tests, benchmarks, records.

    python tools/gpu.py                      everything that is not done yet
    python tools/gpu.py --minutes 9          as much of it as fits; the next call goes on
    python tools/gpu.py --list               what there is, and what is done
    python tools/gpu.py --out FOLDER --keep FILE.tar     on a machine that loses its disk
    python tools/gpu.py --device cpu --preset quick --out FOLDER     a rehearsal, without a GPU

It needs torch, numpy, scipy, mpmath and this checkout; no network. With cryptography noise is drawn three times as
fast; pytest is for the tests, torchvision for ResNet-18, and Opacus is timed where it is installed. Data lie in the
folder that DPCOMPANION_DATA names. Before a record is tried its data sets are loaded once: where one is missing or
damaged, or a package that reads it, that is said, and this record is left out.

Records come most valuable first, short forms before long ones, and what takes more than a few hours of a GPU last.
Where the book asks for more seeds, they are run. Each record is made by `dpcompanion run`, whose pieces are kept as
they end, and trials of whose pieces go on from their last epoch; when the time is up the command is interrupted as by
Ctrl-C, and given half a minute. Tests and benchmarks begin anew, so those that were cut off come last at the next
call. What benchmarks print stands in FOLDER/NAME.txt too. A task is done when it ended well; its name then stands in
FOLDER/done-DEVICE-PRESET.txt, which may be removed to do all again.

Pieces that several records share, and their unfinished states, lie in the data folder; those of one record lie beside
it, in FOLDER. A machine that is lent loses both with its disk. `--keep FILE.tar` puts them into one file when the
call ends, however it ends, with all else that is in FOLDER; the data sets stay out. The next call with the same
option, on whatever machine, first puts back from it what is not there, and goes on. FOLDER is then one of its own,
not the checkout's `results`, whose records of the same names would stay. Only whoever kills the call with signal 9
loses what came after the last file; with `--minutes`, leave half a minute, and what the writing takes.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
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
NEEDED = ("torch", "numpy", "scipy", "mpmath")
# What most exhibits lean on first, short forms before long ones; what takes more than a few hours of a GPU last.
# From figure 6 of "Gradients look alike" on: ten hours and more (how long one class's budget and LiRA take on a GPU is
# not known: ten and fifty days of a core); then WRN-16-4, a day.
RECORDS = """
    idp-sgd/table-8-cifar10-a idp-sgd/table-8-cifar10-b idp-sgd/table-2-cifar10-a idp-sgd/table-2-cifar10-b
    individual-accounting/figure-3 individual-accounting/figures-9-10 gradients-look-alike/figure-3
    gradients-look-alike/figure-4 idp-sgd/figures-5-6 idp-sgd/table-11 idp-sgd/table-16 idp-sgd/table-8-precision
    idp-sgd/table-13-cifar10 idp-sgd/table-13-svhn idp-sgd/figure-2-short idp-sgd/figures-8-10-short
    per-instance-accounting/text-worst-case-share per-instance-accounting/figure-1-resnet20
    per-instance-accounting/figure-2-resnet20 per-instance-accounting/figure-5-resnet20
    per-instance-accounting/figure-6-resnet20 per-instance-accounting/table-2-resnet20
    per-instance-accounting/table-3 per-instance-accounting/figure-7-resnet20
    per-instance-accounting/figure-3-resnet20 per-instance-accounting/figure-6-utkface
    per-instance-accounting/figure-3-utkface per-instance-accounting/figure-7-utkface
    per-instance-accounting/figure-4 per-instance-accounting/figures-9-10-resnet20 gradients-look-alike/figure-7
    gradients-look-alike/figure-9 individual-accounting/figure-6 idp-sgd/table-14 idp-sgd/table-17
    idp-sgd/table-3-resnet18 idp-sgd/table-8 idp-sgd/table-2 gradients-look-alike/figure-2
    per-instance-accounting/figure-8-resnet20
    gradients-look-alike/figure-6 per-instance-accounting/table-1-resnet20 idp-sgd/table-10
    idp-sgd/figures-5-6-cifar10 idp-sgd/figure-2
    individual-accounting/figure-2 individual-accounting/figure-1 individual-accounting/figure-4
    individual-accounting/table-2 individual-accounting/figure-5 individual-accounting/table-3
    individual-accounting/figures-7-8 individual-accounting/figure-11 individual-accounting/figure-12
    individual-accounting/figures-13-14
""".split()


def tasks(options):
    """{name: command}, in order."""
    from dpcompanion.reproduction import experiments

    python, found, seeds = sys.executable, {}, more_seeds() if options.preset == "paper" else {}
    if importlib.util.find_spec("pytest"):
        found["tests"] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/training/test_gpu.py"]
    else:
        print("left out: tests, for which pytest is not installed", flush=True)
    for bench in ("networks", "ensembles"):
        found[f"benchmarks.{bench}"] = [python, "-m", "benchmarks", bench]
    for name in options.records or RECORDS:
        if options.preset in experiments.get(name).presets:
            found[name] = [python, "-m", "dpcompanion", "run", name, "--preset", options.preset]
            found[name] += ["--device", options.device, "--out", str(options.out)]
            found[name] += ["--seeds", *seeds[name]] if name in seeds else []
    return {name: command for name, command in found.items() if not options.only or name in options.only}


def more_seeds():
    """{record: seeds} of those that the book asks for once more, since their own were too few to decide its claims."""
    from dpcompanion.reproduction import scoreboard

    commands = " && ".join(one.more_seeds[1] for one in scoreboard.standings() if one.more_seeds)
    return {name: seeds.split() for name, seeds in re.findall(r"dpcompanion run (\S+)[^&]* --seeds ([\d ]+)", commands)}


def without_data(name, preset):
    """Why a task cannot be done for want of data, in a line; "" where it can."""
    if "/" not in name:  # tests and benchmarks draw their own
        return ""
    from dpcompanion.reproduction import experiments

    config = dataclasses.asdict(experiments.get(name).presets[preset])
    return next(filter(None, map(unreadable, sorted(data_sets(config)))), "")


def data_sets(config):
    """The data sets that a configuration names, at any depth: "utkface-age" is a problem on utkface."""
    from dpcompanion import data

    if isinstance(config, (list, tuple)):
        return set().union(*map(data_sets, config))
    if not isinstance(config, dict):
        return set()
    named = {name if name in data.names() else name.partition("-")[0] for name in [config.get("data")] if name}
    return named.union(*map(data_sets, config.values()))


@functools.cache
def unreadable(name):
    """Why a data set cannot be loaded, in a line; "" where it can."""
    from dpcompanion import data

    try:
        data.load(name, split="test")
    except (OSError, ValueError, ImportError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def folders(options):
    """{first part of a name in the file that is kept: where it lies}."""
    from dpcompanion import data

    return {"data": data.data_folder().resolve(), "out": options.out}


def keep(options):
    """Write what would be lost with the disk: pieces and states of the data folder, all of the folder of records."""
    from dpcompanion.reproduction import pieces

    options.keep.parent.mkdir(parents=True, exist_ok=True)
    part = options.keep.with_name(f".{options.keep.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as whole:
            with tarfile.open(fileobj=whole, mode="w", dereference=True) as tar:
                for first, folder in folders(options).items():
                    patterns = pieces.FILES if first == "data" else ["*"]
                    found = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
                    found -= {options.keep}
                    if first == "out":  # the data folder may lie in it
                        found = {path for path in found if not path.is_relative_to(folders(options)["data"])}
                    for path in sorted(path for path in found if path.suffix != ".part"):
                        # Another process may replace it meanwhile, or end its piece.
                        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                            name = f"{first}/{path.relative_to(folder).as_posix()}"
                            tar.addfile(tar.gettarinfo(arcname=name, fileobj=file), file)
            whole.flush()
            os.fsync(whole.fileno())
        os.replace(part, options.keep)
    finally:
        part.unlink(missing_ok=True)


def put_back(options):
    """What `keep` wrote, to where it was; a file that is there stays as it is.

    Raises:
        tarfile.TarError, OSError: for what is no such file, or holds a name that leads out of the two folders.
    """
    from dpcompanion import _files

    with tarfile.open(options.keep) as tar:
        found = []
        for member in tar.getmembers():
            first, _, name = member.name.partition("/")
            if not member.isreg() or first not in folders(options):
                raise tarfile.TarError(f"{member.name} has no place in it")
            folder = folders(options)[first]
            safe = tarfile.data_filter(member.replace(name=name, deep=False), str(folder))
            found.append((member, folder / safe.name))
        # What a piece refers to comes first.
        for member, path in sorted(found, key=lambda each: each[1].suffix == ".json"):
            if not path.exists():
                content = tar.extractfile(member)
                _files.replace(path, iter(lambda content=content: content.read(1 << 20), b""))
                os.utime(path, (member.mtime, member.mtime))  # by which a piece knows how long its state took


def what_is_missing(device):
    """What keeps this machine from the tasks, in words; "" if nothing does."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}"
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; a rehearsal takes --device cpu"
    return ""


def deadline(minutes):
    """A function that says whether so many minutes are over."""
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    return lambda: time.monotonic() >= until


def attempt(command, is_over, into=None):
    """Run a command until the time is over: its exit status, or None where it was cut off. What it prints goes to the
    file `into` instead, if there is one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in the background of a shell, which says so to all that is begun from here; they must hear it below.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with contextlib.nullcontext() if into is None else into.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=environment, stdout=output)
    try:
        while process.poll() is None and not is_over():
            time.sleep(0.1)
        if process.returncode is not None:
            return process.returncode
        end(process)
        return None
    except KeyboardInterrupt:
        end(process)
        raise


def end(process):
    """Interrupt the whole group, as a terminal does, so that every process keeps what it has."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, help="stop after so many; no limit by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper", choices=("quick", "paper"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--only", nargs="+", metavar="TASK", help="these tasks only")
    parser.add_argument("--records", nargs="+", metavar="NAME", help="these records instead of the usual ones")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE.tar", help="go on from this file, and write it anew")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if options.keep and options.out == ROOT / "results":
        parser.error("--keep needs an --out of its own")
    if not options.list and (missing := what_is_missing(options.device)):
        parser.error(missing)
    if not options.list:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.keep is None or options.list:
        return work(options)
    options.keep = options.keep.resolve()
    if options.keep.exists():
        try:
            put_back(options)
        except (tarfile.TarError, OSError) as error:
            parser.error(f"--keep {options.keep} cannot be read: {error}")
    # What ends a job in good time says so by SIGTERM: as Ctrl-C, then.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return work(options)
    finally:
        keep(options)
        signal.signal(signal.SIGTERM, before)


def work(options):
    """Do the tasks that are left; the exit status."""
    is_over = deadline(options.minutes)
    done, cut = (options.out / f"{what}-{options.device}-{options.preset}.txt" for what in ("done", "cut"))
    ended, late = (path.read_text().split() if path.is_file() else [] for path in (done, cut))
    failed, left = [], dict(sorted(tasks(options).items(), key=lambda task: task[0] in late))
    for name, command in list(left.items()):
        if name in ended or options.list:
            print(f"{'done' if name in ended else 'to do'}: {name}", flush=True)
            del left[name]
            continue
        if is_over():
            break
        if without := without_data(name, options.preset):
            print(f"left out: {name}: {without}", flush=True)
            del left[name]
            continue
        print(f"== {' '.join(command)}", flush=True)
        started = time.monotonic()
        into = options.out / f"{name}.txt" if name.startswith("benchmarks.") else None
        status = attempt(command, is_over, into)
        if into is not None:
            print(into.read_text(encoding="utf-8"), flush=True)
        if status is None:
            if into is not None or name == "tests":
                note(cut, name)
            break
        del left[name]
        said = f"failed ({status})" if status else "done"
        print(f"== {name}: {said}, {time.monotonic() - started:.0f} s", flush=True)
        if status:
            failed.append(name)
        else:
            note(done, name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    return 1 if failed else 3 if left else 0


def note(path, name):
    with path.open("a") as file:
        file.write(f"{name}\n")


if __name__ == "__main__":
    sys.exit(main())
