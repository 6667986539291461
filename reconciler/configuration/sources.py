# SPDX-License-Identifier: Apache-2.0
"""Where settings are written: one TOML file and the environment. Both remember the place of each setting."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource

from reconciler.errors import UserError
from webhooks.signature import CREDENTIAL_SCHEMES

PREFIX: Final = "RECONCILER_"
FILE_VARIABLE: Final = "RECONCILER_CONFIG"
OTHER_VARIABLES: Final = (
    FILE_VARIABLE,
    f"{PREFIX}PG_BIN",
    f"{PREFIX}CITUS_BIN",
    f"{PREFIX}SELFTEST_URL",
    f"{PREFIX}SELFTEST_SMTP",
)
"""Variables that are ours and no settings."""
DEFAULT_FILE: Final = Path("reconciler.toml")
NAMED_SECTIONS: Final = ("feeds", "classes")
"""Sections whose second level is a name that the user chose."""

LIKE: Final = 0.85
"""How like a setting's a name is that was probably meant for it, by difflib's ratio."""

_JOINT: Final = "\0"
"""Parts the names in a key. Not `__`: a class may be called a__b."""
_TOML_PLACE: Final = re.compile(r" \(at line (\d+), column \d+\)$")
_TOML_END: Final = re.compile(r" \(at end of document\)$")
_TOML_TABLE: Final = re.compile(r"\s*\[{1,2}([^\[\]]+)\]")
_TOML_KEY: Final = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_NAMED_VARIABLE: Final = re.compile(r"\benv:(\w+)")
# What Kubernetes gives to every container of a namespace with a Service called reconciler, or reconciler-NAME.
_OF_SERVICE: Final = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://")

Key = tuple[str, ...]


class ConfigError(UserError):
    """The settings can't be used. Each problem is one line: where it is written, what is wrong, what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class FileSource(InitSettingsSource):
    """One TOML file: the argument, else that of `RECONCILER_CONFIG`, else `reconciler.toml` where it exists.

    The library's own TOML source passes over a file that isn't there, stops at a byte order mark, and knows no lines.
    Raises ConfigError where the file can't be read.
    """

    def __init__(self, settings: type[BaseSettings], path: Path | None, environ: Mapping[str, str]) -> None:
        if path is None and (named := environ.get(FILE_VARIABLE)):
            path = Path(named)
        self.path = path or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
        text = _read_text(self.path) if self.path else ""
        self.lines = _lines(text)
        self.named = frozenset(_NAMED_VARIABLE.findall(text))
        """Variables in which settings may lie."""
        super().__init__(settings, _parse(text, self.path))


class EnvironmentSource(EnvSettingsSource):
    """Variables `RECONCILER_SECTION__SETTING`. Without `__` one is misspelt, unless it is known to be no setting."""

    def __init__(self, settings: type[BaseSettings], environ: Mapping[str, str], file: FileSource) -> None:
        super().__init__(settings, env_prefix="", env_nested_delimiter=_JOINT)
        self.file = file
        names = [name for name in sorted(environ) if name.startswith(PREFIX) and "__" in name.removeprefix(PREFIX)]
        keys = {name: _key(name, file.init_kwargs) for name in names}
        self.variables = {key: name for name, key in keys.items() if key and _has_place(key, file.init_kwargs)}
        self.problems = [
            f"{name}: names no setting: write {PREFIX}SECTION__SETTING or {PREFIX}FEEDS__NAME__SETTING"
            for name in names
            if not keys[name]
        ]
        self.problems += _misspelt(environ, file.named, lambda: _all_variables(settings, file.init_kwargs, PREFIX))
        self.env_vars = {_JOINT.join(key): environ[name] for key, name in self.variables.items()}

    def __call__(self) -> dict[str, Any]:
        """Return the variables' settings as a tree. Unknown sections are kept, so that they are refused."""
        return {key[0]: {} for key in self.variables} | super().__call__()

    def place_of(self, key: Key) -> str:
        """Return where to look for a setting: its variable, else file and line, of it or what it belongs to."""
        for length in range(len(key), 0, -1):
            part = key[:length]
            if part in self.file.lines and part not in self.variables:
                return f"{self.file.path}:{self.file.lines[part]}"
            if within := [name for found, name in self.variables.items() if found[:length] == part]:
                return within[0]
        return str(self.file.path or "settings")

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: str) -> Any:  # noqa: ARG002
        """Read a list: one bare value, JSON, or values parted by commas.

        A comma in a credential (`basic:user:pass,word`) is part of it: several of those have to be written as JSON.
        """
        if value.startswith(CREDENTIAL_SCHEMES):
            return [value]
        if not value.lstrip().startswith("["):
            return [part.strip() for part in value.split(",")]
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None  # no list, which is then told with its place


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{file}: can't be read ({error.strerror}): check --config and {FILE_VARIABLE}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{file}: is not UTF-8 text: save it as UTF-8"]) from None


