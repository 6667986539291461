# SPDX-License-Identifier: Apache-2.0
"""The chart: it lints, what it renders is valid, fits together, is locked down, and runs the program as it is."""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
from copy import deepcopy

import pytest
import yaml
from aiohttp import web
from click.testing import CliRunner
from helm_kit import CHART, FOLDER, VALUES, Rendered, at, branch, merged, read
from prometheus_client import REGISTRY, generate_latest
from snippets import block

from reconciler.cli.commands import cli
from reconciler.database.grants import KINDS
from reconciler.otel import CLOSE_SECONDS
from reconciler.serving.daemon import DRAIN_SECONDS
from reconciler.serving.health import Health
from webhooks.database import ACQUIRE_SECONDS

OURS = ("ServiceMonitor", "PrometheusRule", "ExternalSecret")
"""Kinds that Kubernetes itself doesn't know."""


@pytest.fixture(params=list(VALUES))
def rendered(chart, request) -> Rendered:
    return chart.render(VALUES[request.param])


@pytest.mark.parametrize("name", VALUES)
def test_it_lints_without_a_warning(chart, name):
    report = chart.library.lint(CHART, VALUES[name], strict=True)
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []  # 1 is information: it has no icon


@pytest.mark.parametrize("version", ["1.27.0", "1.31.0", "1.37.0"])
def test_every_object_is_one_that_kubernetes_takes(rendered, version):
    known = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = 0
    for one in rendered.objects:
        if one["kind"] not in OURS:
            known.validate(one, version, strict=True)
            checked += 1
    assert checked >= 6


def test_the_oldest_kubernetes_that_was_tried_is_the_oldest_that_it_is_for():
    assert read(CHART / "Chart.yaml")["kubeVersion"] == ">=1.27.0-0"


def test_custom_resources_are_as_their_operators_define_them(chart):
    jsonschema = pytest.importorskip("jsonschema", reason="kubernetes-validate is not installed")
    schemas = read(FOLDER / "custom_resources.yaml")
    found = [one for one in chart.render(VALUES["full"]).objects if one["kind"] in OURS]
    assert sorted(one["kind"] for one in found) == [
        "ExternalSecret",
        "ExternalSecret",
        "PrometheusRule",
        "ServiceMonitor",
    ]
    for one in found:
        jsonschema.validate(one["spec"], schemas[one["kind"]])


def test_every_object_has_a_name_of_its_own_and_says_whose_it_is(rendered):
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered.objects]
    assert len(names) == len(set(names))
    for one in rendered.objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "esp-reconciler"
        assert one["metadata"]["namespace"] == "mail"
        assert len(one["metadata"]["name"]) <= 63


def test_long_names_stay_names(chart):
    rendered = chart.render({"commonLabels": {}, "fullnameOverride": "a" * 80}, name="b" * 53)
    assert max(len(one["metadata"]["name"]) for one in rendered.objects) <= 63


def selectors(rendered: Rendered) -> list[tuple[str, dict[str, str]]]:
    found = [(f"Service {one['metadata']['name']}", one["spec"]["selector"]) for one in rendered.of("Service")]
    for kind, key in (
        ("Deployment", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        found += [(f"{kind} {one['metadata']['name']}", one["spec"][key]["matchLabels"]) for one in rendered.of(kind)]
    for name, pod in rendered.pods():
        spread = pod["spec"].get("topologySpreadConstraints", [])
        found += [(f"spread of {name}", one["labelSelector"]["matchLabels"]) for one in spread]
    return found


def test_whatever_selects_pods_selects_those_of_one_object(rendered):
    pods = {name: pod["metadata"]["labels"].items() for name, pod in rendered.pods()}
    for what, labels in selectors(rendered):
        selected = [name for name, has in pods.items() if labels.items() <= has]
        assert len(selected) == 1, what
        assert what.endswith(selected[0]), what


def test_whatever_leads_to_pods_leads_to_their_port(rendered):
    deployments = {one["metadata"]["name"]: one for one in rendered.of("Deployment")}
    services = {one["metadata"]["name"]: one for one in rendered.of("Service")}
    assert services.keys() == deployments.keys()
    for name, service in services.items():
        (container,) = deployments[name]["spec"]["template"]["spec"]["containers"]
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= {one["name"] for one in container["ports"]}
    for ingress in rendered.of("Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            backend = path["backend"]["service"]
            assert backend["port"]["name"] in {one["name"] for one in services[backend["name"]]["spec"]["ports"]}
    for scaler in rendered.of("HorizontalPodAutoscaler"):
        assert "replicas" not in deployments[scaler["spec"]["scaleTargetRef"]["name"]]["spec"]


def test_pods_listen_where_the_program_does(chart):
    rendered = chart.render(VALUES["full"])
    (container,) = rendered.one("Deployment", "receiver")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": VALUES["full"]["settings"]["receiver"]["port"]}]


def test_no_pod_may_do_more_than_it_has_to(rendered):
    for name, pod in rendered.pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True, name
            assert rights["allowPrivilegeEscalation"] is False, name
            assert rights["capabilities"] == {"drop": ["ALL"]}, name
        for container in spec["containers"]:
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, name
            assert container["resources"]["limits"].keys() >= {"memory"}, name


def test_whatever_a_pod_mounts_is_there(rendered):
    maps = {one["metadata"]["name"] for one in rendered.of("ConfigMap")} | {"sns-certificates"}
    for name, pod in rendered.pods():
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert {one["name"] for one in container.get("volumeMounts", [])} <= volumes.keys(), name
        assert {one["configMap"]["name"] for one in volumes.values() if "configMap" in one} <= maps, name


@pytest.mark.parametrize(
    ("values", "pods", "job"),
    [
        ({}, ["esp-reconciler"], ["esp-reconciler"]),
        ({"secrets": {"existing": [{"name": "a"}, {"name": "b"}]}}, ["a", "b"], ["a", "b"]),
        (VALUES["full"], ["mail-secrets", "mail-reconciler"], ["mail-secrets", "mail-reconciler-migrate"]),
    ],
)
def test_secrets_come_by_reference_as_files(chart, values, pods, job):
    rendered = chart.render(values)
    assert rendered.of("Secret") == []
    for kind, component, wanted in (("Deployment", "receiver", pods), ("Job", "migrate", job)):
        volumes = rendered.one(kind, component)["spec"]["template"]["spec"]["volumes"]
        (projected,) = (one["projected"] for one in volumes if one["name"] == "secrets")
        assert [one["secret"]["name"] for one in projected["sources"]] == wanted
        assert projected["defaultMode"] == 0o440
    made = {one["spec"]["target"]["name"] for one in rendered.of("ExternalSecret")}
    assert made <= {*pods, *job}


def weight(one: dict) -> int | None:
    """Return the place of an object in the hooks of an install; None for what comes after them."""
    notes = one["metadata"].get("annotations", {})
    return int(notes["helm.sh/hook-weight"]) if "pre-install" in notes.get("helm.sh/hook", "") else None


@pytest.mark.parametrize("name", ["default", "full"])
def test_the_migration_comes_first_and_needs_nothing_that_comes_after_it(chart, name):
    rendered = chart.render(VALUES[name])
    job = rendered.one("Job", "migrate")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    before = {
        (one["kind"], one["metadata"]["name"])
        for one in rendered.objects
        if (place := weight(one)) is not None and place < weight(job)
    }
    spec = job["spec"]["template"]["spec"]
    settings = next(one["configMap"]["name"] for one in spec["volumes"] if one["name"] == "settings")
    assert {("ConfigMap", settings), ("ServiceAccount", spec["serviceAccountName"])} <= before
    own = {one["spec"]["target"]["name"] for one in rendered.of("ExternalSecret") if weight(one) is None}
    (secrets,) = (one["projected"]["sources"] for one in spec["volumes"] if one["name"] == "secrets")
    assert own.isdisjoint(one["secret"]["name"] for one in secrets)
    if rendered.of("NetworkPolicy"):
        assert ("NetworkPolicy", job["metadata"]["name"]) in before


def commands(rendered: Rendered) -> list[list[str]]:
    containers = [
        one
        for _, pod in rendered.pods()
        for one in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        if "args" in one
    ]
    return [one["args"] for one in containers]


def test_pods_run_commands_that_there_are(rendered):
    for args in commands(rendered):
        done = CliRunner().invoke(cli, [*args, "--help"])
        assert done.exit_code == 0, done.output


def test_pods_wait_for_the_schema_that_the_job_makes(chart):
    assert commands(chart.render()) == [
        ["migrate", "--check"],
        ["serve", "--only", "receiver"],
        ["migrate", "--check"],
        ["serve", "--only", "reconciler"],
        ["migrate"],
    ]
    assert commands(chart.render(VALUES["single"])) == [["serve"]]


def test_a_pod_is_given_longer_than_the_program_takes_to_end(rendered, chart):
    # Requests in flight, the work under way, its pools' connections, one pool after the other, and spans.
    needed = 2 * DRAIN_SECONDS + 2 * ACQUIRE_SECONDS + CLOSE_SECONDS
    for one in rendered.of("Deployment"):
        spec = one["spec"]["template"]["spec"]
        hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        assert spec["terminationGracePeriodSeconds"] - int(hook[1]) > needed
    least = int(re.findall(r"(\d+) or more", chart.refusal({"terminationGracePeriodSeconds": 1}))[0])
    assert least - 5 > needed
    assert chart.render({"terminationGracePeriodSeconds": least}).pods()


async def test_probes_ask_what_the_program_answers(rendered):
    app = web.Application()
    Health(()).add_routes(app)
    pages = {one.canonical for one in app.router.resources()}
    for one in rendered.of("Deployment"):
        container = one["spec"]["template"]["spec"]["containers"][0]
        asked = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert asked == ["/healthz", "/healthz", "/readyz"]
        assert pages >= {*asked}
    for one in rendered.of("ServiceMonitor"):
        assert {where["path"] for where in one["spec"]["endpoints"]} <= pages


def test_providers_reach_webhooks_and_nothing_else(chart):
    values = merged(VALUES["single"], {"ingress": {"api": {"enabled": False}}})
    (ingress,) = chart.render(values).of("Ingress")
    (rule,) = ingress["spec"]["rules"]
    assert (rule["host"], [one["path"] for one in rule["http"]["paths"]]) == ("hooks.example.com", ["/webhooks"])


def test_people_reach_the_operators_page_only_where_that_is_wanted(chart):
    def paths(values: dict) -> dict[str, list[str]]:
        return {
            one["metadata"]["name"]: [path["path"] for rule in one["spec"]["rules"] for path in rule["http"]["paths"]]
            for one in chart.render(values).of("Ingress")
        }

    hosts = {"enabled": True, "hosts": ["mail.example.com"]}
    assert paths({}) == {}
    assert paths({"ingress": {"api": hosts}}) == {"esp-reconciler-api": ["/v1"]}
    assert paths({"ingress": {"ui": hosts}}) == {"esp-reconciler-ui": ["/ui"]}


def test_the_migration_grants_each_role_its_kinds(chart):
    (args,) = [found for found in commands(chart.render(VALUES["full"])) if "--namespace" in found]
    assert args == [
        *("migrate", "--namespace", "shop"),
        *("--grant=middleware=shop", "--grant=reader=analyst", "--grant=receiver=mail_receiver"),
        *("--grant=reconciler=mail_daemon", "--grant=sender=shop", "--grant=sender=crm"),
    ]
    assert set(SCHEMA["properties"]["migrate"]["properties"]["grant"]["properties"]) == set(KINDS)


def test_the_dashboard_is_found_by_grafanas_side_car(chart):
    assert chart.render().of("ConfigMap", "esp-reconciler-dashboard") == []
    (found,) = chart.render({"grafanaDashboard": {"enabled": True}}).of("ConfigMap", "esp-reconciler-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    ((name, text),) = found["data"].items()
    assert name == "esp-reconciler.json"
    assert json.loads(text) == json.loads((CHART / "files/dashboard.json").read_text("utf-8"))
    (found,) = chart.render(VALUES["full"]).of("ConfigMap", "mail-reconciler-dashboard")
    assert found["metadata"]["labels"].items() >= {"dashboards": "mail", "team": "mail"}.items()
    assert found["metadata"]["annotations"] == {"grafana_folder": "Mail"}


def values_of(schema: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Name every value; what is handed on to Kubernetes, or to the program, is one."""
    if "$ref" in schema:
        schema = json.loads((CHART / "values.schema.json").read_text())["$defs"][schema["$ref"].rpartition("/")[2]]
    if not schema.get("properties") or path == ("settings",):
        return [path]
    return [found for name, part in schema["properties"].items() for found in values_of(part, (*path, name))]


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NAMED = [path for path in values_of(SCHEMA) if path != ("global",)]
DEFAULTS = read(CHART / "values.yaml")


def explained() -> dict[tuple[str, ...], bool]:
    """Say of each line of values.yaml that sets something whether a comment stands above it."""
    found, path, above = {}, (), ""
    for line in (CHART / "values.yaml").read_text("utf-8").splitlines():
        if key := re.match(r"( *)([\w./-]+):", line):
            path = (*path[: len(key[1]) // 2], key[2])
            found[path] = above.lstrip().startswith("#")
        above = line
    return found


def test_every_value_has_a_meaning_and_a_default():
    comments = explained()
    assert [".".join(path) for path in NAMED if not comments.get(path)] == []
    assert [".".join(path) for path in NAMED if at(DEFAULTS, path) is None] == []


def outcome(chart, values: dict) -> object:
    try:
        return chart.render(values).objects
    except chart.library.HelmError as refusal:
        return str(refusal)


@pytest.mark.parametrize("path", NAMED, ids=".".join)
def test_every_value_does_something(chart, path):
    """Back at its default it renders something else: in the full values, or in the few ones."""
    changed = []
    for name in ("full", "single"):
        values = deepcopy(VALUES[name])
        parent = at(values, path[:-1])
        if not isinstance(parent, dict) or path[-1] not in parent:
            continue
        if parent.pop(path[-1]) == at(DEFAULTS, path):
            parent[path[-1]] = not at(DEFAULTS, path)  # what the full values need is on by default: off, then
        changed.append(outcome(chart, values) != outcome(chart, VALUES[name]))
    assert any(changed), f"{'.'.join(path)} changes nothing, or is missing from tests/helm/values"


def place(path: str, value: object) -> dict:
    return branch(tuple(path.split(".")), value)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (place("replicas", 2), "replicas"),
        (place("receiver.replica", 2), "replica"),
        (place("receiver.replicas", "two"), "replicas"),
        (place("ingress.webhooks.host", "a"), "host"),
        (place("image.digest", "latest"), "digest"),
        (place("settings.receiver.port", 0), "port"),
        (place("settings.database.data_dir", "data"), "data_dir"),
        (place("env", {"RECONCILER_RULES__GRACE": 5}), "RECONCILER_RULES__GRACE"),
        (place("preStopSeconds", -1), "preStopSeconds"),
        (place("ingress.webhooks.enabled", True), "set settings.receiver.public_url"),
        (place("ingress.api.enabled", True), "set ingress.api.hosts"),
        (place("ingress.ui.enabled", True), "set ingress.ui.hosts"),
        (place("migrate.grant.owner", ["app"]), "owner"),
        (place("migrate.grant.sender", ["a=b"]), "sender"),
        (place("secrets.external.enabled", True), "storeRef.name"),
        (place("preStopSeconds", 30), "set it to 70 or more"),
    ],
    ids=str,
)
def test_a_value_that_cant_work_is_refused(chart, values, part):
    assert part in chart.refusal(values)


def test_alerts_ask_for_metrics_that_there_are():
    exposed = set(re.findall(r"^(?:# TYPE )?(\w+)", generate_latest(REGISTRY).decode(), re.MULTILINE))
    families = {one.name for one in REGISTRY.collect()}
    exposed |= {f"{name}{end}" for name in families for end in ("", "_total", "_bucket", "_sum", "_count")}
    rules = [rule for group in read(CHART / "files/alerts.yaml")["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        asked = set(re.findall(r"\breconciler_\w+", rule["expr"]))
        assert asked, rule["alert"]
        assert asked <= exposed, rule["alert"]


def test_the_alerts_are_those_of_the_file_but_the_disabled_ones(chart):
    (rule,) = chart.render(VALUES["full"]).of("PrometheusRule")
    found = {one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]}
    written = {one["alert"]: one for group in read(CHART / "files/alerts.yaml")["groups"] for one in group["rules"]}
    assert written.keys() - found.keys() == set(VALUES["full"]["prometheusRule"]["disabled"])
    for name, one in found.items():
        assert one == {**written[name], "labels": {**written[name]["labels"], "team": "mail"}}


def test_the_chart_is_of_the_programs_version():
    project = tomllib.loads((CHART.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert read(CHART / "Chart.yaml")["appVersion"] == project["version"]


def test_the_notes_say_where_providers_post_and_whom_to_ask(chart):
    assert "https://hooks.example.com/webhooks/ses-eu" in chart.render(VALUES["full"]).notes
    assert "set settings.feeds" in chart.render().notes
    notes = chart.render(VALUES["single"]).notes
    assert "pods wait until" not in chart.render().notes
    assert "deploy/esp-reconciler-receiver -- reconciler status --check" in notes
    for name, values in VALUES.items():
        for line in re.findall(r"-- reconciler (.*)$", chart.render(values).notes, re.MULTILINE):
            done = CliRunner().invoke(cli, [*line.split(), "--help"])
            assert done.exit_code == 0, f"{name}: {done.output}"


def test_a_package_of_it_holds_the_alerts_and_renders_the_same(chart, tmp_path):
    archive = chart.library.package(CHART, destination=tmp_path)
    with tarfile.open(archive) as files:
        held = {"files/alerts.yaml", "files/dashboard.json", "values.schema.json"}
        assert {f"esp-reconciler/{name}" for name in held} <= {*files.getnames()}
    with chart.library.Chart.load(archive) as packed:
        given = packed.render(VALUES["full"], name="esp-reconciler", namespace="mail")
    assert Rendered(given).objects == chart.render(VALUES["full"]).objects


def test_the_documented_values_are_taken(chart):
    rendered = chart.render(yaml.safe_load(block("docs/deploying.md", "yaml")))
    assert [one["spec"]["rules"][0]["host"] for one in rendered.of("Ingress")] == ["hooks.example.com"]
    keys = set(re.findall(r"file:/run/secrets/esp-reconciler/([\w-]+)", rendered.settings_text()))
    assert keys == {"database-url", "sendgrid"}  # those that the command before it puts into the Secret


def test_what_is_rendered_is_stable(chart):
    first, second = (yaml.safe_dump_all(chart.render(VALUES["full"]).objects) for _ in range(2))
    assert first == second
