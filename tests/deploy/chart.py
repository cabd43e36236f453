"""The Helm chart rendered by Helm's own engine, and what the tests ask of its objects."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "m3stack"
EXAMPLES = tuple(sorted((CHART / "examples").glob("*.yaml")))
RELEASE, NAMESPACE = "demo", "serving"
CRDS = Path(__file__).parent / "crds"
# the oldest release the chart allows, and the newest with published schemas
KUBERNETES = ("v1.30", "v1.37")

Object = dict[str, Any]

LEAST: Object = {
    "model": {"existingClaim": "models"},
    "gateway": {"auth": {"allowAnonymous": True}},
}


def changed(**paths: object) -> Object:
    """The least values with some set, `gateway__replicas=3`."""
    values = copy.deepcopy(LEAST)
    for path, value in paths.items():
        *parents, last = path.split("__")
        place: Any = values
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return values


class _Once(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, of which YAML readers keep the one or the other."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


def values_of(path: Path) -> Object:
    return helm.values_from_yaml(path.read_text())


def render(values: Object, *, name: str = RELEASE) -> list[Object]:
    """All objects of a release, hooks included.

    Raises:
        helm.HelmError: the values are refused, by the schema or by a template.
    """
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace=NAMESPACE)
    documents = (
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.load_all(text, _Once)
    )
    return [document for document in documents if document]


@cache
def rendered(example: Path) -> tuple[Object, ...]:
    """The objects of an example; nobody may change them."""
    return tuple(render(values_of(example)))


def complaints(item: Object, version: str) -> list[str]:
    """What a Kubernetes release, or the schema of a custom resource, says against an object."""
    custom = CRDS / f"{item['kind'].lower()}.json"
    if custom.is_file():
        validator = jsonschema.Draft202012Validator(json.loads(custom.read_text()))
    else:
        validator = _builtin(item["kind"], item["apiVersion"], version)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(item)]


@cache
def _definitions(version: str) -> Resource:
    contents = schema_contents(f"{_folder(version)}/_definitions.json", version)
    return Resource(contents, DRAFT202012)


@cache
def _builtin(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    group, _, api = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], api)))
    schema = schema_contents(f"{_folder(version)}/{name}.json", version)
    registry = Registry().with_resource("_definitions.json", _definitions(version))
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _folder(version: str) -> str:
    import kubernetes_validate

    base = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    (folder,) = base.glob(f"{version}.*-local-strict")
    return f"kubernetes-json-schema/{folder.name}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template wherever it stands."""

    owner: str
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return self.spec["containers"] + self.spec.get("initContainers", [])


def pods(objects: tuple[Object, ...] | list[Object]) -> Iterator[Pod]:
    """Every pod template of a release."""
    for item in objects:
        for template in _templates(item):
            name = f"{item['kind']}/{item['metadata']['name']}"
            yield Pod(name, template["metadata"].get("labels", {}), template["spec"])


def _templates(item: Object) -> list[Object]:
    match item["kind"]:
        case "Deployment" | "StatefulSet" | "Job":
            return [item["spec"]["template"]]
        case "LeaderWorkerSet":
            group = item["spec"]["leaderWorkerTemplate"]
            return [group["leaderTemplate"], group["workerTemplate"]]
        case "Pod":
            return [item]
    return []


def of_kind(objects: tuple[Object, ...] | list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]
