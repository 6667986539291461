# SPDX-License-Identifier: Apache-2.0
"""A provider to break things with: on loopback, over real HTTP, with the faults and webhooks that you ask for.

It has the send API, the signed webhooks and the look-up API of SendGrid, SES, Mailgun, Postmark or Resend, and counts
what it really took. So a test of your own can ask what no real provider answers: did the recipient get one message?

    from reconciler.breakable import Fate, Fates, esp, request

    async def test_a_timeout_makes_no_second_mail() -> None:
        async with esp("mailgun", fates=Fates(busy=0.1)) as provider:
            provider.next_fates.append(Fate.HANGS)  # the first request is taken and never answered
            await send_receipt("order-1", "ada@example.com", url=provider.url)  # your code, with its time-out
            assert provider.taken["order-1"] == 1  # by wire key: webhooks.event.wire_key("order-1")

Requests: each one meets a `Fate`: from `provider.next_fates` while there are any, else drawn with the shares of
`provider.fates`. The nth request of a key has the same fate whenever the seed is the same, in whichever order requests
arrive. Where your code does not build requests itself, `request(shape, key, recipient)` makes a right one.

Webhooks: configure a feed of your receiver with `provider.feed()` (the names are those of `[feeds.NAME]`), then set
`provider.webhook = Webhook("http://127.0.0.1:8080/webhooks/NAME")`. What is said of a message, how late, how often and
in which order is a `Telling`. `await provider.told()` returns once all of it was taken. Postmark never says `accepted`.

Look-ups: `provider.feed()` points a feed's `api_url` at the provider, whose API shows a message after `lag` seconds:
that it was taken, not what became of it. SES has none.

What it does not do: check API keys, take several messages in one request, or render anything. Native idempotency keys
are Resend's, and are never forgotten.
"""

from reconciler.breakable.esp import SHAPES, Esp, esp, request
from reconciler.breakable.fate import Fate, Fates, Said, Telling
from reconciler.breakable.shape import Message
from reconciler.breakable.teller import Webhook

__all__ = ["SHAPES", "Esp", "Fate", "Fates", "Message", "Said", "Telling", "Webhook", "esp", "request"]
