# SPDX-License-Identifier: Apache-2.0
"""All settings: names, meanings, defaults, and the checks that refuse a configuration before anything starts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextvars import copy_context
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from reconciler.policy import Rules
from reconciler.settings_sources import NAMED_SECTIONS, PREFIX, ConfigError, EnvironmentSource, FileSource, Key
from reconciler.settings_values import (
    CONTEXT,
    MASK,
    POSTGRES_SCHEMES,
    Context,
    DatabaseUrl,
    Duration,
    FeedSecret,
    HttpUrl,
    Number,
    OneOrMany,
    RelativePath,
    S3Url,
    Secret,
    Size,
    Tolerance,
    Topic,
    Whole,
    credential_value,
    masked_url,
    url_password,
)
from reconciler.units import format_duration
from webhooks.provider import Feed, Provider
from webhooks.registry import PROVIDERS

__all__ = ["ConfigError", "Settings", "load_settings"]

_FEED_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*", re.ASCII)
_SHORTEST_SECRET: Final = 6
"""Shorter secrets are not looked for in log lines: they would blot out half of each."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return the XDG data home's `esp-reconciler`, or a folder in the current directory where there is no home."""
    data_home = environ.get("XDG_DATA_HOME", "")
    if data_home.startswith("/"):
        return Path(data_home) / "esp-reconciler"
    home = environ.get("HOME")
    return Path(home) / ".local/share/esp-reconciler" if home else Path("esp-reconciler-data")


class DatabaseSettings(_Section):
    """The PostgreSQL to use. Without `url` an embedded one keeps its files in `data_dir`."""

    url: DatabaseUrl | None = Field(default=None, repr=False)
    direct_url: DatabaseUrl | None = Field(default=None, repr=False)
    """For migrations and LISTEN, where `url` leads through a transaction pooler."""
    data_dir: RelativePath = Field(default_factory=lambda: default_data_dir(CONTEXT.get().environ))
    pool_min_size: Whole = Field(default=1, ge=0, le=1000)
    pool_max_size: Whole = Field(default=10, ge=1, le=1000)


class ReceiverSettings(_Section):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: Whole = Field(default=8080, ge=0, le=65535)
    public_url: HttpUrl | None = None
    """What providers see, without the path."""
    max_body: Size = Field(default=25_000_000, ge=1000)
    """Greatest body of a delivery, in bytes after inflation."""
    queue_events: Whole = Field(default=20_000, ge=1)
    """Events that may wait for the database before deliveries are put off."""
    queue_bytes: Size = Field(default=64_000_000, ge=1000)

    @field_validator("public_url")
    @classmethod
    def _without_slash(cls, url: str | None) -> str | None:
        return url.rstrip("/") if url else url


class RuleSettings(_Section):
    """The rules of release. A feed's or class's own ones count only where they were written (`Settings.rules_for`)."""

    grace: Duration = timedelta(minutes=15)
    """How long after `submit_by` silence is not yet judged."""
    give_up_after: Duration = timedelta(hours=24)
    max_risk: Number = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    """Greatest acceptable probability that a release duplicates a message."""
    max_attempts: Whole = Field(default=5, ge=1)
    submit_within: Duration = Field(default=timedelta(seconds=60), gt=timedelta(0))
    """How long a claimant may take to submit, from its claim."""
    same_key_retry: bool = True
    retry_backoff: Duration = timedelta(seconds=30)
    late_window: Duration = timedelta(days=7)
    """How long evidence is still looked for after a failure."""
    on_unknown: Literal["hold", "fail", "release"] = "hold"
    """What becomes of a send that nobody could testify of until `give_up_after`."""


