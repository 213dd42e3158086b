"""`python -m tests.cuda_host`: print the table of `limits`, and which functions ask for what."""

from __future__ import annotations

import json
import sys

from tests.cuda_host.build import missing, run
from tests.cuda_host.limits import lines, place_lines


def main() -> int:
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    found = json.loads(run("-m", "tests.cuda_host.measure"))
    print("\n".join([*lines(found), *place_lines(found)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
