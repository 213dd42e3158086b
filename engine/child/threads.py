"""How many CPU cores this process was granted, and torch's number of threads.

torch starts as many threads as the machine has cores. In a container with a quota of two cores on
a machine with sixty-four, the sixty-four threads take turns on two and every step waits for the
slowest. Free of torch, which reads the environment once, when it is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

CGROUP = Path("/sys/fs/cgroup")


def granted_cores(cgroup: Path = CGROUP) -> int:
    """Cores of the affinity mask, and no more than the control group's quota (v2 or v1)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota(cgroup)
    return max(1, min(allowed or 1, math.floor(quota) if quota is not None else allowed or 1))


def engine_threads(cores: int) -> int:
    """All but one: the front end needs a core, and threads of one product that share a core with
    anything wait for each other in every layer."""
    return max(1, cores - 1)


def limit_threads(threads: int | None, environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads: to `threads`, or to `engine_threads` unless they are
    set. Call before torch is imported."""
    if threads is None:
        if VARIABLES[0] in environment:
            return
        threads = engine_threads(granted_cores())
    for name in VARIABLES:
        environment[name] = str(threads)


def _quota(cgroup: Path) -> float | None:
    """Cores per unit of time, or None: no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # `max`: no limit
        return None
    return cores if cores > 0 else None