class FeedSettings(RuleSettings):
    """One configured source of provider events."""

    provider: str
    secrets: OneOrMany[FeedSecret] = Field(default=(), repr=False)
    tolerance: Tolerance = None
    """Greatest age of a signed timestamp, or "off"; None: the provider's default."""
    signed_url: HttpUrl | None = None
    topics: OneOrMany[Topic] = ()
    certificates: RelativePath | None = None
    queue_url: HttpUrl | None = None
    """An SQS queue that is consumed instead of, or beside, HTTP."""
    queue_consumers: Whole = Field(default=1, ge=1, le=32)
    """How many loops take messages from it."""
    region: str | None = None
    """AWS region; without it, that of the queue or topic."""
    endpoint_url: HttpUrl | None = None
    api_key: Secret = Field(default="", repr=False)
    """What this provider's API is asked with."""
    api_secret: Secret = Field(default="", repr=False)
    """The second half of a credential that has two."""
    api_url: HttpUrl | None = None
    api_scope: str = ""
    """The part of the account that is asked: a domain, a message stream, a project; see `reconciler providers NAME`."""

    @field_validator("provider")
    @classmethod
    def _is_known(cls, name: str) -> str:
        known = CONTEXT.get().providers
        if known is not None and name not in known:
            close = get_close_matches(name, known, n=1)
            advice = f'; did you mean "{close[0]}"?' if close else f": there is {', '.join(sorted(known))}"
            raise ValueError(f'names no provider that exists, "{name}"{advice}')
        return name


class ClassSettings(RuleSettings):
    """What holds for one message class."""

    failover: bool = False
    """Whether a retry may go to another feed once each feed with an attempt out says ABSENT."""


class ReconcileSettings(_Section):
    """The scheduler of passes."""

    every: Duration = Field(default=timedelta(seconds=15), gt=timedelta(0))


class ArchiveSettings(_Section):
    """Where raw deliveries are kept, if anywhere."""

    url: S3Url | None = None
    """`s3://bucket/prefix`; none: nothing is archived."""
    region: str | None = None
    endpoint_url: HttpUrl | None = None
    every: Duration = Field(default=timedelta(seconds=60), gt=timedelta(0))
    """How long deliveries are collected before they go to S3 as one file."""
    spool: RelativePath | None = None
    """Where they wait for S3; without it, `archive` in `database.data_dir`."""
    spool_max: Size = Field(default=1_000_000_000, ge=1000)
    """Bytes that may wait there while S3 is away; then the oldest file is dropped, and counted."""


class LogSettings(_Section):
    """What is logged, and how. `auto`: for people on a terminal, else JSON."""

    format: Literal["auto", "json", "console"] = "auto"
    level: Literal["debug", "info", "warning", "error", "critical"] = "info"


def _feed_name(name: str) -> str:
    if not _FEED_NAME.fullmatch(name):
        raise ValueError("is no name of a feed: use lower-case letters, digits and hyphens, as in sendgrid-main")
    return name


