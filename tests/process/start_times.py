"""`python -m tests.process.start_times [COUNT]`: what a newcomer waits for on two cores, which
nothing else should use. The bounds: 120 s from a clone with an empty home to the first completion;
30 s until the server is ready without compiled code but with packages at hand; a median of 6 s over
COUNT (3) further starts. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.process.served import ROOT

NEWCOMER, FIRST, LATER = 120.0, 30.0, 6.0  # seconds
# The interpreter itself: a launcher that looks in the home directory finds none in an empty one.
COMMAND = ("make", "serve", "PORT=0", f"PYTHON={Path(sys.base_prefix) / 'bin' / 'python3'}")
OF_OTHERS = {"PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "PIP_CACHE_DIR", "NUMBA_CACHE_DIR"}
BODY = {"model": "foredraft-demo", "prompt": "def add(a, b):\n", "max_tokens": 16}


def start(clone: Path, home: Path, began: float) -> tuple[float, float]:
    """Return the seconds from `began` until ready and until answered, and end the server."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_OTHERS}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            COMMAND, cwd=clone, env={**environment, "HOME": str(home)}, text=True,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            lines = (line.strip() for line in process.stdout)
            start_banner = next((line for line in lines if " at http://" in line), None)
            ready = time.monotonic() - began
            if start_banner is None:
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read()}")
            url = start_banner.split(" at ")[1]
            httpx.post(f"{url}/completions", json=BODY, timeout=60).raise_for_status()
            return ready, time.monotonic() - began
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.communicate()  # until everything it started has ended


def measure(count: int, folder: Path) -> tuple[float, float, list[float]]:
    """Return the seconds of the newcomer, of the first start and of each later one."""
    home, clone = folder / "home", folder / "foredraft"
    home.mkdir()
    began = time.monotonic()
    subprocess.run(("git", "clone", "--quiet", ROOT, clone), check=True)
    _, newcomer = start(clone, home, began)
    subprocess.run(("git", "clean", "-dfxq", "--exclude=.venv"), cwd=clone, check=True)
    first, *later = [start(clone, home, time.monotonic())[0] for _ in range(1 + count)]
    return newcomer, first, later


def main(count: int) -> int:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as folder:
        newcomer, first, later = measure(count, Path(folder))
    each = ", ".join(f"{seconds:.1f}" for seconds in later)
    figures = (
        ("from the clone to the first completion", newcomer, NEWCOMER),
        ("a first start, packages at hand", first, FIRST),
        (f"a later start, median of {each}", statistics.median(later), LATER),
    )
    for name, seconds, bound in figures:
        missed = "" if seconds <= bound else ", missed"
        sys.stdout.write(f"{name}: {seconds:.1f} s (at most {bound:.0f} s{missed})\n")
    return int(any(seconds > bound for _, seconds, bound in figures))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 3))
