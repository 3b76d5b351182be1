"""`python -m dpcompanion` is the command `dpcompanion`."""

import sys

from dpcompanion.cli import main

if __name__ == "__main__":
    sys.exit(main())
