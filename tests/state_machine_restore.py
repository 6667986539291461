# SPDX-License-Identifier: Apache-2.0
"""The database goes back: a backup is restored. Who remembers more holds everything until a person resumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypothesis.stateful import precondition, rule
from state_machine_ageing import Ageing
from state_machine_base import Seen
from state_machine_truth import Kept
from state_machine_world import BACK_UP, RESTORE

from reconciler.passes.feeds import ALL_FEEDS, resume
from reconciler.passes.restore import Heart

FENCE: Final = "SELECT pg_sequence_last_value('send_fence')"
DRAW_FROM: Final = "SELECT setval('send_fence', $1)"
FORGET_A_HEARTBEAT: Final = "UPDATE feed_state SET heartbeat = heartbeat - 1 WHERE feed = '*'"


@dataclass(frozen=True, slots=True)
class Backup:
    """What it brings back besides its rows, and what all parties would find then."""

    fence: int
    kept: Kept
    seen: Seen
    told: dict[str, tuple[int, str]]
    unmarked: set[int]


class Restores(Ageing):
    """Backups, a process that remembers the last heartbeat, and the person who resumes."""

    def __init__(self) -> None:
        super().__init__()
        self.heart = Heart(self.world.new_folder(), "a process")
        self.backup: Backup | None = None
        self.told: dict[str, tuple[int, str]] = {}
        """The newest entry of the outbox about each send, and what it said."""
        self.unmarked: set[int] = set()
        """Entries that were delivered, and the daemon died before it had marked them."""

    @precondition(lambda self: not self.backup and not self.seen.suspect)
    @rule()
    def a_backup_is_taken(self) -> None:
        self.do(self.backed_up())

    async def backed_up(self) -> None:
        await self.heart.beat(self.db)
        await self.world.clock.execute(BACK_UP)
        fence = await self.world.clock.fetchval(FENCE)
        self.backup = Backup(fence, self.truth.kept(), self.seen, dict(self.told), set(self.unmarked))
        await self.heart.beat(self.db)

    @precondition(lambda self: self.backup)
    @rule()
    def the_backup_is_restored(self) -> None:
        """Under whoever uses the database. Senders and the provider go on, and know more than it does."""
        self.do(self.restored())

    async def restored(self) -> None:
        backup, self.backup = self.backup, None
        assert backup
        await self.all_die()
        await self.observe()  # what was done until now is judged as it was then
        await self.world.clock.execute(RESTORE)
        await self.world.clock.execute(DRAW_FROM, backup.fence)
        self.truth.restored(backup.kept)
        self.seen, self.told, self.unmarked = backup.seen, dict(backup.told), set(backup.unmarked)
        for key, now in self.truth.clock.items():
            await self.move([key], now - backup.kept.clock.get(key, now - now))
        await self.noticed()

    async def made_suspect(self) -> bool:
        """Let the database seem to have gone back: nothing is lost but a heartbeat."""
        await self.heart.beat(self.db)
        await self.world.clock.execute(FORGET_A_HEARTBEAT)
        return await self.noticed()

    async def noticed(self) -> bool:
        assert not await self.heart.check(self.db), "nobody noticed that the database has gone back"
        return True

    @precondition(lambda self: self.seen.suspect)
    @rule()
    def a_person_resumes(self) -> None:
        self.do(self.resumed())

    async def resumed(self) -> None:
        async with self.db.acquire() as connection:
            assert await resume(connection, ALL_FEEDS, "replayed", "ann"), "there was no hold"
        assert await self.heart.check(self.db), "a database that was accepted is suspect still"
