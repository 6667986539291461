# SPDX-License-Identifier: Apache-2.0
"""The chart as tests render it, by Helm's own engine, and the program's settings as its models name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reconciler.configuration.settings import Settings, load_settings
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm"
FOLDER = Path(__file__).parent / "helm" / "values"

Object = dict[str, Any]


class Strict(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key is there twice: {sorted(keys)}"
        return super().construct_mapping(node, deep)


def read(path: Path) -> Any:
    return yaml.load(path.read_text("utf-8"), Strict)  # noqa: S506 - it is a SafeLoader


VALUES: dict[str, Object] = {
    "default": {},
    "full": read(FOLDER / "full.yaml"),
    "single": read(FOLDER / "single.yaml"),
}


class Rendered:
    """What Helm makes of the chart with some values."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
        texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
        self.objects: list[Object] = [found for text in texts for found in yaml.load_all(text, Strict) if found]

    def of(self, kind: str, name: str | None = None) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind and name in (None, one["metadata"]["name"])]

    def one(self, kind: str, component: str) -> Object:
        """Return the object of a kind that belongs to a component."""
        (found,) = (
            one for one in self.of(kind) if one["metadata"]["labels"]["app.kubernetes.io/component"] == component
        )
        return found

    def pods(self) -> list[tuple[str, Object]]:
        """Return the pods that objects make: whose they are, and the template."""
        makers = [*self.of("Deployment"), *self.of("Job")]
        return [(one["metadata"]["name"], one["spec"]["template"]) for one in makers]

    def settings_text(self, component: str = "settings") -> str:
        return str(self.one("ConfigMap", component)["data"]["reconciler.toml"])

    def environment(self, kind: str, component: str) -> dict[str, str]:
        """Return the plain variables of the program's container."""
        (container,) = self.one(kind, component)["spec"]["template"]["spec"]["containers"]
        return {one["name"]: one["value"] for one in container["env"] if "value" in one}


class Chart:
    """The chart, loaded once."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self._chart = library.Chart.load(CHART)

    def render(self, values: Object | None = None, **release: Any) -> Rendered:
        """Render as `helm install` does; raises the library's HelmError."""
        given = {"name": "esp-reconciler", "namespace": "mail", **release}
        return Rendered(self._chart.render(values or {}, **given))

    def refusal(self, values: Object) -> str:
        """Return why Helm refuses values."""
        with pytest.raises(self.library.HelmError) as caught:
            self.render(values)
        return str(caught.value)

    def close(self) -> None:
        self._chart.close()


def merged(*trees: Mapping[str, Any]) -> Object:
    """Return trees as one, the later winning, as Helm merges values."""
    whole: Object = {}
    for tree in trees:
        for key, value in tree.items():
            below = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = merged(whole[key], value) if below else value
    return whole


def branch(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return what a tree, or settings, hold at a path; None where nothing is there."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else getattr(tree, name, None)
    return tree


CHOSEN = {"feeds": "main-feed", "classes": "news", "tokens": "shop"}
"""What tests call the things that a user names."""


def every_setting(table: type[BaseModel] = Settings, path: tuple[str, ...] = ()) -> Iterator[tuple[str, FieldInfo]]:
    """Name every setting of the program with dots, as it is in its models."""
    for name, field in table.model_fields.items():
        inner = (get_args(field.annotation) or (field.annotation,))[-1]
        here = (*path, name)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            named = get_origin(field.annotation) is dict
            yield from every_setting(inner, (*here, CHOSEN.get(name, "name")) if named else here)
        else:
            yield ".".join(here), field


def load(folder: Path, text: str, environ: Mapping[str, str]) -> Settings:
    """Return what the program itself reads of a settings file and an environment."""
    file = folder / "reconciler.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, environ, PROVIDERS)
