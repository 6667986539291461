# SPDX-License-Identifier: Apache-2.0
"""What the chart renders runs: its settings, environment and commands, on a real database, as its pods would."""

from __future__ import annotations

import asyncio
import sys

import pytest
from helm_kit import Chart
from serving import environment, free_port, sample, serving


async def run(config, args, **environ) -> int:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", *args), cwd=config.parent, env=environment(config, **environ)
    )
    return await process.wait()


@pytest.mark.parametrize("half", ["receiver", "reconciler", None])
async def test_the_job_migrates_what_the_pods_wait_for_and_then_they_serve(chart: Chart, empty_dsn, tmp_path, half):
    (tmp_path / "url").write_text(f"{empty_dsn}\n")
    (tmp_path / "key").write_text("key-0123456789abcdef\n")
    rendered = chart.render(
        {
            "split": half is not None,
            "settings": {
                "receiver": {"host": "127.0.0.1", "port": free_port()},
                "database": {"url": f"file:{tmp_path}/url", "data_dir": str(tmp_path / "data")},
                "feeds": {"mg": {"provider": "mailgun", "secrets": [f"file:{tmp_path}/key"]}},
            },
            "env": {"RECONCILER_RULES__GRACE": "20m"},
            "migrate": {"args": ["--namespace", "shop"]},
        }
    )
    config = tmp_path / "reconciler.toml"
    config.write_text(rendered.settings_text())
    pods = {"Deployment": half or "receiver", "Job": "migrate"}
    spec = {kind: rendered.one(kind, of)["spec"]["template"]["spec"] for kind, of in pods.items()}
    (check,), (pod,) = spec["Deployment"]["initContainers"], spec["Deployment"]["containers"]
    environ = rendered.environment("Deployment", pods["Deployment"])
    assert environ.pop("RECONCILER_CONFIG") == f"{mounted(pod, 'settings')}/{config.name}"

    assert await run(config, check["args"], **environ) == 3
    assert await run(config, spec["Job"]["containers"][0]["args"], **environ) == 0
    assert await run(config, check["args"], **environ) == 0
    command, *arguments = pod["args"]
    assert command == "serve"
    async with serving(config, *arguments, **environ) as server:
        assert server.url.endswith(f":{pod['ports'][0]['containerPort']}")
        await server.becomes(200, pod["readinessProbe"]["httpGet"]["path"])
        for path in (pod["startupProbe"]["httpGet"]["path"], pod["livenessProbe"]["httpGet"]["path"], "/metrics"):
            assert await server.status(path) == 200
        if half != "reconciler":
            assert await server.deliver("mg", sample("mg", "accepted", "order-1")) == 200
        assert await server.stop() == 0


def mounted(container: dict, volume: str) -> str:
    (path,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == volume)
    return path