def _parse(text: str, file: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError([f"{file}: is nested too deeply: settings have at most a few levels"]) from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        found = _TOML_PLACE.search(reason)
        line = int(found[1]) if found else text.count("\n") + 1
        reason = _TOML_END.sub(" at the end of the file", _TOML_PLACE.sub("", reason))
        raise ConfigError([f"{file}:{line}: is not valid TOML: {reason}"]) from None


def _lines(text: str) -> dict[Key, int]:
    """Return the line on which each setting is first written. Good enough to point at; nothing else relies on it."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _TOML_TABLE.match(line):
            table = _dotted(found[1])
            lines.setdefault(table, number)
        elif found := _TOML_KEY.match(line):
            key = table + _dotted(found[1])
            for length in range(len(table) + 1, len(key) + 1):
                lines.setdefault(key[:length], number)
    return lines


def _dotted(text: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", text))


def _key(name: str, tree: Mapping[str, Any]) -> Key | None:
    section, *middle, setting = name.removeprefix(PREFIX).lower().split("__")
    if [section, *middle[:1]] == ["api", "tokens"] and len(middle) > 1:
        api = tree.get("api")
        known = api.get("tokens") if isinstance(api, dict) else None
        return section, "tokens", _chosen_name("__".join(middle[1:]), known), setting
    if section not in NAMED_SECTIONS:
        return None if middle else (section, setting)
    if not middle:
        return None
    return section, _chosen_name("__".join(middle), tree.get(section)), setting


def _misspelt(environ: Mapping[str, str], named: Collection[str], known: Callable[[], Iterable[str]]) -> Iterator[str]:
    """Tell of variables that were probably meant for settings: left alone, another database might be used.

    What is like none of them is somebody else's, an image's tag say.
    """
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    named = {*OTHER_VARIABLES, *named, *_NAMED_VARIABLE.findall("\n".join(ours.values()))}
    wrong = [name for name, value in ours.items() if "__" not in name and not _is_of_others(name, value, named)]
    if not wrong:
        return
    forms = {name.replace("__", "_").removeprefix(PREFIX): name for name in (*known(), *OTHER_VARIABLES)}
    for name in sorted(wrong):
        for close in get_close_matches(name.removeprefix(PREFIX), forms, n=1, cutoff=LIKE):
            yield f"{name}: is no setting; did you mean {forms[close]}?"


def _is_of_others(name: str, value: str, named: Collection[str]) -> bool:
    if name in named or _OF_SERVICE.fullmatch(name):
        return True
    return name.endswith("_PORT") and bool(_SERVICE_URL.match(value))


def _all_variables(table: type[BaseModel], tree: object, start: str) -> Iterator[str]:
    """Yield the variable of every setting; of tables with a name of the user's, those in the file."""
    for name, field in table.model_fields.items():
        variable, below = f"{start}{name.upper()}", tree.get(name) if isinstance(tree, dict) else None
        inner = (get_args(field.annotation) or (field.annotation,))[-1]
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            yield variable
        elif get_origin(field.annotation) is not dict:
            yield from _all_variables(inner, below, f"{variable}__")
        elif isinstance(below, dict):
            for chosen, settings in below.items():
                yield from _all_variables(inner, settings, f"{variable}__{_as_variable(chosen).upper()}__")


def _as_variable(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())


def _chosen_name(variable_part: str, known: object) -> str:
    names = known if isinstance(known, dict) else {}
    as_variables = (name for name in names if _as_variable(name) == variable_part)
    return next(as_variables, variable_part.replace("_", "-"))


def _has_place(key: Key, tree: Any) -> bool:
    """Say whether the file has tables where a variable needs them; where not, the file's mistake is what is told."""
    for part in key[:-1]:
        tree = tree.get(part, {})
        if not isinstance(tree, dict):
            return False
    return True
