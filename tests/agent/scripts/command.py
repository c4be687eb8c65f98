"""The command line as a program, which the fork server of ranks can start."""

import sys

from rankscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
