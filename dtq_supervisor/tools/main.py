"""`dtq`: the command line of producers and operators."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dtq_child import std_streams
from dtq_child.version import VERSION
from dtq_supervisor.tools import demo, reload


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; its exit code: 0 done, 1 it did not go as it should, 2 wrong usage."""
    std_streams.open_closed()
    parser = argparse.ArgumentParser(prog="dtq", description="dtq: a task queue over Redis Streams")
    parser.add_argument("--version", action="version", version=f"dtq {VERSION}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo.add_verb(verbs)
    reload.add_verb(verbs)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
