"""`python -m tests.golden record` records the servers' replies to the requests; `check` compares.

Both run one server per configuration, and all must reply the same. `kills` (see there) runs one
server whose engine is killed again and again.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.golden import kills
from tests.golden.replay import CONFIGURATIONS, TEXTS, differences, replay
from tests.golden.requests import requests

SERVERS = 2  # servers at a time


def main(command: str) -> int:
    """Return 1 and record nothing if any reply differs, else 0."""
    began, all_requests, differing = time.monotonic(), requests(), set()
    with ThreadPoolExecutor(SERVERS) as pool:
        all_replies = list(pool.map(partial(replay, all_requests=all_requests), CONFIGURATIONS))
    expected: list[Any] = (
        all_replies[-1] if command == "record" else json.loads(TEXTS.read_text("utf-8"))
    )
    for configuration, replies in zip(CONFIGURATIONS, all_replies, strict=True):
        for i, (recorded, reply) in enumerate(zip(expected, replies, strict=True)):
            if found := list(differences(recorded, reply)):
                differing.add(i)
                print(f"{configuration}, request {i}, {all_requests[i]}:", *found[:5], sep="\n  ")
    if command == "record" and not differing:
        lines = [json.dumps(reply, separators=(",", ":")) for reply in expected]
        TEXTS.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    equal = f"{len(all_requests) - len(differing)} of {len(all_requests)} equal"
    print(f"{equal} in {time.monotonic() - began:.0f} s by {', '.join(CONFIGURATIONS)}")
    return 1 if differing else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["kills"]:
        sys.exit(kills.main(sys.argv[2:]))
    if sys.argv[1:] not in (["record"], ["check"]):
        sys.exit("usage: python -m tests.golden record|check|kills ...")
    sys.exit(main(sys.argv[1]))
