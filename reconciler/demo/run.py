# SPDX-License-Identifier: Apache-2.0
"""The demo's course: a database, a provider, three senders side by side, and passes until what can be is decided."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp

from reconciler import composition
from reconciler.breakable import Esp, Fates, Telling, Webhook, esp
from reconciler.configuration.settings import Settings
from reconciler.demo import stand
from reconciler.demo.counting import Counted, Figures, counted, duplicates_among, held_arrived, read_ledger
from reconciler.demo.ways import CALM, Caller, key_of, naive_retry, never_retry, reconciled, send_released
from reconciler.insight.why import Story, tell
from webhooks.database import BoundedPool

RATE: Final = 60.0
"""Messages a second that each sender begins."""

LEARNT: Final = 700
"""Messages after which passes begin: before, too few answered sends are as old as the silence that is to be judged."""

MOST_SECONDS: Final = 36.0
"""For which messages are sent; a machine that is slower sends fewer."""

SETTLE_SECONDS: Final = 12.0
"""For which the last verdicts are waited for, and the evidence of the first releases: others follow them."""

LOOK_SECONDS: Final = 0.5
AT_ONCE: Final = 200
"""Messages under way, of all three senders together."""

FATES: Final = Fates(hangs=0.013, reset=0.006, late_error=0.006, lost=0.025)
"""Of a call: one in twenty has no answer, and of these every second was taken."""

TELLING: Final = Telling(delay=(0.05, 1.0), tail=0.02, tail_delay=(1.0, 2.0), twice=0.05, shuffled=True)
"""Of webhooks: most come within a second, some a second later, some twice, and in any order."""

Watch = Callable[[str, Figures | None], None]
"""Is told the phase and, once there are any, the figures."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a demo came to."""

    figures: Figures
    stories: list[Story]
    """Of a send that was released, and of one that is held, where there are such."""


async def run(seed: int, sends: int, watch: Watch) -> Ended:
    """Run the demo, and leave nothing behind. Raises UserError where there is no PostgreSQL to be had."""
    with stand.folder() as root:
        secret = secrets.token_hex(16)
        settings = stand.settings_in(root, secret)
        watch("starting a PostgreSQL of its own", None)
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(stand.senders_pool(settings))
            url = await stack.enter_async_context(stand.receiving(settings))
            naive = await stack.enter_async_context(_sender(seed))
            never = await stack.enter_async_context(_sender(seed))
            ours = await stack.enter_async_context(_sender(seed, Webhook(url, secret)))
            return await Trial(seed, sends, settings, pool, naive, never, ours).run(watch)


@dataclass(frozen=True, slots=True)
class Sender:
    """One of the three: its client, and a provider of its own, which meets it with the same faults as the others."""

    caller: Caller
    provider: Esp

    def count(self, through: Collection[str], undecided: Collection[str] = ()) -> Counted:
        """Count what the recipients got of messages that it is through with."""
        return counted(self.provider.taken, through, self.caller.calls, undecided)


@asynccontextmanager
async def _sender(seed: int, webhook: Webhook | None = None) -> AsyncIterator[Sender]:
    async with (
        esp(stand.PROVIDER, seed=seed, telling=TELLING, webhook=webhook) as provider,
        aiohttp.ClientSession() as session,
    ):
        yield Sender(Caller(session, provider.url), provider)


