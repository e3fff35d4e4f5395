"""`python -m gpufleet`: the same as the command `gpufleet`."""

from __future__ import annotations

import sys

from gpufleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
