"""`python -m server` is the `foretoken` command."""

import sys

from server.cli import main

sys.exit(main())
