# SPDX-License-Identifier: Apache-2.0
"""Where settings are written: one TOML file and the environment, merged into one tree that remembers its sources."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reconciler.errors import UserError

PREFIX: Final = "RECONCILER_"
FILE_VARIABLE: Final = "RECONCILER_CONFIG"
DEFAULT_FILE: Final = Path("reconciler.toml")
NAMED_SECTIONS: Final = ("feeds", "classes")
"""Sections whose second level is a name that the user chose."""

_TOML_PLACE: Final = re.compile(r" \(at line (\d+), column \d+\)$")
_TOML_END: Final = re.compile(r" \(at end of document\)$")
_TOML_TABLE: Final = re.compile(r"\s*\[{1,2}([^\[\]]+)\]")
_TOML_KEY: Final = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")

Key = tuple[str, ...]


class ConfigError(UserError):
    """The settings can't be used. Each problem is one line: where it is written, what is wrong, what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class FromEnvironment(str):
    """A value that came from the environment, where a list has to be written as text."""

    __slots__ = ()


@dataclass(frozen=True)
class Written:
    """All settings as written, nested, and where each was written."""

    tree: dict[str, Any]
    file: Path | None
    lines: Mapping[Key, int]
    variables: Mapping[Key, str]
    problems: Sequence[str]

    def where(self, key: Key) -> str:
        """Return the place to look at for a setting: its variable, else file and line, of it or what it belongs to."""
        for length in range(len(key), 0, -1):
            part = key[:length]
            if variable := self._variable(part):
                return variable
            if part in self.lines:
                return f"{self.file}:{self.lines[part]}"
        return str(self.file) if self.file else "settings"

    def _variable(self, part: Key) -> str | None:
        if part in self.variables or part in self.lines:
            return self.variables.get(part)
        return next((name for key, name in self.variables.items() if key[: len(part)] == part), None)


def read_settings(path: Path | None, environ: Mapping[str, str]) -> Written:
    """Read the environment and a file: the argument, else `RECONCILER_CONFIG`, else `reconciler.toml` where it exists.

    Raises ConfigError where the file can't be read.
    """
    file = path or (Path(named) if (named := environ.get(FILE_VARIABLE)) else None)
    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    text = _read_text(file) if file else ""
    tree = _parse(text, file)
    lines = _lines(text)
    variables, problems = _overlay(tree, environ)
    return Written(tree, file, lines, variables, problems)


def _as_variable(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{file}: can't be read ({error.strerror}): check --config and {FILE_VARIABLE}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{file}: is not UTF-8 text: save it as UTF-8"]) from None


def _parse(text: str, file: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text.replace("\r\n", "\n"))
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


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[Key, str], list[str]]:
    """Write the environment's settings over the tree. Names without `__` are other programs' (Kubernetes sets some)."""
    variables: dict[Key, str] = {}
    problems: list[str] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or "__" not in name.removeprefix(PREFIX):
            continue
        key = _key(name, tree)
        if key is None:
            problems.append(f"{name}: names no setting: write {PREFIX}SECTION__SETTING or {PREFIX}FEEDS__NAME__SETTING")
        elif _put(tree, key, FromEnvironment(environ[name])):
            variables[key] = name
        else:
            problems.append(f"{name}: has no place, since {'.'.join(key[:-1])} is no table in the file")
    return variables, problems


def _key(name: str, tree: Mapping[str, Any]) -> Key | None:
    section, *middle, setting = name.removeprefix(PREFIX).lower().split("__")
    if section not in NAMED_SECTIONS:
        return None if middle else (section, setting)
    if not middle:
        return None
    return section, _chosen_name("__".join(middle), tree.get(section)), setting


def _chosen_name(variable_part: str, known: object) -> str:
    names = known if isinstance(known, dict) else {}
    return next((name for name in names if _as_variable(name) == variable_part), variable_part.replace("_", "-"))


def _put(tree: dict[str, Any], key: Key, value: str) -> bool:
    for part in key[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return False
    tree[key[-1]] = value
    return True
