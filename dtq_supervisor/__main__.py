"""`python -m dtq_supervisor`."""

import sys

from dtq_supervisor.cli import main

if __name__ == "__main__":
    sys.exit(main())
