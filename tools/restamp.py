"""Restamp records after a change of the code that changes no value.

    python tools/restamp.py --from REVISION

A record holds the hash of the code that made it, and is stale when that code changes. Where code was only moved,
renamed or tidied, or the hash is taken in another way, hours of runs need not be repeated. So this tool

1. takes the code and the records of REVISION out of git and asks that code (`dpcompanion list`) which are fresh;
2. gives every record of the working tree that is stale today, was fresh there, and still holds the same run, the hash
   of today's code, and the name that today's configuration has for one seed ("seed" for "seeds"); the hash that it
   had until then, and REVISION, stay in its field `restamped`, which the book counts;
3. leaves everything else in the file as it is, and names each stale record that it leaves alone. It ends with 1 if
   there is one.

A configuration that changed in any other way, a record of another run, and a record that was stale are left. Nothing
here can see whether the change since REVISION moves a number: who restamps says so, and the commit is of its own.
Running it again changes nothing.
"""

import argparse
import io
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--from", dest="revision", required=True, help="a git revision by whose code records are fresh")
    revision = parser.parse_args(arguments).revision
    from dpcompanion.reproduction import records

    named = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{revision}^{{commit}}"]
    commit = subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", revision, "dpcompanion", "results", "pyproject.toml"],
            capture_output=True,
            check=True,
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        fresh = states(folder, "fresh")
        stamped, left = [], []
        for name, preset in states(ROOT, "stale"):
            then = records.path_of(name, preset, folder / "results")
            if (name, preset) in fresh and restamp(name, preset, then, commit):
                stamped.append(name)
            else:
                left.append(f"{name} ({preset})")
    print(f"{len(stamped)} restamped")
    if left:
        print(f"left stale: {', '.join(left)}")
    return 1 if left else 0


def states(checkout, state):
    """The (name, preset) of records that the code in a folder calls fresh, or stale."""
    # A process of its own: two versions of a package do not fit into one.
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    said = subprocess.run(
        [sys.executable, "-m", "dpcompanion.cli", "list"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = []
    for line in said.splitlines():
        for entry in re.search(r"\[([^]]*)\]$", line).group(1).split(", "):
            if entry.endswith(f" {state}"):
                found.append((line.split()[0], entry.split()[0]))
    return found


def restamp(name, preset, then, commit):
    """Write today's hash into a record, and whether that made it fresh; `then`: where the record was that was fresh, by
    the code of `commit`."""
    from dpcompanion.reproduction import experiments, records, storage

    path, experiment = records.path_of(name, preset, ROOT / "results"), experiments.get(name)
    before, fields = storage.read_json(then), storage.read_json(path)
    # Values hold NaN, which does not equal itself; their hashes do.
    if any(
        storage.hash_of(fields.get(key)) != storage.hash_of(before.get(key))
        for key in {*fields, *before} - {"code_hash", "config", "restamped"}
    ):
        return False
    fields.setdefault("restamped", []).append({"code_hash": before["code_hash"], "commit": commit})
    fields["code_hash"] = experiment.code_hash
    fields["config"] = renamed(fields["config"], storage.plain(experiment.presets[preset]))
    made = records.Record(**{key: value for key, value in fields.items() if key not in ("schema", "arrays")})
    if experiment.is_stale(made):
        return False
    storage.write_json(path, fields, indent=1)
    return True


def renamed(config, today):
    """A configuration with "seed" in place of "seeds" wherever today's has it, and there was one."""
    if not (isinstance(config, dict) and isinstance(today, dict)):
        return config
    result = {}
    for key, value in config.items():
        if key == "seeds" and "seed" in today and len(value) == 1:
            key, value = "seed", value[0]
        result[key] = renamed(value, today.get(key))
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
