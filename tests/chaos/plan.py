# SPDX-License-Identifier: Apache-2.0
"""Which faults happen, how often, and within which time all has to work again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from . import faults
from .faults import Fault
from .processes import PATIENCE
from .world import World

COMMITS = 30.0
COMMITS_NAME = "killed at its commits"
FORGOTTEN = 90.0
"""Seconds: a statement over a connection on which nobody hears any more is given up after 60."""

KILLS = (
    Fault("receiver killed", faults.receiver_killed, 4),
    Fault("daemon killed", faults.daemon_killed, 4),
    Fault("sender killed", faults.sender_killed, 4),
    Fault("PostgreSQL killed", faults.postgres_killed, 3),
)
CUTS = (
    Fault("connections cut", faults.connections_cut, 3),
    Fault("answers cut in their middle", faults.answers_cut, 4),
)
LONGER = (
    Fault("one process of PostgreSQL killed", faults.backend_killed, 2),
    Fault("all of them killed at once", faults.all_killed),
    Fault("black hole for requests, 12 s", faults.requests_lost),
    Fault("black hole for answers, 12 s", faults.answers_lost),
    Fault("black hole both ways, 12 s", faults.both_lost),
    Fault("connections forgotten", faults.connections_forgotten, limit=FORGOTTEN),
    Fault("network slower by 0.15 s each way, 12 s", faults.slow_network),
    Fault("no connection left, 6 s", faults.too_many_connections),
    Fault("commits slower by 0.1 s, 12 s", faults.slow_commits),
    Fault("events locked by somebody, 12 s", faults.events_locked),
    Fault("sends locked by somebody, 12 s", faults.sends_locked),
)
DISK = Fault("disk full, 8 s", faults.disk_full)
CLOCK = Fault("the database's clock is set", faults.clock_steps, 2)
UPGRADE = (
    Fault("upgrade: schema migrated", faults.schema_migrated),
    Fault("upgrade: receiver replaced", faults.receiver_upgraded),
    Fault("upgrade: a new daemon beside the old, a new sender", faults.daemon_joined),
    Fault("upgrade: the old ones gone", faults.old_ones_gone),
)
POOLER = (
    Fault("a pooler comes between", faults.to_pooler),
    Fault("behind a pooler: pooler killed", faults.pooler_killed, 2),
    Fault("behind a pooler: receiver killed", faults.receiver_killed),
    Fault("behind a pooler: daemon killed", faults.daemon_killed),
    Fault("behind a pooler: sender killed", faults.sender_killed),
    Fault("behind a pooler: PostgreSQL killed", faults.postgres_killed),
    Fault("behind a pooler: connections cut", faults.connections_cut),
    Fault("behind a pooler: black hole both ways, 12 s", faults.both_lost),
)


@dataclass(frozen=True)
class Plan:
    """What happens in a run. `whole`: also what only some machines allow; `commits`: strikes at every commit point."""

    always: Sequence[Fault]
    whole: bool
    commits: bool
    only: str = ""
    """Of the faults only those whose name holds this text."""

    @property
    def upgrades(self) -> bool:
        """Whether it begins with an older program: all steps of the upgrade belong together."""
        return self.whole and any(self.only in fault.name for fault in UPGRADE)

    def faults(self, world: World) -> list[Fault]:
        """Return the faults before a pooler comes, one at a time, in the order of the seed; an upgrade first."""
        wanted = [*self.always, *([DISK] if world.disk else []), *([CLOCK] if world.clock else [])]
        each = self._each(wanted)
        Random(world.seed).shuffle(each)
        return [*(UPGRADE if world.older else ()), *each]

    def behind_pooler(self, world: World) -> list[Fault]:
        """Return what happens behind a pooler."""
        each = self._each(POOLER[1:])
        Random(world.seed).shuffle(each)
        return [POOLER[0], *each] if world.pooler and each else []

    def _each(self, wanted: Sequence[Fault]) -> list[Fault]:
        return [replace(fault, times=1) for fault in wanted for _ in range(fault.times) if self.only in fault.name]

    def not_tried(self, world: World) -> list[str]:
        """Return what this machine doesn't allow, or the plan leaves out."""
        reasons = {
            DISK.name: (world.disk, "needs root, to mount a small file system"),
            CLOCK.name: (world.clock, "needs libfaketime (Debian's package faketime)"),
            "rolling upgrade": (
                world.older or (self.whole and not self.upgrades),
                "needs a git checkout with its history",
            ),
            "a pooler": (world.pooler, "needs pgbouncer"),
        }
        return [
            f"{name}: {why if self.whole else 'not in the small version'}"
            for name, (there, why) in reasons.items()
            if not there
        ]


WHOLE = Plan((*KILLS, *CUTS, *LONGER), whole=True, commits=True)
SMALL = Plan(tuple(replace(fault, times=1, limit=PATIENCE) for fault in (*KILLS, *CUTS)), whole=False, commits=False)
"""How long it takes says how busy the tests' machine is."""
