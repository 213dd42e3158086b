"""The cache of compiled code between starts, on disks with faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Runs in its own process: prints what it logs, and whether the code came from the cache folder.
PROGRAM = """
import logging, os, resource, sys
logging.basicConfig(format="%(message)s")
import numba, engine.cpu.jit
numba.njit(lambda number: 2 * number)(1)  # imports, before this process is nobody
folder, case = sys.argv[1:]
if case == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
if case == "read only" and os.getuid() == 0:
    os.setuid(65534)
sys.dont_write_bytecode = True
sys.path.insert(0, folder)
import kernels_twice as module
assert module.twice(21) == 42
print("kept" if module.twice.stats.cache_hits else "compiled")
"""
SOURCE = """
from engine.cpu.jit import fast

@fast
def twice(number):
    return 2 * number
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a cache folder that other users may read."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    (made / "kernels_twice.py").write_text(SOURCE)
    yield made
    shutil.rmtree(made)


def start(folder: Path, case: str = "", **environment: str) -> tuple[str, str]:
    """Start a process; return its stdout and its log."""
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment}
    command = [sys.executable, "-c", PROGRAM, str(folder), case]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def files(folder: Path, ending: str) -> list[Path]:
    return list((folder / "__pycache__").glob(f"*.{ending}"))


def test_the_second_start_compiles_nothing(folder: Path) -> None:
    """Law: compiled code is cached in the folder of the source."""
    assert start(folder) == ("compiled", "")
    assert start(folder) == ("kept", "")


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x05no pickle"])
def test_a_damaged_file_is_set_aside(folder: Path, ending: str, content: bytes) -> None:
    """Bug: one empty cache file prevented every start."""
    start(folder)
    [file] = files(folder, ending)
    file.write_bytes(content)
    printed, logged = start(folder)
    assert printed == "compiled"
    assert "cached code is damaged, moved aside" in logged
    assert logged.count("\n") == 1
    assert start(folder) == ("kept", "")


def test_a_full_disk_is_a_warning(folder: Path) -> None:
    """Bug: the engine could not start where the cache folder was not writable."""
    printed, logged = start(folder, "full disk")
    assert printed == "compiled"
    assert "compiled code cannot be cached in" in logged
    assert logged.count("\n") == 1
    assert start(folder)[0] == "compiled"


def test_a_read_only_installation_uses_what_it_holds(folder: Path) -> None:
    """Bug: the code was compiled at each start, although the built image contained all of it."""
    start(folder)
    (folder / "__pycache__").chmod(0o555)
    assert start(folder, "read only", HOME="/nonexistent") == ("kept", "")
