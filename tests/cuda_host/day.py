"""`python -m tests.cuda_host.day`, on the stand-in: run the measuring parts of `make gpu` on a tiny
pair, and print how each ended as one line of JSON."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch

from tests.cuda_host.counts import StandIn
from tests.cuda_host.valueless import without_libraries, without_values
from tests.gpu.day import Job, parts_of

# With zeros everywhere, transformers' own generation does not end. `streams` runs the same code as
# `machine`, for minutes.
LEFT_OUT = ("streams", "transformers")


def ended(part: Job) -> str:
    """Run a part; return its error, or "" if it ended well."""
    module, *words = part.words[1:]
    try:
        with mock.patch.object(sys, "argv", [module, *words]), redirect_stdout(sys.stderr):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return f"exit code {end.code}" if end.code else ""
    except Exception:  # report any exception
        return traceback.format_exc()[-2000:]
    return ""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    without_libraries()
    standin, found = StandIn(), dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        for part in parts_of(Path(name), "cuda", "1.2e6", quick=True):
            if "pytest" in part.words or part.name in LEFT_OUT:
                continue
            found[part.name] = ended(part)
            if part.name == "pair":
                without_values()
    standin.lap()
    sys.stdout.write(json.dumps({"ended": found, "violations": standin.violations}) + "\n")


if __name__ == "__main__":
    main()
