"""`python -m rankscope` is the same as `rankscope`."""

import sys

from rankscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
