# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/settings.md from the code: python -m tests.settings_page (`make docs` runs it).

Names, defaults, bounds and meanings are those of `reconciler.configuration`; what is not between the two marks is
written by hand.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import FeedRuleSettings, RuleSettings
from reconciler.units import format_duration

PAGE: Final = Path(__file__).parent.parent / "docs/settings.md"
BEGIN: Final = "<!-- made: settings -->\n"
END: Final = "<!-- /made -->\n"

KINDS: Final = {
    "bool": "true or false",
    "str": "text",
    "Whole": "whole number",
    "Number": "number",
    "Size": "bytes, or as in `25MB`",
    "Duration": "duration",
    "Tolerance": 'duration, or `"off"`',
    "CapWindow": '`"day"`, `"week"`, `"month"`, or a duration',
    "TimeZone": "time zone",
    "Secret": "secret",
    "FeedSecret": "secret",
    "CollectorSecret": "secret",
    "WebhookSecret": "secret, `whsec_...`",
    "SessionKey": "secret, 32 characters or more",
    "TokenHash": "secret, `sha256:...`",
    "DatabaseUrl": "secret, `postgresql://...`",
    "HttpUrl": "URL",
    "S3Url": "URL, `s3://...`",
    "RelativePath": "path",
    "Network": "network",
    "HeaderName": "name of a header",
    "HostName": "text",
    "Topic": "ARN",
    "Scope": '`"send"`, `"operate"`, `"read"`',
}
"""What the types of settings are called. One that is not here stops the page from being made."""

WORD: Final = {"data_dir": "`~/.local/share/esp-reconciler`"}
"""Defaults that depend on the machine."""

RULES: Final = FeedRuleSettings.model_fields
BY_RULES: Final = ("feeds.NAME", "classes.NAME")
"""Tables that may have rules of their own."""


class Table(NamedTuple):
    """A table of the settings file, as a table of the page."""

    name: str
    section: type[BaseModel]


def tables() -> Iterator[Table]:
    """Return every table of the settings file in order; below a name in capitals, the user's own names."""
    for name, field in Settings.model_fields.items():
        section = (get_args(field.annotation) or (field.annotation,))[-1]
        place = f"{name}.NAME" if get_args(field.annotation) else name
        yield Table(place, section)
        for inner, own in section.model_fields.items():
            if named := [arg for arg in get_args(own.annotation) if _is_table(arg)]:
                yield Table(f"{place}.{inner}.NAME", named[0])


def _is_table(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


class Said(NamedTuple):
    """What the source says of a setting."""

    annotation: ast.expr
    meaning: str


def said(section: type[BaseModel]) -> dict[str, Said]:
    """Return annotation and docstring of each setting that a table has, its bases' too."""
    found: dict[str, Said] = {}
    for base in reversed(section.__mro__):
        if base is BaseModel or not issubclass(base, BaseModel):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = Said(line.annotation, _docstring(after))
    return found


def _docstring(line: ast.stmt | None) -> str:
    match line:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""


def kind(annotation: ast.expr) -> str:
    """Return what a type is called. Raises KeyError for one that has no name yet."""
    match annotation:
        case ast.BinOp(left=left):  # X | None
            return kind(left)
        case ast.Subscript(value=ast.Name("OneOrMany"), slice=of):
            return f"list: {kind(of)}"
        case ast.Subscript(value=ast.Name("Literal"), slice=ast.Tuple(elts=words)):
            return ", ".join(f'`"{word.value!s}"`' for word in words if isinstance(word, ast.Constant))
        case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts=[of, *_])):
            return kind(of)
        case ast.Name(name):
            return KINDS[name]
    raise KeyError(ast.unparse(annotation))


def bounds(field: FieldInfo) -> str:
    """Return the least and greatest value, where it has any."""
    given = [*field.metadata, *(one for arg in get_args(field.annotation) for one in getattr(arg, "__metadata__", ()))]
    given += [one for nested in given if isinstance(nested, FieldInfo) for one in nested.metadata]
    least = [f"{_short(one.ge)} or more" for one in given if isinstance(one, Ge)]
    above = [f"above {_short(one.gt)}" for one in given if isinstance(one, Gt)]
    most = [f"{_short(one.le)} at most" for one in given if isinstance(one, Le)]
    return "".join(f"; {text}" for text in least + above + most)


def _short(value: Any) -> str:
    if isinstance(value, timedelta):
        return format_duration(value) if value else "0"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"


def default(name: str, field: FieldInfo) -> str:
    """Return the default as one would write it."""
    if name in WORD:
        return WORD[name]
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    match value:
        case None | () | "":
            return "-"
        case bool():
            return f"`{str(value).lower()}`"
        case timedelta():
            return f'`"{format_duration(value)}"`'
        case str():
            return f'`"{value}"`'
        case tuple():
            return "`[" + ", ".join(f'"{one}"' for one in value) + "]`"
    return f"`{value}`"


def rows(table: Table) -> Iterator[str]:
    """Return a table's lines: the settings that are its own."""
    inherited = RULES if table.name in BY_RULES else ()
    for name, (annotation, meaning) in said(table.section).items():
        field = table.section.model_fields.get(name)
        if field is None or name in inherited or any(map(_is_table, get_args(field.annotation))):
            continue
        what = (kind(annotation) + bounds(field)).replace("|", "\\|")
        yield f"| `{name}` | {what} | {default(name, field)} | {meaning} | `{variable(table, name)}` |\n"


def variable(table: Table, name: str) -> str:
    """Return the environment variable of a setting."""
    return "RECONCILER_" + "__".join([*table.name.upper().split("."), name.upper()])


def _places(table: Table) -> str:
    if table.name == "rules":
        only = ", ".join(f"`{name}`" for name in RULES if name not in RuleSettings.model_fields)
        return f"Each may also stand in a feed's table or, but for {only}, in a class's, which wins.\n\n"
    if table.name in BY_RULES:
        return "And every rule of `[rules]` that holds for it.\n\n"
    return ""


def reference() -> str:
    """Return the tables of all settings."""
    parts = []
    for table in tables():
        about = " ".join((table.section.__doc__ or "").split())
        lines = "".join(rows(table))
        head = "| setting | type | default | meaning | environment |\n|---|---|---|---|---|\n" if lines else ""
        parts.append(f"## `[{table.name}]`\n\n{about}\n\n{_places(table)}{head}{lines}\n")
    return "".join(parts)


def made(text: str) -> str:
    """Return the page with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{reference()}{END}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(made(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
