"""Claims are held and let go again: SIGTSTP and SIGCONT. Steps of `pool.step`. Pure.

Nothing happens to children: each finishes what it executes, hands back what it holds, and waits. Claims that
Redis has not been found fit for are not opened by a resume; those that a stop has closed stay closed.
"""

from __future__ import annotations

from dtq_supervisor.events import Action, HoldClaims, OpenClaims, QuietAsked, ResumeAsked, Say
from dtq_supervisor.roster import Pool


def on_quiet_asked(pool: Pool, now: float, event: QuietAsked, actions: list[Action]) -> None:
    if pool.stopping:
        actions.append(Say("info", "too_late", {"name": "SIGTSTP"}))
    elif not pool.quiet:
        pool.quiet = True
        actions.append(HoldClaims())
        actions.append(Say("warning", "quiet", {"children": len(pool.living())}))


def on_resume_asked(pool: Pool, now: float, event: ResumeAsked, actions: list[Action]) -> None:
    if pool.stopping:
        # systemd sends it after each TERM, to wake whoever is stopped: no news.
        actions.append(Say("debug", "too_late", {"name": "SIGCONT"}))
    elif not pool.quiet:
        actions.append(Say("info", "not_quiet"))
    else:
        pool.quiet = False
        if pool.contact:
            actions.append(OpenClaims())
        actions.append(Say("info", "resumed"))
