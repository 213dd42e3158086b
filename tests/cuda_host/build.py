"""Build the stand-in, and run programs on it in a child process.

Imports no torch: the parent process may have another version, or none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "standin"
TORCH = "FOREDRAFT_CUDA_TORCH"  # a folder, made by `pip install --target FOLDER torch==2.11.0`
BUILD = "FOREDRAFT_CUDA_HOST_BUILD"  # the folder for build results; default: build/cuda-host
LIMIT = 900  # seconds for a child; the first one compiles Triton kernels


def missing() -> str | None:
    """Return a sentence about what this machine lacks for these tests, or None."""
    folder = os.environ.get(TORCH)
    if not folder:
        return f"{TORCH} must name a folder with a CUDA build of torch (tests/cuda_host/README.md)."
    if not (Path(folder) / "torch" / "lib" / "libtorch_cuda.so").is_file():
        return f"{TORCH} is {folder!r}, which contains no CUDA build of torch."
    if not _headers().is_dir():
        return f"{TORCH} is {folder!r}, which contains no nvidia-cuda-runtime headers."
    if shutil.which("g++") is None:
        return "There is no g++ to build the stand-in with."
    return None


def _headers() -> Path:
    return Path(os.environ[TORCH], "nvidia", "cu13", "include")


@cache
def environment() -> dict[str, str]:
    """Return the environment of a child that finds a device; rebuild outdated libraries."""
    build = Path(os.environ.get(BUILD) or ROOT / "build" / "cuda-host").resolve()
    libraries = build / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    runtime, driver = build / "runtime.so", libraries / "libcuda.so.1"
    _compile(SOURCES / "runtime.cpp", runtime)
    _compile(SOURCES / "driver.cpp", driver)
    return os.environ | {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_CACHE_DIR": str(build / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(build / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(os.environ[TORCH]).resolve()),
    }


def _compile(source: Path, target: Path) -> None:
    if target.is_file() and target.stat().st_mtime > source.stat().st_mtime:
        return
    fresh = target.with_suffix(f".{os.getpid()}")  # two runs may build at once
    includes = ["-I", str(SOURCES), "-I", str(_headers())]
    command = ["g++", "-O2", "-shared", "-fPIC", *includes, str(source), "-o", str(fresh), "-ldl"]
    subprocess.run(command, check=True)
    fresh.replace(target)


def run(*command: str) -> str:
    """Return what `python COMMAND` prints on the stand-in. Raises RuntimeError, with the end of its
    stderr, if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]} failed:\n{done.stderr[-3000:]}")
    return done.stdout
