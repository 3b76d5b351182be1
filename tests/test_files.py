"""The atomic write that records and checkpoints rest on."""

import os
import subprocess
import sys
import threading
import time

import pytest

from dpcompanion import _files


def test_writes_whole_files_of_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "a[1].bin"
    _files.replace(path, b"one")
    _files.replace(str(path), b"two")
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    _files.replace(path, b"old")
    with pytest.raises(TypeError):
        _files.replace(path, "text")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_stale_partials_of_the_same_file_are_removed_and_no_others(tmp_path):
    """Partial files of killed processes stayed for ever."""
    path, long_ago = tmp_path / "a*", time.time() - 7200
    stale, fresh, foreign = (
        tmp_path / name for name in (".a*.123.part", ".a*.124.part", ".ab.123.part")
    )
    for each in (stale, fresh, foreign):
        each.write_bytes(b"part")
    for each in (stale, foreign):
        os.utime(each, (long_ago, long_ago))
    _files.replace(path, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([path, fresh, foreign])


def test_writers_at_once_never_mix(tmp_path):
    """Names rested on the process number alone: writers that shared one took each other's file."""
    path, contents, failures = tmp_path / "a", [bytes([k]) * 100_000 for k in range(1, 5)], []

    def write(content):
        try:
            for _ in range(20):
                _files.replace(path, content)
                if path.read_bytes() not in contents:
                    failures.append("mixed")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and list(tmp_path.iterdir()) == [path]


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "a"
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('files', "
        "sys.argv[1]);"
        "files = importlib.util.module_from_spec(spec); spec.loader.exec_module(files); "
        "print('go', flush=True)\n"
        "while True:\n for k in b'xyz': files.replace(sys.argv[2], bytes([k]) * 1_000_000)"
    )
    for pause in (0.01, 0.03, 0.05, 0.1):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, _files.__file__, str(path)], stdout=subprocess.PIPE
        )
        writer.stdout.readline()
        while not path.exists():
            time.sleep(0.001)
        time.sleep(pause)
        writer.kill()
        writer.communicate()
        content = path.read_bytes()
        assert len(content) == 1_000_000 and len(set(content)) == 1
