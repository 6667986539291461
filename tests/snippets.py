# SPDX-License-Identifier: Apache-2.0
"""The fenced snippets of README.md and docs/: what readers copy. tests/test_snippets.py says which test runs each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
_FENCE: Final = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Snippet(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    """Why no test runs it."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README and every page of docs/, from the root of the repository."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


@cache
def snippets(page: str) -> tuple[Snippet, ...]:
    text = text_of(page)
    return tuple(
        Snippet(page, text.count("\n", 0, one.start("language")) + 1, one["language"], one["text"], one["why"])
        for one in _FENCE.finditer(text)
    )


def every() -> list[Snippet]:
    return [one for page in pages() for one in snippets(page)]


def blocks(page: str, language: str, *words: str) -> list[str]:
    """The texts of a page's snippets in a language that hold these words."""
    return [one.text for one in snippets(page) if one.language == language and all(word in one.text for word in words)]


def block(page: str, language: str, *words: str) -> str:
    """The only one."""
    (found,) = blocks(page, language, *words)
    return found


def statements(script: str) -> Iterator[list[str]]:
    """The commands of a script in words, each over as many lines as it has; no more shell than documents need."""
    begun = ""
    for line in script.splitlines():
        begun += line + "\n"
        if begun.endswith("\\\n"):
            continue
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        begun = ""
        if words:
            yield words
    assert not begun, begun
