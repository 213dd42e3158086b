"""`python -m server` is the `foredraft` command."""

import sys

from server.cli import main

sys.exit(main())
