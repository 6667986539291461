# SPDX-License-Identifier: Apache-2.0
"""What holds for the repository as a whole, and that what is built from it works where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from snippets import block

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
PIN = re.compile(r"^([\w.-]+)==([\w.]+)(?: ; ([^\\\n]*))?", re.MULTILINE)


def run(*command, cwd=ROOT):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def files():
    """Every file that is, or would be, committed: name and bytes."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    found = {name: (ROOT / name).read_bytes() for name in names if name and (ROOT / name).is_file()}
    assert "pyproject.toml" in found
    return found


def test_every_module_names_its_licence_first(files):
    modules = {name: data for name, data in files.items() if name.endswith(".py")}
    assert len(modules) > 30
    first = b"# SPDX-License-Identifier: Apache-2.0\n"
    assert [name for name, data in modules.items() if not data.startswith(first)] == []
    assert files["LICENSE"].count(b"Apache License") >= 2


def test_no_file_names_this_machine(files):
    paths = {f"{ROOT}/"}
    if ROOT.parent not in {Path("/"), Path("/home"), Path(tempfile.gettempdir())}:
        paths.add(f"{ROOT.parent}/")
    assert [name for name, data in files.items() if any(path.encode() in data for path in paths)] == []


def test_no_file_names_a_package_registry(files):
    # Put together here, since this file is looked at too.
    hosts = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "registry." + "npmjs",
        "deb." + "debian.org",
        "proxy." + "golang",
    ]
    words = [*hosts, "index" + "-url"]
    assert [(name, word) for name, data in files.items() for word in words if word.encode() in data] == []


def requirements(*extras):
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return [found for text in texts if (found := Requirement(text)).name != PROJECT["name"]]


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("constraints.txt", ("aws", "docs", "embedded", "dev", "bench")),
        ("requirements.lock", ("aws", "embedded", "otel")),
    ],
)
def test_the_pins_are_those_that_the_project_asks_for(file, extras):
    pins = {canonicalize_name(name): version for name, version, _ in PIN.findall((ROOT / file).read_text("utf-8"))}
    assert len(pins) > 20
    for asked in requirements(*extras):
        name = canonicalize_name(asked.name)
        assert name in pins, f"{name} is missing: make lock"
        assert asked.specifier.contains(pins[name]), f"{name}=={pins[name]} is not {asked.specifier}: make lock"


def test_every_locked_requirement_has_a_hash():
    entries = (ROOT / "requirements.lock").read_text("utf-8").replace("\\\n", " ").splitlines()
    assert [entry for entry in entries if "==" in entry and "--hash=sha256:" not in entry] == []


def test_ci_runs_the_very_command_that_the_readme_gives():
    (command,) = re.findall(
        r"^ *(python3 -m venv \.venv && .*pytest)$", (ROOT / ".ci/run").read_text("utf-8"), re.MULTILINE
    )
    assert block("README.md", "sh", "pytest") == f"{command}\n"


@pytest.mark.parametrize("target", ["lint", "types", "test", "docs"])
def test_make_installs_what_development_needs_into_a_venv_that_has_less_or_older(tmp_path, target):
    """README's first steps make a .venv of another kind, and pyproject.toml changes under one that was complete."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    def would_install():
        return ".[dev]" in run("make", "-n", target, cwd=tmp_path)

    assert would_install()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert would_install()
    stamp = tmp_path / ".venv/dev.stamp"
    stamp.touch()
    assert not would_install()
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(stamp)
        later = stamp.stat().st_mtime_ns + 10**9
        os.utime(tmp_path / name, ns=(later, later))
        assert would_install()
        os.utime(tmp_path / name, ns=(0, 0))
        assert not would_install()


def test_make_leaves_an_environment_of_ones_own_alone(tmp_path):
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "python").touch()
    assert "pip install" not in run("make", "-n", "lint", f"BIN={tmp_path}", cwd=tmp_path)


def test_make_help_lists_every_target():
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[0].split()
    shown = [line.split()[0] for line in run("make", "help").splitlines()]
    assert shown == targets


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment that holds nothing but the wheel, built from the source archive, and what it needs."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("builder", "user"):
        run(sys.executable, "-m", "venv", "--without-pip", str(folder / name))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python"]
    builder, user = (str(folder / name / "bin/python") for name in ("builder", "user"))
    run(*pip, builder, "install", *PYPROJECT["build-system"]["requires"])
    run(builder, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    run(*pip, builder, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(archive))
    (wheel,) = folder.glob("*.whl")
    run(*pip, user, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))
    return folder / "user/bin"


@pytest.mark.index
def test_the_wheel_holds_the_migrations_and_runs_from_any_directory(installed, tmp_path):
    script = "from reconciler.database.migrate import load; print(*(found.name for found in load()))"
    names = run(str(installed / "python"), "-c", script, cwd=tmp_path).split()
    assert names == sorted(path.name for path in (ROOT / "migrations").glob("*.sql"))
    assert "Usage" in run(str(installed / "reconciler"), "--help", cwd=tmp_path)


@pytest.mark.index
def test_nothing_but_the_two_packages_is_installed(installed):
    site = next((installed.parent / "lib").glob("python*/site-packages"))
    record = next(site.glob("esp_reconciler-*.dist-info")) / "RECORD"
    tops = {line.split("/")[0].split(",")[0] for line in record.read_text("utf-8").splitlines()}
    assert {top for top in tops if not top.startswith(("esp_reconciler-", ".."))} == {"reconciler", "webhooks"}
