# SPDX-License-Identifier: Apache-2.0
"""Values that are allowed each by itself: together they render what is valid and works, or are refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helm_kit import CHART, VALUES, Object, Rendered, merged, read

SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text("utf-8"))
DEFAULTS: Object = read(CHART / "values.yaml")


def check(rendered: Rendered) -> None:
    """Every object is one that Kubernetes takes, and no text has become a number, a truth or nothing."""
    known = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in rendered.objects:
        if not one["apiVersion"].startswith(("monitoring.", "external-secrets.")):
            known.validate(one, "1.31.0", strict=True)
        named = one["metadata"]
        texts = [named["name"], named["namespace"], *named["labels"].values(), *named.get("annotations", {}).values()]
        assert [text for text in texts if not isinstance(text, str)] == [], named["name"]


WORDS = ("123", "1e3", "on", "null", "~")


@pytest.mark.parametrize("word", WORDS)
def test_a_text_that_looks_like_something_else_stays_a_text(chart, word):
    values = merged(
        VALUES["full"],
        {
            "commonLabels": {"a": word},
            "image": {"tag": "1.0", "digest": ""},
            "env": {"ON": word, "Y": {"secretKeyRef": {"name": "y", "key": "on"}}},
            "migrate": {"priorityClassName": word},
            "receiver": {"priorityClassName": word, "podLabels": {"b": word}, "podAnnotations": {"c": word}},
            "ingress": {"webhooks": {"className": word, "paths": ["/~"]}},
            "secrets": {
                "existing": [{"name": word}],
                "external": {"refreshInterval": "0", "data": {word: {"key": "k"}}},
            },
            "serviceAccount": {"name": word},
            "serviceMonitor": {"labels": {"d": word}},
        },
    )
    name = word if word.isdigit() else "esp-reconciler"
    rendered = chart.render(values, name=name, namespace=name)
    check(rendered)
    for one in rendered.of("ExternalSecret"):
        assert one["spec"]["refreshInterval"] == "0"
        assert [entry["secretKey"] for entry in one["spec"]["data"] if entry["remoteRef"] == {"key": "k"}] == [word]
    (monitor,) = rendered.of("ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == name
    assert monitor["spec"]["namespaceSelector"]["matchNames"] == [name]


def test_a_large_number_stays_a_whole_number(chart):
    """Helm reads numbers as floats, and 2000000 as 2e+06."""
    large = 2_000_000
    values: Object = {
        "terminationGracePeriodSeconds": large,
        "preStopSeconds": 1_000_000,
        "migrate": {"activeDeadlineSeconds": large, "backoffLimit": large},
        "podSecurityContext": {"runAsUser": 1_000_650_000},
        "receiver": {"replicas": large},
    }
    rendered = chart.render(values)
    check(rendered)
    spec = rendered.one("Deployment", "receiver")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == 1_000_650_000
    assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "1000000"]


def test_an_objects_own_labels_win_over_those_of_every_object(chart):
    own = {"labels": {"team": "own"}, "enabled": True}
    values = merged(
        {"commonLabels": {"team": "common"}, "receiver": {"podLabels": {"team": "own"}}},
        {"serviceMonitor": own, "prometheusRule": own, "grafanaDashboard": own},
    )
    rendered = chart.render(values)  # a label that is there twice is refused on reading
    check(rendered)
    pods = {name: pod["metadata"]["labels"]["team"] for name, pod in rendered.pods()}
    assert pods == {
        "esp-reconciler-receiver": "own",
        "esp-reconciler-reconciler": "common",
        "esp-reconciler-migrate": "common",
    }
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert [one["metadata"]["labels"]["team"] for one in rendered.of(kind)] == ["own"]


@pytest.mark.parametrize("of", ["commonLabels", "receiver.podLabels", "serviceMonitor.labels"])
def test_labels_by_which_objects_find_each_other_are_not_for_users(chart, of):
    values: Any = {"app.kubernetes.io/component": "mine"}
    for name in reversed(of.split(".")):
        values = {name: values}
    assert "app.kubernetes.io/component" in chart.refusal(values)


@pytest.mark.parametrize("tag", ["a" * 62 + "-b", "0.1.0-", "0.1.0@sha256:" + "0" * 64])
def test_any_tag_gives_a_label_that_is_one(chart, tag):
    rendered = chart.render({"image": {"tag": tag}})
    for label in {one["metadata"]["labels"]["app.kubernetes.io/version"] for one in rendered.objects}:
        assert len(label) <= 63
        assert label[-1].isalnum()
        assert all(sign.isalnum() or sign in "-_." for sign in label)


def test_names_are_those_that_a_service_may_have(chart):
    for release in ("mail.prod", "a" * 49 + "-b"):
        for one in chart.render(name=release).objects:
            assert "." not in one["metadata"]["name"]
            assert one["metadata"]["name"].strip("-") == one["metadata"]["name"]
    assert "does not match pattern" in chart.refusal({"fullnameOverride": "My_App"})
    assert "does not match pattern" in chart.refusal({"nameOverride": "My_App"})
    with pytest.raises(chart.library.HelmError, match="set fullnameOverride"):
        chart.render(name="1mail")
    assert chart.render({"fullnameOverride": "mail"}, name="1mail").of("Service", "mail-receiver")


def test_a_text_may_refer_to_a_secret_whatever_that_is_called(chart):
    secret = {"secretKeyRef": {"name": "shop", "key": "password"}}
    url = "postgresql://app:$(ZZZ_PASSWORD)@db/mail"
    values = {"env": {"RECONCILER_DATABASE__URL": url}, "receiver": {"env": {"ZZZ_PASSWORD": secret}}}
    (container,) = chart.render(values).one("Deployment", "receiver")["spec"]["template"]["spec"]["containers"]
    names = [one["name"] for one in container["env"]]
    assert names.index("ZZZ_PASSWORD") < names.index("RECONCILER_DATABASE__URL")


def test_the_settings_file_may_be_another_and_is_named_once(chart):
    rendered = chart.render({"env": {"RECONCILER_CONFIG": "/srv/own.toml"}})
    (container,) = rendered.one("Deployment", "receiver")["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "RECONCILER_CONFIG", "value": "/srv/own.toml"}]


def test_pods_are_asked_and_mounted_where_an_environment_moves_the_program_to(chart):
    moved = {"RECONCILER_RECEIVER__PORT": "9000", "RECONCILER_DATABASE__DATA_DIR": "/srv/data"}
    rendered = chart.render({"env": moved, "reconciler": {"env": {"RECONCILER_RECEIVER__PORT": "9001"}}})
    check(rendered)
    for component, port in (("receiver", 9000), ("reconciler", 9001)):
        (container,) = rendered.one("Deployment", component)["spec"]["template"]["spec"]["containers"]
        assert container["ports"] == [{"name": "http", "containerPort": port}]
        assert "/srv/data" in [one["mountPath"] for one in container["volumeMounts"]]


def open_ports(policy: Object) -> list[list[int]]:
    """Return the ports of the rules after the one for names."""
    return [[one["port"] for one in rule["ports"]] for rule in policy["spec"]["egress"][1:]]


def test_a_network_policy_lets_through_what_settings_lead_to(chart):
    values = {
        "networkPolicy": {"enabled": True},
        "settings": {
            "receiver": {"public_url": "https://hooks.example.com:8443"},
            "database": {"url": "postgresql://app@one:6432,two:6433/mail"},
            "tracing": {"endpoint": "http://collector:4318"},
            "outbox": {"url": "http://shop/told", "secrets": ["env:SIGNS"]},
            "feeds": {"mg": {"provider": "mailgun", "api_url": "https://proxy:8443/v3", "signed_url": "http://a:1/"}},
        },
        "reconciler": {"env": {"RECONCILER_ARCHIVE__ENDPOINT_URL": "http://minio:9000"}},
        "migrate": {"env": {"RECONCILER_DATABASE__DIRECT_URL": "postgresql://owner@[::1]:5433/mail"}},
    }
    rendered = chart.render(values)
    check(rendered)
    database, called = [5432, 6432, 6433], [443, 8443, 80, 4318]
    assert [sorted(ports) for ports in open_ports(rendered.one("NetworkPolicy", "receiver"))] == [
        database,
        sorted(called),
    ]
    found = open_ports(rendered.one("NetworkPolicy", "reconciler"))
    assert [sorted(ports) for ports in found] == [database, sorted([*called, 9000])]
    assert [sorted(ports) for ports in open_ports(rendered.one("NetworkPolicy", "migrate"))] == [
        [5432, 5433, 6432, 6433]
    ]
    assert open_ports(chart.render({"networkPolicy": {"enabled": True}}).one("NetworkPolicy", "receiver")) == [
        [5432],
        [443],
    ]


def test_senders_reach_the_pods_that_are_both_halves(chart):
    proxy, shop = ({"podSelector": {"matchLabels": {"app": name}}} for name in ("proxy", "shop"))
    policy = {"enabled": True, "receiverFrom": [proxy], "reconcilerFrom": [shop]}

    def may(values: Object, component: str) -> Any:
        (rule,) = chart.render(values).one("NetworkPolicy", component)["spec"]["ingress"]
        return rule.get("from")

    assert may({"networkPolicy": policy}, "receiver") == [proxy]
    assert may({"networkPolicy": policy}, "reconciler") == [shop]
    assert may({"networkPolicy": policy, "split": False}, "receiver") == [proxy, shop]
    assert may({"networkPolicy": {**policy, "receiverFrom": []}, "split": False}, "receiver") is None


def test_a_claim_that_one_node_may_mount_is_let_go_of_before_the_next_pod_wants_it(chart):
    rendered = chart.render({"reconciler": {"dataVolume": {"persistentVolumeClaim": {"claimName": "data"}}}})
    found = {
        component: rendered.one("Deployment", component)["spec"]["strategy"]["rollingUpdate"]
        for component in ("receiver", "reconciler")
    }
    assert found == {
        "receiver": {"maxSurge": 1, "maxUnavailable": 0},
        "reconciler": {"maxSurge": 0, "maxUnavailable": 1},
    }


def test_the_migration_may_be_placed_as_the_pods_are(chart):
    placed = {
        "nodeSelector": {"kubernetes.io/arch": "arm64"},
        "tolerations": [{"key": "mail", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
    }
    rendered = chart.render({"receiver": placed, "reconciler": placed, "migrate": placed})
    for name, pod in rendered.pods():
        assert {key: pod["spec"].get(key) for key in placed} == placed, name


def test_alerts_that_there_are_not_cant_be_disabled(chart):
    refusal = chart.refusal({"prometheusRule": {"enabled": True, "disabled": ["ReconcilerFeedSilnt"]}})
    assert "names what is no alert of files/alerts.yaml: ReconcilerFeedSilnt" in refusal


@pytest.mark.parametrize(
    ("url", "values", "part"),
    [
        ("https://Hooks.Example.com/", {}, None),
        ("hooks.example.com", {}, "write it as https://hooks.example.com"),
        ("https://example.com/mail", {}, "name /mail/webhooks there"),
        ("https://example.com/mail/", {"paths": ["/mail/webhooks"]}, None),
    ],
)
def test_an_ingress_leads_what_providers_are_told_to_post_to(chart, url, values, part):
    given = {"settings": {"receiver": {"public_url": url}}, "ingress": {"webhooks": {"enabled": True, **values}}}
    if part:
        assert part in chart.refusal(given)
        return
    (ingress,) = chart.render(given).of("Ingress")
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] in ("hooks.example.com", "example.com")


def test_a_scaler_that_kubernetes_would_refuse_is_refused_before_the_migration(chart):
    refusal = chart.refusal({"receiver": {"autoscaling": {"enabled": True, "minReplicas": 11}}})
    assert "raise maxReplicas" in refusal


def test_a_setting_that_is_empty_is_no_secret(chart):
    feeds = {"mg": {"provider": "mailgun", "secrets": None, "api_key": ""}}
    assert "api_key" in chart.render({"settings": {"feeds": feeds}}).settings_text()


def test_notes_speak_of_the_deployments_that_there_are(chart):
    assert "reconciler.dataVolume" in chart.render().notes
    single = chart.render({"split": False}).notes
    assert "receiver.dataVolume" in single
    assert "reconciler.dataVolume" not in single
    data = {"dataVolume": {"persistentVolumeClaim": {"claimName": "data"}}}
    assert "lives as long as the pods" not in chart.render({"split": False, "receiver": data}).notes
    page: Object = {"ingress": {"ui": {"enabled": True, "hosts": ["mail.example.com"]}}}
    assert "settings.ui.session_key" in chart.render(page).notes
    assert "settings.ui.session_key" not in chart.render({}).notes
    for given in ({"settings": {"ui": {"session_key": "env:K"}}}, {"env": {"RECONCILER_UI__SESSION_KEY": "file:/k"}}):
        assert "settings.ui.session_key" not in chart.render(merged(page, given)).notes
    given = {"enabled": False, "check": False}
    assert "pods wait until `reconciler migrate`" in chart.render({"migrate": {"enabled": False}}).notes
    assert "pods are not ready until `reconciler migrate`" in chart.render({"migrate": given}).notes
    assert "mg ():" in chart.render({"settings": {"feeds": {"mg": {}}}}).notes


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"feeds": {"mg": "mailgun"}}, "/settings/feeds/mg"),
        ({"feeds": ["mg"]}, "/settings/feeds"),
        ({"receiver": {"public_url": 5}}, "/settings/receiver/public_url"),
        ({"ui": "on"}, "/settings/ui"),
    ],
)
def test_settings_that_the_chart_itself_reads_are_of_their_kind(chart, settings, place):
    assert f"at '{place}': got " in chart.refusal({"settings": settings})


Branch = tuple[tuple[str, ...], Object, Any]


def fixed(schema: Object = SCHEMA, default: Any = DEFAULTS, path: tuple[str, ...] = ()) -> list[Branch]:
    """Return the tables of values whose names the chart knows: where, the schema and the defaults."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if schema.get("additionalProperties") is not False:
        return []
    below = (
        fixed(part, default[name], (*path, name)) for name, part in schema["properties"].items() if name in default
    )
    return [(path, schema, default), *(found for each in below for found in each)]


def free(part: Object) -> bool:
    part = SCHEMA["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    return part.get("type") == "object" and "properties" not in part


def test_a_value_may_be_nothing_only_where_the_chart_can_do_without(chart):
    """`name: null` takes a default away in Helm, which templates then miss in words that nobody understands."""
    without: Object = {}
    for path, schema, default in fixed():
        needed = {name for name, value in default.items() if value not in ("", [], {})}
        needed -= {name for name, part in schema["properties"].items() if free(part)}
        assert set(schema.get("required", [])) == needed, path
        gone: Any = dict.fromkeys(default.keys() - needed - {"global"})
        for name in reversed(path):
            gone = {name: gone}
        without = merged(without, gone)
    check(chart.render(without))
    monitored = {name: {"enabled": True} for name in ("networkPolicy", "serviceMonitor", "prometheusRule")}
    check(chart.render(merged(without, monitored, {"split": False})))
    assert "missing property 'startup'" in chart.refusal({"probes": {"startup": None}})
