# SPDX-License-Identifier: Apache-2.0
"""The tables of the settings file: names, meanings, defaults, and the checks of single values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reconciler.configuration.values import (
    CONTEXT,
    CapWindow,
    CollectorSecret,
    DatabaseUrl,
    Duration,
    FeedSecret,
    HeaderName,
    HostName,
    HttpUrl,
    Network,
    Number,
    OneOrMany,
    RelativePath,
    S3Url,
    Secret,
    SessionKey,
    Size,
    TimeZone,
    TokenHash,
    Tolerance,
    Topic,
    WebhookSecret,
    Whole,
)
from reconciler.tokens import Scope


class Section(BaseModel):
    """One table: frozen, and a name that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return the XDG data home's `esp-reconciler`, or a folder in the current directory where there is no home."""
    data_home = environ.get("XDG_DATA_HOME", "")
    if data_home.startswith("/"):
        return Path(data_home) / "esp-reconciler"
    home = environ.get("HOME")
    return Path(home) / ".local/share/esp-reconciler" if home else Path("esp-reconciler-data")


class DatabaseSettings(Section):
    """The PostgreSQL to use. Without `url` an embedded one keeps its files in `data_dir`."""

    url: DatabaseUrl | None = Field(default=None, repr=False)
    """As in `postgresql://user:password@host/database`. Run `reconciler migrate` on it once."""
    direct_url: DatabaseUrl | None = Field(default=None, repr=False)
    """For migrations and LISTEN, where `url` leads through a transaction pooler."""
    data_dir: RelativePath = Field(default_factory=lambda: default_data_dir(CONTEXT.get().environ))
    """Where the embedded one, the archive's spool and the heartbeat that tells of a restored backup lie."""
    pool_min_size: Whole = Field(default=1, ge=0, le=1000)
    """Connections that each process keeps open."""
    pool_max_size: Whole = Field(default=10, ge=1, le=1000)
    """Connections that each process opens at most."""


class ReceiverSettings(Section):
    """The HTTP side."""

    host: HostName = "127.0.0.1"
    """The address that is listened on; `0.0.0.0`: all of this machine."""
    port: Whole = Field(default=8080, ge=0, le=65535)
    """0: any that is free."""
    public_url: HttpUrl | None = None
    """What providers see, without the path `/webhooks/FEED`."""
    max_body: Size = Field(default=25_000_000, ge=1000)
    """Greatest body of a delivery, in bytes after inflation."""
    queue_events: Whole = Field(default=20_000, ge=1)
    """Events that may wait for the database before deliveries are put off."""
    queue_bytes: Size = Field(default=64_000_000, ge=1000)
    """Their bytes, likewise."""

    @field_validator("public_url")
    @classmethod
    def _without_slash(cls, url: str | None) -> str | None:
        return url.rstrip("/") if url else url


class RuleSettings(Section):
    """The rules of release. A feed's or class's own ones count only where they were written (`Settings.rules_for`)."""

    grace: Duration = timedelta(minutes=15)
    """How long after `submit_by` silence is not yet judged."""
    give_up_after: Duration = timedelta(hours=24)
    """How long after `submit_by` an undecided send is given up; `on_unknown` says what becomes of it."""
    max_risk: Number = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    """Greatest probability that a release on silence duplicates a message. What the provider's API says releases above
    it, and states 0.1 % or 1.9 %."""
    max_attempts: Whole = Field(default=5, ge=1)
    """How many attempts may have reached the provider before a send fails instead of being released."""
    submit_within: Duration = Field(default=timedelta(seconds=60), gt=timedelta(0), le=timedelta(days=1))
    """How long a claimant over `/v1/sends` may take to submit, from its claim, where it doesn't say. Senders in Python
    and SQL say it in the call (`submit_within`), and have 60 s where they don't."""
    same_key_retry: bool = True
    """Whether a send is tried again with the provider's own idempotency key, where it keeps one."""
    retry_backoff: Duration = timedelta(seconds=30)
    """How long after `submit_by` that waits; it doubles with each further attempt."""
    late_window: Duration = timedelta(days=7)
    """How long evidence is still looked for after a failure. The longest that is set holds for all."""
    on_unknown: Literal["hold", "fail", "release"] = "hold"
    """What becomes of a send that nobody could testify of until `give_up_after`."""
    stress: Annotated[Number, Field(ge=1, le=1e6, allow_inf_nan=False)] | None = None
    """How many times more than answered sends ambiguous ones are missed by the feed; None: learned, 3 at first."""
    prior_floor: Number = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Least probability that an ambiguous send was accepted, before anybody listened. At least 0.5 or 0.95."""
    look_up: Literal["before_release", "silent", "never"] = "silent"
    """When the provider's API is asked about a send: before each release, only where its feed can't tell, or never."""


class FeedRuleSettings(RuleSettings):
    """Rules that hold for a whole feed, or for all feeds."""

    mode: Literal["live", "shadow"] = "live"
    """`shadow`: passes decide and record what they would do, and change nothing."""
    release_budget: Whole = Field(default=1000, ge=0, le=1_000_000)
    """Greatest number of releases an hour, same-key retries not counted."""
    release_share: Number = Field(default=0.2, ge=0, le=1, allow_inf_nan=False)
    """Releases an hour as the greatest share of the feed's claims of that hour; 20 are always allowed."""
    canary_share: Number = Field(default=0.1, ge=0.001, le=1, allow_inf_nan=False)
    """Share of many that is released first; the rest after a grace in which nothing was heard of these. 1: all."""
    look_up_budget: Whole = Field(default=60, ge=0, le=1_000_000)
    """Greatest number of questions to the provider's API a minute."""


