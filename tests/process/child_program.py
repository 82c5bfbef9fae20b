"""One child as a program: child_program.py JSON. It maps the scoreboard of the test that started it, and
takes that test for its supervisor."""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

from dtq_child import child, newborn
from dtq_child.loader import load_configured
from dtq_child.protocol import ChildContext
from dtq_child.scoreboard import Scoreboard
from dtq_child.settings import Settings


def main() -> NoReturn:
    told = json.loads(sys.argv[1])
    settings = Settings.from_json(told["settings"])
    # A memfd has no name; it is found among the descriptors of who made it.
    board = Scoreboard.attach(os.open(f"/proc/{told['owner']}/fd/{told['fd']}", os.O_RDWR), told["rows"])
    dump_fd = os.memfd_create("stacks")
    newborn.take_signals(dump_fd)
    board.child_row(told["row"]).born(os.getpid())
    context = ChildContext(
        slot=told["row"],
        life=told["life"],
        row=told["row"],
        generation=1,
        worker_id=told["worker_id"],
        supervisor_pid=told["supervisor_pid"],
        settings=settings,
        app=load_configured("tests.support.handlers:app", settings),
        scoreboard=board,
        dump_fd=dump_fd,
        preloaded=True,
    )
    os._exit(child.main(context))


if __name__ == "__main__":
    main()
