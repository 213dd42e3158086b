"""`python -m tests.cuda_host.probe`, on the stand-in: print its counts for operations whose counts
are known, as one line of JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch

from tests.cuda_host.counts import StandIn


def counted(standin: StandIn, run: Callable[[], object]) -> Counter[str]:
    standin.lap()
    run()
    return standin.lap()


def forbidden(standin: StandIn, run: Callable[[], object]) -> list[str]:
    """Return the stand-in's violations, and torch's error, for a capture of `run`."""
    standin.lap()
    before, errors = len(standin.violations), list[str]()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()
    except RuntimeError as error:
        errors.append(str(error))
    standin.lap()
    return standin.violations[before:] + errors


def elsewhere(tensor: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensor.mul_(2)


def main() -> None:
    warnings.simplefilter("ignore")  # broken captures are empty, of which torch warns
    standin = StandIn()
    there = torch.zeros(1000, device="cuda")
    here, pinned = torch.ones(1000), torch.ones(1000, pin_memory=True)
    there.view(10, 100) @ there.view(100, 10)  # so that cuBLAS allocates its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.mul_(2).add_(1)
    counts = {
        "pageable": counted(standin, lambda: there.copy_(here, non_blocking=True)),
        "pinned": counted(standin, lambda: there.copy_(pinned, non_blocking=True)),
        "on the device": counted(standin, there.clone),
        "launch": counted(standin, lambda: there.mul_(2)),
        "product": counted(standin, lambda: there.view(10, 100) @ there.view(100, 10)),
        "replay": counted(standin, graph.replay),
        "read": counted(standin, there.tolist),
        "allocation": counted(standin, lambda: torch.zeros(1 << 28, device="cuda")),
    }
    violations = {
        "launch": forbidden(standin, lambda: there.mul_(2)),
        "pinned": forbidden(standin, lambda: there.copy_(pinned, non_blocking=True)),
        "read": forbidden(standin, there.tolist),
        "pageable": forbidden(standin, lambda: there.copy_(here, non_blocking=True)),
        "wait": forbidden(standin, torch.cuda.synchronize),
        "elsewhere": forbidden(standin, lambda: elsewhere(there)),
    }
    sys.stdout.write(json.dumps({"counts": counts, "violations": violations}) + "\n")


if __name__ == "__main__":
    main()