class Trial:
    """Three senders and one ledger."""

    def __init__(
        self, seed: int, sends: int, settings: Settings, pool: BoundedPool, naive: Sender, never: Sender, ours: Sender
    ) -> None:
        self._seed, self._sends, self._settings, self._pool = seed, sends, settings, pool
        self._naive, self._never, self._ours = naive, never, ours
        self._phase = ""
        self._learnt = asyncio.Event()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(self, watch: Watch) -> Ended:
        """Send, decide, and return what it came to."""
        try:
            async with asyncio.TaskGroup() as group:
                aside = [group.create_task(send_released(self._pool, self._ours.caller))]
                aside.append(group.create_task(self._show(watch)))
                sending = group.create_task(self._send())
                self._phase = "sending; webhooks prove sends; silence is judged once it is known how soon they come"
                await self._learnt.wait()
                async with stand.deciding(self._settings):
                    self._phase = "sending; passes judge silence too"
                    await sending
                    self._phase = "sending has ended; passes still look at the last ones: proved, released, or held"
                    await self._settled()
                    for task in aside:
                        task.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return Ended(await self._figures(), await self._stories())

    async def _send(self) -> None:
        """Begin the messages of all senders at their pace. The provider answers all of the first and of the last."""
        first = min(CALM, self._sends)
        last = max(first, self._sends - CALM)
        async with asyncio.TaskGroup() as group:
            await asyncio.gather(*await self._begin(group, range(first)))
            self._let_fail(FATES)
            await self._begin(group, range(first, last))
            self._let_fail(Fates())
            await asyncio.gather(*await self._begin(group, range(last, self._sends)))
            self._let_fail(FATES)  # whoever still calls again
        self._learnt.set()

    def _let_fail(self, fates: Fates) -> None:
        for sender in (self._naive, self._never, self._ours):
            sender.provider.fates = fates

    async def _begin(self, group: asyncio.TaskGroup, numbers: range) -> list[asyncio.Task[None]]:
        now, tasks = asyncio.get_running_loop().time, []
        begun = now()
        for done, n in enumerate(numbers):
            await asyncio.sleep(max(0.0, begun + done / RATE - now()))
            if now() - begun > MOST_SECONDS:
                break
            for send in self._ways():
                await self._room.acquire()
                task = group.create_task(send(key_of(n)))
                task.add_done_callback(lambda _: self._room.release())
                tasks.append(task)
            if n >= LEARNT:
                self._learnt.set()
        return tasks

    def _ways(self) -> list[Callable[[str], Coroutine[Any, Any, None]]]:
        return [
            partial(naive_retry, self._naive.caller),
            partial(never_retry, self._never.caller),
            partial(reconciled, self._pool, self._ours.caller),
        ]

    async def _settled(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while True:
                    ledger = await read_ledger(self._pool)
                    if not ledger.waiting and "canary" not in ledger.held.values():
                        return
                    await asyncio.sleep(LOOK_SECONDS)  # passes have no event for it

    async def _show(self, watch: Watch) -> None:
        while True:
            watch(self._phase, await self._figures())
            await asyncio.sleep(LOOK_SECONDS)

    async def _figures(self) -> Figures:
        through = [set(sender.caller.through) for sender in (self._naive, self._never, self._ours)]
        ledger = await read_ledger(self._pool)  # knows of all that the senders were through with before
        unanswered, taken = self._never.caller.unclear, self._ours.provider.taken
        return Figures(
            seed=self._seed,
            rules=self._settings.rules,
            wanted=self._sends,
            naive=self._naive.count(through[0]),
            never=self._never.count(through[1]),
            ours=self._ours.count(through[2], ledger.undecided),
            unanswered=len(unanswered),
            unanswered_taken=sum(key in self._never.provider.taken for key in unanswered),
            undecided=len(unanswered.intersection(ledger.waiting)),
            ledger=ledger,
            held_arrived=held_arrived(ledger.held, taken),
            released_duplicates=duplicates_among(ledger.released, taken),
        )

    async def _stories(self) -> list[Story]:
        """Tell of a send that was released, and of one that is held."""
        ledger = await read_ledger(self._pool)
        sent_again = [key for key in ledger.released if key not in ledger.undecided]
        policies = composition.policies(self._settings)
        return [await tell(self._pool, policies, key) for key in (*sent_again[:1], *list(ledger.held)[:1])]


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group: whoever runs this knows what each of them means by itself."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
