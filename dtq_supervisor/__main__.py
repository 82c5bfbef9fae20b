"""`python -m dtq_supervisor`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The working directory: a redis.py or queue.py of the application there is not for what we import.
        del sys.path[0]
    from dtq_supervisor.cli import main

    sys.exit(main())
