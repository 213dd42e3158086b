"""`python -m engine.lab.replay.ablate TRACE...`: which refinements of the controller pay? Short for
`foredraft replay --ablate --seeds 2 --passes 2` on traces of `foredraft bench record`. For random
worlds, use `engine.lab.simulate --policy adaptive --policy "no hindsight"` and so on.
"""

from __future__ import annotations

import sys

from engine.lab.replay.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--ablate", "--seeds", "2", "--passes", "2", *sys.argv[1:]]))
