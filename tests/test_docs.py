# SPDX-License-Identifier: Apache-2.0
"""The documents' site: it builds without a broken link or a page that nobody finds, and asks nothing of other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from snippets import ROOT, pages, text_of

DOCS = [page.removeprefix("docs/") for page in pages() if page.startswith("docs/")]
OUTSIDE = re.compile(r"""(?:[(=\s"']|^)(?:https?:)?//(?!www\.w3\.org/)[a-z0-9]""", re.IGNORECASE)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "properdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "properdocs.yml", folder)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser load by itself: not the links that a reader may follow."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.urls += [given.get(name) or "" for name in ("src", "srcset", "poster", "data", "action")]
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.urls.append(given.get("href") or "")
        self.inline.append(given.get("style") or "")

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() and re.match(r"<(script|style)\b", self.get_starttag_text() or ""):
            self.inline.append(data)


def test_every_page_is_built(site: Path) -> None:
    assert {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")} == {*DOCS, "404.md"}


def test_every_page_stands_once_in_the_navigation() -> None:
    named = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "properdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(DOCS)


def test_no_page_makes_a_browser_ask_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = Loaded(path.read_text("utf-8"))
        assert any("bootstrap" in url for url in loaded.urls), path
        assert [url for url in loaded.urls if re.match(r"(?:[a-z]+:)?//", url)] == [], path
        assert [text for text in loaded.inline if OUTSIDE.search(text)] == [], path


def test_no_style_and_no_script_asks_another_host(site: Path) -> None:
    styles = {path: path.read_text("utf-8") for path in site.rglob("*.css")}
    assert styles
    for path, text in styles.items():
        loads = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s;]+)", text)
        assert [url for url in loads if re.match(r"(?:https?:)?//", url)] == [], path
    for path in site.rglob("*.js"):
        named = re.findall(r"[\"'`](?:https?:)?//[^\"'`]*", path.read_text("utf-8"))
        assert [url for url in named if "www.w3.org/" not in url] == [], path


class Parts(HTMLParser):
    """What a page says, without spaces, and how many lists, tables and the like it has."""

    TAGS = ("li", "ol", "ul", "table", "td", "th", "pre", "blockquote", "h1", "h2", "h3", "h4", "strong", "em")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - its names are given
        if tag in self.TAGS:
            self.seen[tag] += 1

    def handle_data(self, data: str) -> None:
        self.text += "".join(data.replace("\N{PILCROW SIGN}", "").split())


@pytest.mark.parametrize("page", DOCS)
def test_a_page_is_the_same_on_the_site_as_where_the_repository_is_read(site: Path, page: str) -> None:
    html = (site / page).with_suffix(".html").read_text("utf-8")
    ours = Parts(html.partition('role="main">')[2].partition("<footer")[0])
    theirs = Parts(MarkdownIt("commonmark").enable("table").render(text_of(f"docs/{page}")))
    differs = next((n for n, (a, b) in enumerate(zip(ours.text, theirs.text, strict=False)) if a != b), 0)
    around = slice(max(0, differs - 40), differs + 40)
    assert (ours.seen, ours.text[around]) == (theirs.seen, theirs.text[around])
    assert ours.text == theirs.text


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_the_files_beside_the_site_lead_to_files(file: str) -> None:
    assert [path for path in LINK.findall((ROOT / file).read_text("utf-8")) if not (ROOT / path).exists()] == []


BROKEN = ("nowhere.md", "#nowhere", "other.md#nowhere", "../README.md", "/other.md")


def test_each_broken_link_a_page_that_nobody_finds_and_one_that_is_not_there_fail_the_build(tmp_path: Path) -> None:
    rules = yaml.safe_load((ROOT / "properdocs.yml").read_text("utf-8"))
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "index.md").write_text("# A\n\n" + "\n".join(f"[x]({link})" for link in BROKEN))
    for name in ("other.md", "hidden.md"):
        (folder / name).write_text("# B\n")
    config = tmp_path / "properdocs.yml"
    config.write_text(yaml.safe_dump({**rules, "nav": ["index.md", "other.md", "missing.md"]}))
    done = build(config, tmp_path / "site")
    assert done.returncode == 1
    wanted = (*(f"'{link}'" for link in BROKEN), "hidden.md", "missing.md")
    assert [what for what in wanted if what not in done.stderr] == [], done.stderr
    assert f"{len(wanted)} warnings in strict mode" in done.stdout
