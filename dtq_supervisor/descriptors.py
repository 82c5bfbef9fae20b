"""How many descriptors (open files, for `ulimit -n`) a supervisor and its templates need, and room for them.

Both hold two for each child: its pidfd, and the file of its stacks. Where the limit is too low it is raised
for ourselves and the templates; children are given back what was found, for programs rely on
it (select() fails above 1024, some close every number below the limit).
"""

from __future__ import annotations

import resource

from dtq_child.errors import BadConfiguration

MARGIN = 64
"""For connections, templates, and what the application opens at its import."""


def make_room(procs: int, rows: int) -> int | None:
    """Raises the limit if it is too low; then what it was before. Raises BadConfiguration where that is
    forbidden."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = procs + rows + MARGIN
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadConfiguration(
            [
                f"{procs} children need {needed} descriptors, and at most {hard} are allowed: allow more "
                "(ulimit -Hn, LimitNOFILE= of the unit), or fewer --procs"
            ]
        )
    # The application's import finds as much room as it would have found without us.
    wanted = needed + soft if hard == resource.RLIM_INFINITY else min(hard, needed + soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft
