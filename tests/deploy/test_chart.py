"""The chart renders under Helm's own engine to objects that fit Kubernetes and each other."""

from __future__ import annotations

import copy
from pathlib import Path

import helm_python as helm
import pytest
import yaml

from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    KUBERNETES,
    LEAST,
    Object,
    Pod,
    changed,
    complaints,
    of_kind,
    pods,
    render,
    rendered,
    values_of,
)

# kinds that belong to other controllers
CUSTOM = {"ServiceMonitor", "PrometheusRule", "LeaderWorkerSet", "ScaledObject", "HTTPRoute"}


def example_ids(path: Path) -> str:
    return path.stem


every_example = pytest.mark.parametrize("example", EXAMPLES, ids=example_ids)


def test_there_are_examples_of_every_kind_of_object() -> None:
    kinds = {item["kind"] for example in EXAMPLES for item in rendered(example)}
    assert len(EXAMPLES) >= 8
    assert kinds >= CUSTOM | {"StatefulSet", "HorizontalPodAutoscaler", "Ingress", "Role", "Job"}


@every_example
def test_helm_lints_the_chart_without_a_word(example: Path) -> None:
    report = helm.lint(CHART, values_of(example), strict=True, quiet=False)
    told = [message for message in report["messages"] if message["severity"] >= 2]
    assert (told, report["errors"]) == ([], [])


@every_example
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_every_object(example: Path, version: str) -> None:
    found = {
        f"{item['kind']}/{item['metadata']['name']}": complaints(item, version)
        for item in rendered(example)
    }
    assert {name: told for name, told in found.items() if told} == {}


def test_the_schemas_refuse_what_they_should() -> None:
    objects = copy.deepcopy(list(rendered(CHART / "examples" / "production.yaml")))
    for item in objects:
        item["spec" if "spec" in item else "data" if "data" in item else "metadata"] = 3
    bare = [item for item in objects if not complaints(item, KUBERNETES[0])]
    # a role has no such field to spoil beyond its name
    assert [item["kind"] for item in bare] == []


@every_example
def test_selectors_find_the_pods_they_are_for(example: Path) -> None:
    objects = rendered(example)
    templates = list(pods(objects))
    for item in objects:
        selector = _selector(item)
        if selector is not None:
            found = [pod for pod in templates if selector.items() <= pod.labels.items()]
            assert found, f"{item['kind']}/{item['metadata']['name']} selects nobody"


def _selector(item: Object) -> dict[str, str] | None:
    match item["kind"]:
        case "Service":
            return item["spec"]["selector"]
        case "NetworkPolicy":
            return item["spec"]["podSelector"]["matchLabels"]
        case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
            return item["spec"]["selector"]["matchLabels"]
    return None


@every_example
def test_ports_are_named_where_they_are_used(example: Path) -> None:
    objects = rendered(example)
    services = of_kind(objects, "Service")
    for service in services:
        selector = service["spec"]["selector"].items()
        (pod, *_) = [pod for pod in pods(objects) if selector <= pod.labels.items()]
        names = {port["name"] for one in pod.containers for port in one.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for monitor in of_kind(objects, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {end["port"] for end in monitor["spec"]["endpoints"]} <= ports


@every_example
def test_every_mount_has_a_volume_and_every_volume_a_mount(example: Path) -> None:
    for pod in pods(rendered(example)):
        volumes = [volume["name"] for volume in pod.spec.get("volumes", [])]
        mounts = {m["name"] for one in pod.containers for m in one.get("volumeMounts", [])}
        assert len(set(volumes)) == len(volumes)
        assert set(volumes) == mounts, pod.owner


@every_example
def test_pods_run_with_the_least_rights(example: Path) -> None:
    watches = values_of(example).get("discovery") == "kubernetes"
    for pod in pods(rendered(example)):
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["enableServiceLinks"] is False
        needs_token = watches and pod.owner.startswith("Deployment/")
        assert pod.spec["automountServiceAccountToken"] is needs_token
        for container in pod.containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]


@every_example
def test_pods_get_more_time_to_end_than_they_need(example: Path) -> None:
    values = values_of(example)
    for pod in pods(rendered(example)):
        if pod.owner.startswith("Deployment/"):
            gateway = values.get("gateway", {})
            wanted = gateway.get("drainSeconds", 120) + gateway.get("preStopSeconds", 10)
            assert pod.spec["terminationGracePeriodSeconds"] > wanted
        elif "worker" in pod.owner:
            wanted = values.get("worker", {}).get("drainSeconds", 300)
            assert pod.spec["terminationGracePeriodSeconds"] > wanted


@every_example
def test_names_are_short_enough_and_unique(example: Path) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered(example)]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 63


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_gpus_are_asked_for_as_requests_and_limits(gpus: int) -> None:
    (worker,) = _pods_of("StatefulSet", changed(worker__gpus=gpus))
    resources = worker.containers[0]["resources"]
    wanted = {"nvidia.com/gpu": gpus} if gpus else {}
    for kind in ("requests", "limits"):
        found = {name: n for name, n in resources[kind].items() if name.startswith("nvidia")}
        assert found == wanted


def test_the_start_of_a_worker_may_take_as_long_as_was_said() -> None:
    (worker,) = _pods_of("StatefulSet", changed(worker__startupSeconds=1805))
    probe = worker.containers[0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1805


def test_a_changed_setting_restarts_the_pods_that_read_it_and_no_others() -> None:
    def sums(values: Object) -> dict[str, str]:
        return {
            item["kind"]: item["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for item in render(values)
            if item["kind"] in ("Deployment", "StatefulSet")
        }

    before = sums(LEAST)
    gateway = sums(changed(gateway__settings={"max_concurrent_requests": 512}))
    worker = sums(changed(worker__settings={"max_sequences": 8}))
    assert {kind for kind in before if before[kind] != gateway[kind]} == {"Deployment"}
    assert {kind for kind in before if before[kind] != worker[kind]} == {"StatefulSet"}


def test_only_gateways_may_call_workers() -> None:
    policies = of_kind(render(LEAST), "NetworkPolicy")
    (worker,) = [item for item in policies if item["metadata"]["name"].endswith("-worker")]
    (rpc,) = [
        rule
        for rule in worker["spec"]["ingress"]
        if any(port["port"] == "grpc" for port in rule["ports"])
    ]
    (peer,) = rpc["from"]
    labels = peer["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "gateway"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model": {"existingClaim": "models"}}, "say who may use the gateway"),
        ({"gateway": {"auth": {"allowAnonymous": True}}}, "say where the model is"),
        (changed(worker__hosts=2), "leaderworkerset"),
        (
            changed(
                worker__autoscaling={
                    "enabled": True,
                    "waitingRequests": 0,
                    "prometheusAddress": "http://p",
                }
            ),
            "nothing to scale by",
        ),
        (changed(worker__kind="deployment"), "kind"),
        (changed(gateway__replica=3), "replica"),
        (changed(gateway__replicas="3"), "replicas"),
        (changed(gateway__port=70000), "port"),
        (changed(gateway__image__digest="sha256:abc"), "digest"),
        (changed(gateway__settings={"Max-Requests": 1}), "Max-Requests"),
        (changed(gateway__settings={"workers": {"a": 1}}), "settings"),
        (changed(worker__autoscaling__enabled=True), "prometheusAddress"),
        (changed(worker__tls={"existingSecret": "tls", "serverName": "w"}), "gatewaySecret"),
        (changed(ingress__enabled=True), "ingress.hosts"),
        (changed(httpRoute__enabled=True), "parentRefs"),
        (changed(model__fetch__enabled=True), "repository"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: Object, complaint: str) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        render(values)


def test_a_release_name_that_is_too_long_still_gives_names_that_fit() -> None:
    names = [item["metadata"]["name"] for item in render(LEAST, name="r" * 53)]
    assert max(map(len, names)) <= 63


def test_the_chart_and_the_product_have_one_version() -> None:
    from m3stack import __version__

    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (metadata["version"], metadata["appVersion"]) == (__version__, __version__)


def _pods_of(kind: str, values: Object) -> list[Pod]:
    return [pod for pod in pods(render(values)) if pod.owner.startswith(f"{kind}/")]


def test_parts_of_the_work_have_pods_of_their_own_that_may_fetch_from_each_other() -> None:
    objects = rendered(CHART / "examples" / "divided.yaml")
    found: dict[str, tuple[int, str, str, int]] = {}
    for item in of_kind(objects, "StatefulSet"):
        template = item["spec"]["template"]
        selector = item["spec"]["selector"]["matchLabels"]
        # no set may take the pods of another for its own
        assert selector["m3stack-work"] == template["metadata"]["labels"]["m3stack-work"]
        (worker,) = template["spec"]["containers"]
        env = {entry["name"]: entry["value"] for entry in worker["env"]}
        found[selector["m3stack-work"]] = (
            item["spec"]["replicas"],
            env.get("M3STACK_WORKER_ROLE", ""),
            env.get("M3STACK_WORKER_TENSOR_PARALLEL", ""),
            worker["resources"]["limits"]["nvidia.com/gpu"],
        )
        if selector["m3stack-work"] == "prefill":
            assert env["M3STACK_WORKER_MAX_BATCH_TOKENS"] == "16384"
    assert found == {
        "main": (2, "", "", 8),
        "prefill": (1, "prefill", "8", 8),
        "encode": (2, "encode", "1", 1),
    }
    (policy,) = [
        item
        for item in of_kind(objects, "NetworkPolicy")
        if item["metadata"]["name"].endswith("-worker")
    ]
    workers = {"app.kubernetes.io/component": "worker"}
    for direction, side in (("ingress", "from"), ("egress", "to")):
        peers = [
            peer["podSelector"]["matchLabels"]
            for rule in policy["spec"][direction]
            for peer in rule.get(side, [])
        ]
        assert any(workers.items() <= labels.items() for labels in peers), direction


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"worker__kind": "leaderworkerset"}, "needs worker.kind=statefulset"),
        ({"discovery": "static"}, "needs discovery=dns or kubernetes"),
    ],
)
def test_parts_of_the_work_where_they_cannot_be_are_refused(change: Object, complaint: str) -> None:
    values = changed(worker__roles__prefill__replicas=1, **change)
    with pytest.raises(Exception, match=complaint):
        render(values)


def test_each_part_of_the_work_is_scaled_by_what_waits_for_it() -> None:
    objects = rendered(CHART / "examples" / "divided-autoscaled.yaml")
    found = {
        item["metadata"]["name"]: (
            item["spec"]["minReplicaCount"],
            item["spec"]["maxReplicaCount"],
            [trigger["metadata"]["threshold"] for trigger in item["spec"]["triggers"]],
        )
        for item in of_kind(objects, "ScaledObject")
    }
    assert found == {
        "demo-m3stack-worker": (2, 6, ["8"]),
        "demo-m3stack-worker-prefill": (1, 4, ["131072"]),
        "demo-m3stack-worker-encode": (1, 8, ["4"]),
    }
    queries = {
        item["metadata"]["name"].rpartition("-")[2]: item["spec"]["triggers"][0]["metadata"]
        for item in of_kind(objects, "ScaledObject")
    }
    assert "m3stack_worker_waiting_prompt_tokens" in queries["prefill"]["query"]
    assert 'm3stack_worker_role{role="decode"}' in queries["worker"]["query"]
    # whoever scales is the only one to say how many there are
    for item in of_kind(objects, "StatefulSet"):
        assert "replicas" not in item["spec"], item["metadata"]["name"]


def test_a_part_of_the_work_is_scaled_only_if_it_says_so_itself() -> None:
    scaling = {"enabled": True, "prometheusAddress": "http://p"}
    objects = render(changed(worker__autoscaling=scaling, worker__roles__prefill__replicas=3))
    (scaled,) = of_kind(objects, "ScaledObject")
    assert scaled["metadata"]["name"] == "demo-m3stack-worker"
    replicas = {
        item["metadata"]["name"]: item["spec"].get("replicas")
        for item in of_kind(objects, "StatefulSet")
    }
    assert replicas == {"demo-m3stack-worker": None, "demo-m3stack-worker-prefill": 3}


def test_pods_behind_the_first_serve_health_and_take_no_requests() -> None:
    objects = rendered(CHART / "examples" / "leader-worker-set.yaml")
    leader, follower = (pod for pod in pods(objects) if pod.owner.startswith("LeaderWorkerSet/"))
    (service,) = [
        item for item in of_kind(objects, "Service") if item["metadata"]["name"].endswith("-worker")
    ]
    selector = service["spec"]["selector"].items()
    assert selector <= leader.labels.items()
    assert not selector <= follower.labels.items()
    first, second = leader.containers[0], follower.containers[0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert first[probe] == second[probe]
    assert [port["name"] for port in second["ports"]] == ["grpc"]
    assert first["resources"] == second["resources"]
    assert first["args"] == second["args"]
