# SPDX-License-Identifier: Apache-2.0
"""The image and the compose file: linted, and of one mind with the program and the chart."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from reconciler.cli.commands import cli
from reconciler.configuration.settings import Settings, load_settings
from reconciler.serving.daemon import DRAIN_SECONDS
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
VALUES = yaml.safe_load((ROOT / "helm/values.yaml").read_text("utf-8"))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))


def instructions(name: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)


def variables() -> dict[str, str]:
    """Return the environment of the image, which is what its last stage sets."""
    return dict(re.findall(r"(\w+)=(\S+)", instructions("ENV")[-1]))


def test_hadolint_finds_nothing():
    beside = Path(sys.executable).parent / "hadolint"
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_that_the_image_is_made_of_is_let_in_and_nothing_else():
    lines = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line.removeprefix("!") for line in lines[1:] if line.startswith("!")}
    copied = {
        part.removeprefix("./") for line in instructions("COPY") if "--from" not in line for part in line.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in let_in)
    assert any(fnmatch.fnmatch("**/__pycache__", line) for line in lines)


def test_all_that_is_installed_was_fetched_by_its_hash():
    fetches, installs = (
        [line for run in instructions("RUN") for line in run.split("&&") if f" {word} " in line]
        for word in ("download", "install")
    )
    assert len(fetches) == len(installs) == 1
    assert "--require-hashes" in fetches[0]
    assert "--no-index --find-links /wheels" in installs[0]
    assert "-d /wheels" in fetches[0]


def test_the_image_and_the_chart_are_of_one_mind(tmp_path):
    user = VALUES["podSecurityContext"]["runAsUser"]
    assert instructions("USER") == [f"{user}:{user}"]
    assert instructions("EXPOSE") == [str(VALUES["settings"]["receiver"]["port"])]
    environ = variables()
    assert load_settings(None, {"XDG_DATA_HOME": environ["XDG_DATA_HOME"]}, PROVIDERS).database.data_dir == Path(
        VALUES["settings"]["database"]["data_dir"]
    )
    assert environ["RECONCILER_CONFIG"] == "/etc/esp-reconciler/reconciler.toml"
    (written,) = re.findall(r"printf '(.*)' > (\S+)", " ".join(instructions("RUN")))
    assert written[1] == environ["RECONCILER_CONFIG"]
    file = tmp_path / "reconciler.toml"
    file.write_text(written[0].replace("\\n", "\n"))
    assert load_settings(file, {}, PROVIDERS).receiver.host == VALUES["settings"]["receiver"]["host"]


def test_the_health_check_asks_where_the_program_listens():
    assert variables()["HEALTH_URL"] == f"http://127.0.0.1:{Settings().receiver.port}/healthz"


@pytest.mark.parametrize("name", ["migrate", "reconciler"])
def test_compose_runs_commands_that_there_are(name):
    done = CliRunner().invoke(cli, [*COMPOSE["services"][name]["command"], "--help"])
    assert done.exit_code == 0, done.output


def test_compose_gives_the_program_settings_that_it_takes():
    service = COMPOSE["services"]["reconciler"]
    url = service["environment"]["RECONCILER_DATABASE__URL"]
    environ = {name: re.sub(r"\$\{\w+:\?[^}]+\}", "word", text) for name, text in service["environment"].items()}
    file, inside, _ = service["volumes"][0].split(":")
    assert inside == variables()["RECONCILER_CONFIG"]
    settings = load_settings(ROOT / file, environ, PROVIDERS)
    assert [feed.secrets for feed in settings.feeds.values()] == [("word",)]  # nobody runs it with a secret of ours
    assert settings.database.url == "postgresql://reconciler:word@database/mail"
    assert settings.warnings() == []
    assert service["ports"] == [f"127.0.0.1:{settings.receiver.port}:{settings.receiver.port}"]
    assert service["volumes"][1] == "data:" + VALUES["settings"]["database"]["data_dir"]
    database = COMPOSE["services"]["database"]["environment"]
    assert url.startswith(f"postgresql://{database['POSTGRES_USER']}:")
    assert url.endswith(f"@database/{database['POSTGRES_DB']}")


def test_compose_waits_for_the_program_to_end_and_lets_it_write_nowhere():
    service = COMPOSE["services"]["reconciler"]
    assert int(service["stop_grace_period"].removesuffix("s")) > 2 * DRAIN_SECONDS + 10
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    for name in ("migrate", "reconciler"):
        assert COMPOSE["services"][name]["depends_on"]