class Settings(_Section, BaseSettings):
    """All settings, checked and frozen. Made by `load_settings`; `Settings()` holds the defaults."""

    model_config = SettingsConfigDict(case_sensitive=True)

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    receiver: ReceiverSettings = ReceiverSettings()
    feeds: dict[Annotated[str, AfterValidator(_feed_name)], FeedSettings] = Field(default_factory=dict)
    rules: RuleSettings = RuleSettings()
    classes: dict[str, ClassSettings] = Field(default_factory=dict)
    reconcile: ReconcileSettings = ReconcileSettings()
    archive: ArchiveSettings = ArchiveSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(cls, *_: Any, **given: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the sources that `load_settings` made; in code nothing but what is given."""
        return given["init_settings"], *CONTEXT.get().sources

    def rule_settings_for(self, feed: str, message_class: str) -> RuleSettings:
        """Return every rule that holds for a message class on a feed: defaults < rules < feed < class.

        Feeds and classes that are not (or no longer) configured have just the general rules.
        """
        own = {**_own_rules(self.feeds.get(feed)), **_own_rules(self._class(message_class))}
        return self.rules.model_copy(update=own)

    def rules_for(self, feed: str, message_class: str) -> Rules:
        """Return the rules by which a claim of a message class on a feed is decided."""
        held = self.rule_settings_for(feed, message_class)
        return Rules(**{field.name: getattr(held, field.name) for field in fields(Rules)})

    def failover_for(self, message_class: str) -> bool:
        """Say whether a message class may be retried on another feed."""
        found = self._class(message_class)
        return found is not None and found.failover

    def _class(self, message_class: str) -> ClassSettings | None:
        # A class that only the environment names comes with hyphens, whatever the sender writes.
        return self.classes.get(message_class) or self.classes.get(message_class.replace("_", "-"))

    def webhook_feed(self, name: str, default_tolerance: timedelta | None) -> Feed:
        """Return a feed as its provider's file needs it. The provider's default tolerance holds where none is set."""
        feed = self.feeds[name]
        tolerance = default_tolerance if feed.tolerance is None else feed.tolerance
        url = self.webhook_url(name)
        return Feed(
            name=name,
            provider=feed.provider,
            secrets=feed.secrets,
            tolerance=None if tolerance == "off" else tolerance,
            signed_url=feed.signed_url or url,
            topics=feed.topics,
            certificates=str(feed.certificates) if feed.certificates else None,
            api_key=feed.api_key,
            api_secret=feed.api_secret,
            api_url=feed.api_url.rstrip("/") if feed.api_url else None,
            api_scope=feed.api_scope,
            queue_url=feed.queue_url,
            region=feed.region,
            endpoint_url=feed.endpoint_url,
        )

    def webhook_url(self, feed: str) -> str | None:
        """Return what a feed's provider has to post to; None where `receiver.public_url` is not set."""
        return f"{self.receiver.public_url}/webhooks/{feed}" if self.receiver.public_url else None

    def masked(self) -> dict[str, Any]:
        """Return all settings as one may show them: secrets and passwords as `***`, durations as people write them."""
        return _shown(self, only_written=False)

    def secret_values(self) -> list[str]:
        """Return what must never reach a log line: whole secrets, and the password in a credential or URL."""
        secrets = [secret for feed in self.feeds.values() for secret in (*feed.secrets, feed.api_key, feed.api_secret)]
        urls = [url for url in (self.database.url, self.database.direct_url) if url]
        values = [*secrets, *map(credential_value, secrets), *map(url_password, urls)]
        return [value for value in values if len(value) >= _SHORTEST_SECRET]

    def warnings(self) -> list[str]:
        """Return what is allowed and yet probably not meant, one line each."""
        return [*self._open_ends(), *self._odd_rules()]

    def _open_ends(self) -> Iterator[str]:
        for name, feed in self.feeds.items():
            facts = PROVIDERS[feed.provider].facts
            if not (feed.secrets or feed.topics or (facts.fills_queues and feed.queue_url)):
                what = "topics" if facts.by_topics else "secrets"
                yield f"feeds.{name}: has no {what}, so every delivery is refused: set feeds.{name}.{what}"

    def _odd_rules(self) -> Iterator[str]:
        places = {
            "rules": self.rules,
            **{
                f"feeds.{name}": self.rule_settings_for(name, "")
                for name, feed in self.feeds.items()
                if _own_rules(feed)
            },
            **{f"classes.{name}": self.rule_settings_for("", name) for name in self.classes},
        }
        for place, rules in places.items():
            if rules.give_up_after < rules.grace:
                yield f"{place}: give_up_after is shorter than grace, which comes first: raise one or lower the other"


_TABLES: Final[dict[str, Any]] = {
    section: (get_args(field.annotation) or (field.annotation,))[-1] for section, field in Settings.model_fields.items()
}


def _own_rules(section: RuleSettings | None) -> dict[str, Any]:
    written = section.model_fields_set if section else ()
    return {name: getattr(section, name) for name in RuleSettings.model_fields if name in written}


def _shown(section: BaseModel, *, only_written: bool) -> dict[str, Any]:
    return {
        name: _shown_value(getattr(section, name), secret=not field.repr)
        for name, field in type(section).model_fields.items()
        if name in section.model_fields_set or not only_written
    }


def _shown_value(value: Any, *, secret: bool) -> Any:
    match value:
        case BaseModel():
            # What a feed or a class doesn't set is not its own, so it isn't shown as if it were.
            return _shown(value, only_written=isinstance(value, FeedSettings | ClassSettings))
        case dict():
            return {name: _shown_value(part, secret=secret) for name, part in value.items()}
        case tuple():
            return [_shown_value(part, secret=secret) for part in value]
        case str():
            return MASK if secret and not value.startswith(POSTGRES_SCHEMES) else masked_url(value)
        case timedelta():
            return format_duration(value)
    return str(value) if isinstance(value, Path) else value


def load_settings(path: Path | None, environ: Mapping[str, str], providers: Mapping[str, Provider]) -> Settings:
    """Return the settings of a file and the environment, which wins. See `FileSource` for which file.

    Raises ConfigError with one line a problem, all of them at once.
    """
    file = FileSource(Settings, path, environ)
    environment = EnvironmentSource(Settings, environ, file)
    folder = file.path.parent if file.path else Path()
    context = copy_context()
    context.run(CONTEXT.set, Context(environ, folder, providers, (environment, file)))
    problems = list(environment.problems)
    try:
        settings = context.run(Settings)
    except ValidationError as error:
        found = _unexplained(error.errors(include_input=False, include_url=False))
        problems += [_problem(one, environment) for one in found]
    if problems:
        raise ConfigError(problems)
    return settings


def _unexplained(found: list[Any]) -> list[Any]:
    """Leave out that a setting is missing where another line says that it was misspelt."""
    unknown = [tuple(one["loc"]) for one in found if one["type"] == "extra_forbidden"]
    meant = {(*key[:-1], _close(key)) for key in unknown}
    return [one for one in found if one["type"] != "missing" or tuple(one["loc"]) not in meant]


def _problem(found: Any, written: EnvironmentSource) -> str:
    """Return one line about one thing that pydantic found. No value is ever repeated: it may be a secret."""
    loc = [part for part in found["loc"] if part != "[key]"]
    key = tuple(part for part in loc if isinstance(part, str))
    place = written.place_of(key)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    match found["type"]:
        case "extra_forbidden":
            return f"{place}: unknown setting {name}{_advice(key, place)}"
        case "missing":
            return f"{place}: {name} is missing: set it{_other_feed(key, {*written.file.lines, *written.variables})}"
        case "value_error":
            return f"{place}: {name} {found['ctx']['error']}"
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"{place}: {name} must be a table: write [{name}] and its settings below it"
        case "tuple_type":
            return f'{place}: {name} must be a list: write ["one", "two"]'
        case "bool_parsing":
            return f"{place}: {name} must be true or false"
    return f"{place}: {name} {found['msg'].replace('Input should', 'must')}"


def _advice(key: Key, place: str) -> str:
    *parent, name = key
    if close := _close(key):
        return f"; did you mean {_in_manner_of(place, (*parent, close))}?"
    homes = [section for section, table in _TABLES.items() if name in table.model_fields]
    if homes:
        home = next((section for section in homes if section not in NAMED_SECTIONS), f"{homes[0]}.NAME")
        return f"; did you mean {home}.{name}?"
    return f": there is {', '.join(_siblings(key))}"


def _close(key: Key) -> str | None:
    """Return the setting that was most likely meant in the table where the key is."""
    return next(iter(get_close_matches(key[-1], _siblings(key), n=1)), None)


def _siblings(key: Key) -> list[str]:
    return list((_TABLES[key[0]] if len(key) > 1 else Settings).model_fields)


def _in_manner_of(place: str, meant: Key) -> str:
    """Return the setting that was meant as a variable where the wrong one was a variable, else with dots."""
    if not place.startswith(PREFIX):
        return ".".join(meant)
    first, *others = place.split("__")
    parts = [first, *others[:-1], meant[-1].upper()] if len(meant) > 1 else [PREFIX + meant[0].upper(), *others]
    return "__".join(parts)


def _other_feed(key: Key, written: Collection[Key]) -> str:
    section, name, *_ = key
    names = {found[1] for found in written if found[0] == section and len(found) > 1} - {name}
    close = get_close_matches(name, names, n=1)
    return f', or did you mean feed "{close[0]}"?' if close else ""