class FeedSettings(FeedRuleSettings):
    """One configured source of provider events."""

    provider: str
    """Whose events they are: a name of `reconciler providers`."""
    secrets: OneOrMany[FeedSecret] = Field(default=(), repr=False)
    """What verifies deliveries, any one of them: the provider's key, or `basic:user:password`, `bearer:TOKEN`,
    `header:Name=value`, `query:name=value`. None: every delivery is refused."""
    tolerance: Tolerance = None
    """Greatest age of a signed timestamp, or "off"; None: the provider's default."""
    signed_url: HttpUrl | None = None
    """The URL that the provider signs, where it is not the feed's own under `receiver.public_url`."""
    topics: OneOrMany[Topic] = ()
    """ARNs of the SNS topics that may deliver here. None: every delivery is refused."""
    certificates: RelativePath | None = None
    """A folder of pinned SNS signing certificates; None: they are fetched and cached."""
    queue_url: HttpUrl | None = None
    """An SQS queue that is consumed instead of, or beside, HTTP."""
    queue_consumers: Whole = Field(default=1, ge=1, le=32)
    """How many loops take messages from it."""
    region: str | None = None
    """AWS region; without it, that of the queue or topic."""
    endpoint_url: HttpUrl | None = None
    """Where SQS is, if not at Amazon's own address."""
    api_key: Secret = Field(default="", repr=False)
    """What this provider's API is asked with."""
    api_secret: Secret = Field(default="", repr=False)
    """The second half of a credential that has two."""
    api_url: HttpUrl | None = None
    """Where that API is, if not at its usual address: another region, a proxy."""
    api_scope: str = ""
    """The part of the account that is asked: a domain, a message stream, a project; see `reconciler providers NAME`."""

    @field_validator("provider")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = CONTEXT.get().providers
        if known is not None and name not in known:
            close = get_close_matches(name, known, n=1)
            advice = f'; did you mean "{close[0]}"?' if close else f": there is {', '.join(sorted(known))}"
            raise ValueError(f"names no provider that exists{advice}")
        return name


class ClassSettings(RuleSettings):
    """What holds for one message class."""

    failover: bool = False
    """Whether a retry may go to another feed once each feed with an attempt out says ABSENT."""
    cap: Annotated[Whole, Field(ge=1, le=1000)] | None = None
    """Greatest number of sends to one recipient within `cap_window`; None: any number."""
    cap_window: CapWindow = "day"
    """`day`, `week` or `month` (they begin in `cap_zone`), or how long each send counts."""
    cap_zone: TimeZone = "UTC"
    """Where days, weeks and months begin, by the database's clock."""

    @model_validator(mode="after")
    def _has_what_to_cap(self) -> Self:
        if self.cap is None and self.model_fields_set & {"cap_window", "cap_zone"}:
            raise ValueError("has a window for a cap and no cap: set cap to how many one recipient may get")
        return self


class ReconcileSettings(Section):
    """The scheduler of passes."""

    every: Duration = Field(default=timedelta(seconds=15), gt=timedelta(0))
    """How often a pass runs; an event starts one sooner."""


class ArchiveSettings(Section):
    """Where raw deliveries are kept, if anywhere."""

    url: S3Url | None = None
    """`s3://bucket/prefix`; none: nothing is archived."""
    region: str | None = None
    """AWS region of the bucket."""
    endpoint_url: HttpUrl | None = None
    """Where S3 is, if not at Amazon's own address."""
    every: Duration = Field(default=timedelta(seconds=60), gt=timedelta(0))
    """How long deliveries are collected before they go to S3 as one file."""
    spool: RelativePath | None = None
    """Where they wait for S3; without it, `archive` in `database.data_dir`."""
    spool_max: Size = Field(default=1_000_000_000, ge=1000)
    """Bytes that may wait there while S3 is away; then the oldest file is dropped, and counted."""


