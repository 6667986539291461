# SPDX-License-Identifier: Apache-2.0
"""All settings: names, meanings, defaults, and the checks that refuse a configuration before anything starts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextvars import copy_context
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from reconciler.configuration.facts import against_facts
from reconciler.configuration.retention import paths, refusals
from reconciler.configuration.sources import NAMED_SECTIONS, PREFIX, ConfigError, EnvironmentSource, FileSource, Key
from reconciler.configuration.tables import (
    ApiSettings,
    ArchiveSettings,
    ClassSettings,
    DatabaseSettings,
    FeedRuleSettings,
    FeedSettings,
    LogSettings,
    OutboxSettings,
    ReceiverSettings,
    ReconcileSettings,
    RetentionSettings,
    RuleSettings,
    Section,
    TracingSettings,
    UiSettings,
)
from reconciler.configuration.values import (
    CONTEXT,
    MASK,
    POSTGRES_SCHEMES,
    Context,
    credential_value,
    masked_url,
    url_password,
)
from reconciler.rule.limits import Limit, Live
from reconciler.rule.policy import Rules
from reconciler.units import format_duration
from webhooks.provider import Feed, Provider
from webhooks.registry import PROVIDERS

__all__ = ["ConfigError", "Settings", "load_settings"]

_FEED_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]*", re.ASCII)
_SHORTEST_SECRET: Final = 6
"""Shorter secrets are not looked for in log lines: they would blot out half of each."""


def _feed_name(name: str) -> str:
    if not _FEED_NAME.fullmatch(name):
        raise ValueError("is no name of a feed: use lower-case letters, digits and hyphens, as in sendgrid-main")
    return name


class Settings(Section, BaseSettings):
    """All settings, checked and frozen. Made by `load_settings`; `Settings()` holds the defaults."""

    model_config = SettingsConfigDict(case_sensitive=True)

    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    receiver: ReceiverSettings = ReceiverSettings()
    feeds: dict[Annotated[str, AfterValidator(_feed_name)], FeedSettings] = Field(default_factory=dict)
    rules: FeedRuleSettings = FeedRuleSettings()
    classes: dict[str, ClassSettings] = Field(default_factory=dict)
    reconcile: ReconcileSettings = ReconcileSettings()
    archive: ArchiveSettings = ArchiveSettings()
    api: ApiSettings = ApiSettings()
    ui: UiSettings = UiSettings()
    outbox: OutboxSettings = OutboxSettings()
    retention: RetentionSettings = RetentionSettings()
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(cls, *_: Any, **given: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the sources that `load_settings` made; in code nothing but what is given."""
        return given["init_settings"], *CONTEXT.get().sources

    def rule_settings_for(self, feed: str, message_class: str) -> FeedRuleSettings:
        """Return every rule that holds for a message class on a feed: defaults < rules < feed < class.

        Feeds and classes that are not (or no longer) configured have just the general rules.
        """
        own = {**_own_rules(self.feeds.get(feed)), **_own_rules(self._class(message_class))}
        return self.rules.model_copy(update=own)

    def rules_for(self, feed: str, message_class: str) -> Rules:
        """Return the rules by which a claim of a message class on a feed is decided."""
        held = self.rule_settings_for(feed, message_class)
        own = {
            field.name: getattr(held, field.name) for field in fields(Rules) if field.name in type(held).model_fields
        }
        return Rules(**own, failover=self.failover_for(message_class))

    def limit_for(self, feed: str) -> Limit:
        """Return how much may be released on a feed."""
        held = self.rule_settings_for(feed, "")
        return Limit(held.release_budget, held.release_share, held.canary_share, held.grace)

    def look_up_budget_for(self, feed: str) -> int:
        """Return how many questions a minute a feed's provider may be asked."""
        return self.rule_settings_for(feed, "").look_up_budget

    def waits_for_delivery(self, feed: str) -> bool:
        """Say whether a feed's first event comes from the recipient's server, so that recipients' domains differ."""
        return feed in self.feeds and PROVIDERS[self.feeds[feed].provider].facts.first_event_is_delivery

    def live(self) -> Live:
        """Return the feeds whose sends passes move. Of those in shadow mode they only record what they would do."""
        only = self.rules.mode == "shadow"  # feeds that are not configured are in shadow mode then, too
        names = (name for name in self.feeds if (self.rule_settings_for(name, "").mode == "live") == only)
        return Live(frozenset(names), only)

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

    def database_in_use(self) -> str:
        """Return the database that these settings lead to, without its password."""
        return self.masked()["database"]["url"] or f"embedded in {self.database.data_dir.resolve()}"

    def secret_values(self) -> list[str]:
        """Return what must never reach a log line: whole secrets, and the password in a credential or URL."""
        secrets = [secret for feed in self.feeds.values() for secret in (*feed.secrets, feed.api_key, feed.api_secret)]
        own_urls = (self.database.url, self.database.direct_url, self.outbox.url, self.tracing.endpoint)
        urls = [url for url in own_urls if url]
        own = (*self.outbox.secrets, *self.tracing.secrets, self.ui.session_key or "")
        values = [*secrets, *own, *map(credential_value, (*secrets, *own)), *map(url_password, urls)]
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

    def refusals(self) -> list[str]:
        """Return what is not allowed though each value by itself is, one line each."""
        return list(refusals(self.retention, paths(self.feeds, self._written_rules(), self.classes, self.api)))

    def _written_rules(self) -> dict[str, FeedRuleSettings]:
        return {
            "rules": self.rules,
            **{f"feeds.{n}": self.rule_settings_for(n, "") for n, feed in self.feeds.items() if _own_rules(feed)},
            **{f"classes.{n}": self.rule_settings_for("", n) for n in self.classes},
        }

    def _odd_rules(self) -> Iterator[str]:
        for place, rules in self._written_rules().items():
            if rules.give_up_after < rules.grace:
                yield f"{place}: give_up_after is shorter than grace, which comes first: raise one or lower the other"
        for name, feed in self.feeds.items():
            yield from against_facts(f"feeds.{name}", feed, self.rule_settings_for(name, ""))


_TABLES: Final[dict[str, Any]] = {
    section: (get_args(field.annotation) or (field.annotation,))[-1] for section, field in Settings.model_fields.items()
}


def _own_rules(section: RuleSettings | None) -> dict[str, Any]:
    written = section.model_fields_set if section else ()
    return {name: getattr(section, name) for name in FeedRuleSettings.model_fields if name in written}


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
    return str(value) if isinstance(value, Path | IPv4Network | IPv6Network) else value


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
        problems += settings.refusals()
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
        first = f"{homes[0]}.NAME" if homes[0] in NAMED_SECTIONS else homes[0]
        # What the outbox or tracing has like a feed is more often meant for a feed.
        home = next((section for section in homes if section not in (*NAMED_SECTIONS, "outbox", "tracing")), first)
        return f"; did you mean {home}.{name}?"
    return f": there is {', '.join(_siblings(key))}"


def _close(key: Key) -> str | None:
    """Return the setting that was most likely meant in the table where the key is."""
    return next(iter(get_close_matches(key[-1], _siblings(key), n=1)), None)


def _siblings(key: Key) -> list[str]:
    """Return the settings of the table where the key is; a name that the user chose leads no deeper."""
    table: Any = Settings
    for part in key[:-1]:
        field = table.model_fields.get(part)
        inner = (get_args(field.annotation) or (field.annotation,))[-1] if field else None
        table = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else table
    return list(table.model_fields)


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
