"""`python -m twinlens`: the same as the `twinlens` command."""

import sys

from twinlens.cli import main

sys.exit(main())