class OutboxSettings(Section):
    """How the application is told what became of its sends, besides a notification of the database."""

    tell: OneOrMany[Literal["released", "sent", "failed", "held"]] = ("released",)
    """What became of a send that is worth telling."""
    queue_url: HttpUrl | None = None
    """An SQS queue; or else `url`. Without either nothing is pushed."""
    url: HttpUrl | None = None
    """What messages are posted to, signed by Standard Webhooks with each of the secrets."""
    secrets: OneOrMany[WebhookSecret] = Field(default=(), repr=False)
    """What signs them, `whsec_...`; each signs, so list two while one is being replaced."""
    region: str | None = None
    """AWS region; without it, that of the queue."""
    endpoint_url: HttpUrl | None = None
    """Where SQS is, if not at Amazon's own address."""
    give_up_after: Duration = Field(default=timedelta(days=3), gt=timedelta(0))
    """How long a message is tried before it is left to a person."""

    @model_validator(mode="after")
    def _one_road(self) -> Self:
        if self.url and self.queue_url:
            raise ValueError("has both url and queue_url: keep one")
        if self.url and not self.secrets:
            raise ValueError("has a url and no secrets to sign with: set outbox.secrets to a whsec_ secret")
        return self


class RetentionSettings(Section):
    """How long what is over is kept. What may still be needed stays longer; see docs/retention.md."""

    rows: Duration = timedelta(days=30)
    """Sends, from their end. A job that is older (`intended_at`) is refused, since its row may be gone."""
    events: Duration = timedelta(days=60)
    """Events, dropped by months, and sends that were ambiguous."""
    passes: Duration = timedelta(days=30)
    """Passes, counts of deliveries, ended back-fills, and what processes found."""
    every: Duration = Field(default=timedelta(hours=24), gt=timedelta(0))
    """How often the daemon prunes."""


class TokenSettings(Section):
    """Who may call `/v1/sends`. Its name is the caller's; several hashes are several tokens of his (rotation)."""

    hash: OneOrMany[TokenHash] = Field(repr=False)
    """`sha256:` and the hex digits, as `reconciler token` prints them; the tokens themselves are kept nowhere."""
    scopes: OneOrMany[Scope] = ("send",)
    """`send`: claim, confirm, fail, enqueue. `operate`: decide as an operator does, here and on the page under `/ui/`.
    `read`: look at that page. Each may look at a send."""

    @field_validator("hash", "scopes")
    @classmethod
    def _is_some(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if not given:
            raise ValueError("is empty, so nobody could use this token: fill it, or remove the token's table")
        return given


class ApiSettings(Section):
    """The HTTP API for senders in any language, served by whichever process runs passes."""

    tokens: dict[str, TokenSettings] = Field(default_factory=dict)
    """Without any, every call is refused."""
    idempotency_retention: Duration = Field(default=timedelta(hours=24), ge=timedelta(hours=1))
    """How long an Idempotency-Key is remembered: longer than any client repeats a request."""

    @field_validator("tokens")
    @classmethod
    def _names_one_caller(cls, tokens: dict[str, TokenSettings]) -> dict[str, TokenSettings]:
        owners: dict[str, str] = {}
        for name, token in tokens.items():
            for hashed in token.hash:
                if (owner := owners.setdefault(hashed, name)) != name:
                    raise ValueError(f'has one hash under "{owner}" and "{name}": a token has one name, make a second')
        return tokens


class UiSettings(Section):
    """The operator's page under `/ui/`, served with the API: for tokens that may `read` or `operate`, or by a proxy."""

    session: Duration = Field(default=timedelta(hours=8), gt=timedelta(0), le=timedelta(days=30))
    """How long a sign-in lasts."""
    session_key: SessionKey | None = Field(default=None, repr=False)
    """What sessions are signed with: the same in every process. None: a random one, so they end with their process."""
    proxy_header: HeaderName | None = None
    """The header in which a proxy that has signed people in names them; believed only from `proxy_networks`."""
    proxy_networks: OneOrMany[Network] = ()
    """Where that proxy is. Its X-Forwarded-For is believed, too."""
    proxy_operators: OneOrMany[str] = ()
    """Whom of those that it names may act, `*` for all; the others only look."""

    @model_validator(mode="after")
    def _trusts_somebody(self) -> Self:
        if self.proxy_header and not self.proxy_networks:
            raise ValueError("has a proxy_header that anybody could send: set proxy_networks to where the proxy is")
        return self


class TracingSettings(Section):
    """Where spans go, if anywhere; see docs/tracing.md. Needs the extra `otel`."""

    endpoint: HttpUrl | None = None
    """A collector's OTLP/HTTP endpoint, without `/v1/traces`; none: nothing is traced."""
    secrets: OneOrMany[CollectorSecret] = Field(default=(), repr=False)
    """What it wants to be shown: `bearer:TOKEN`, `basic:user:password` or `header:Name=value`."""
    ratio: Number = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """Share of sends that are traced: the same ones in each process that has the same share."""
    follow_callers: bool = True
    """Whether a call of `/v1/sends` is traced, too, whose caller's own span is sampled (W3C traceparent)."""
    service_name: str = "esp-reconciler"
    """What this process is called in traces."""


class LogSettings(Section):
    """What is logged, and how."""

    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: for people on a terminal, else JSON."""
    level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    """The least that is logged."""
