"""Values that nobody tried first: odd texts, long names, bounds that are none, upgrades."""

from __future__ import annotations

import tomllib
from typing import Any

import helm_python as helm
import pytest

from m3stack.config import resolve
from tests.deploy.chart import CHART, NAMESPACE, Object, Pod, changed, of_kind, pods, render

ODD = 'a "quoted" \\ text, <b> & ünïcode\nin two lines: # no comment'


def table(objects: list[Object], part: str) -> Object:
    """The settings that the chart wrote for a part."""
    (text,) = [
        item["data"]["m3stack.toml"]
        for item in of_kind(objects, "ConfigMap")
        if item["metadata"]["name"].endswith(f"-{part}")
    ]
    return tomllib.loads(text)[part]


def environment(pod: Pod) -> dict[str, str]:
    (container,) = pod.containers
    names = [entry["name"] for entry in container["env"]]
    # server-side apply refuses a name that stands twice
    assert len(set(names)) == len(names)
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def pod_of(objects: list[Object], owner: str) -> Pod:
    (pod,) = [pod for pod in pods(objects) if pod.owner == owner]
    return pod


def test_settings_arrive_as_they_were_written() -> None:
    settings = {
        "text": ODD,
        "list": [ODD, "", "0", "true", 7],
        "large": 50_000_000_000,
        "whole": 3,
        "part": 0.25,
        "tiny": 1e-7,
        "yes": True,
    }
    objects = render(changed(gateway__settings=settings, worker__settings=settings))
    for part in ("gateway", "worker"):
        found = {name: table(objects, part)[name] for name in settings}
        assert found == settings, part
        assert isinstance(found["whole"], int)


def test_settings_of_a_role_arrive_as_they_were_written() -> None:
    roles = {"prefill": {"settings": {"allowed_sources": ODD, "max_batch_tokens": 16384}}}
    env = environment(
        pod_of(render(changed(worker__roles=roles)), "StatefulSet/demo-m3stack-worker-prefill")
    )
    assert env["M3STACK_WORKER_ALLOWED_SOURCES"] == ODD
    assert env["M3STACK_WORKER_MAX_BATCH_TOKENS"] == "16384"


def test_what_the_operator_says_of_a_variable_or_a_label_holds_and_stands_once() -> None:
    objects = render(
        changed(
            worker__extraEnv=[
                {"name": "HOME", "value": "/home"},
                {"name": "M3STACK_WORKER_TENSOR_PARALLEL", "value": "4"},
            ],
            worker__roles={"prefill": {}},
            worker__podLabels={"app.kubernetes.io/component": "mine", "team": "true"},
            worker__podAnnotations={"checksum/config": "mine", "note": "1e3"},
            commonLabels={"app.kubernetes.io/part-of": "fleet", "app.kubernetes.io/name": "x"},
        )
    )
    for owner in ("demo-m3stack-worker", "demo-m3stack-worker-prefill"):
        pod = pod_of(objects, f"StatefulSet/{owner}")
        env = environment(pod)
        assert (env["HOME"], env["M3STACK_WORKER_TENSOR_PARALLEL"]) == ("/home", "4")
        # but for what selects pods, and says when they must restart
        assert pod.labels["app.kubernetes.io/component"] == "worker"
        assert pod.labels["app.kubernetes.io/name"] == "m3stack"
        assert (pod.labels["team"], pod.labels["app.kubernetes.io/part-of"]) == ("true", "fleet")
    (item,) = [one for one in of_kind(objects, "StatefulSet") if "prefill" in str(one["metadata"])]
    annotations = item["spec"]["template"]["metadata"]["annotations"]
    assert annotations["note"] == "1e3"
    assert len(annotations["checksum/config"]) == 64


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (changed(gateway__settings={"drain_timeout_s": 900}), "gateway.drainSeconds"),
        (changed(gateway__settings={"listen": "0.0.0.0:1"}), "gateway.port"),
        (changed(worker__settings={"drain_s": 900}), "worker.drainSeconds"),
        (changed(worker__settings={"metrics_listen": "off"}), "worker.metricsPort"),
        (changed(worker__roles={"encode": {"settings": {"drain_s": 9}}}), "roles.encode.settings"),
        (changed(worker__roles={"encode": {"settings": {"role": "all"}}}), "worker.roles"),
        (
            changed(worker__roles={"encode": {"settings": {"tensor_parallel": 2}}}),
            "worker.roles.encode.gpus",
        ),
        (
            changed(gateway__autoscaling={"enabled": True, "minReplicas": 9, "maxReplicas": 2}),
            "minReplicas is 9",
        ),
        (
            changed(
                worker__autoscaling={
                    "enabled": True,
                    "minReplicas": 5,
                    "prometheusAddress": "http://p",
                }
            ),
            "minReplicas is 5",
        ),
        (
            changed(
                gateway__autoscaling__enabled=True, gateway__resources={"requests": {"cpu": ""}}
            ),
            "resources.requests.cpu",
        ),
        (
            changed(
                model__fetch={"enabled": True, "repository": "a/b"},
                model__path="/modelsets/m3",
                model__mountPath="/models",
            ),
            "below model.mountPath",
        ),
        (changed(fullnameOverride="3m"), "fullnameOverride"),
        (changed(worker__autoscaling__cooldownSeconds=7200), "cooldownSeconds"),
        (changed(listenAddress="localhost"), "listenAddress"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(
    values: Object, complaint: str
) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        render(values)


@pytest.mark.parametrize("name", ["r" * 53, "a.b.c", "m3stack-" + "x" * 40, "z" * 35 + "-y"])
def test_names_leave_room_for_what_controllers_add(name: str) -> None:
    roles: Object = {"prefill": {}, "encode": {}, "decode": {}}
    objects = render(changed(worker__roles=roles), name=name)
    for item in of_kind(objects, "StatefulSet"):
        # pods carry the label NAME-HASH, and the hash may have ten characters
        assert len(item["metadata"]["name"]) + 11 <= 63
    for item in of_kind(objects, "Service"):
        assert "." not in item["metadata"]["name"]


def test_a_gateway_may_wait_for_workers_without_having_failed() -> None:
    (deployment,) = of_kind(render(changed(worker__startupSeconds=7200)), "Deployment")
    assert deployment["spec"]["progressDeadlineSeconds"] > 7200


def test_the_workers_own_image_asks_unless_another_is_named() -> None:
    worker = {"repository": "example.org/w", "tag": "v9", "pullPolicy": "Always"}
    values = changed(worker__image=worker)
    (test,) = [pod for pod in pods(render(values)) if pod.owner.startswith("Pod/")]
    assert test.containers[0]["image"] == "example.org/w:v9"
    assert test.containers[0]["imagePullPolicy"] == "Always"

    values["tests"] = {"image": {"repository": "example.org/python", "tag": "3"}}
    (test,) = [pod for pod in pods(render(values)) if pod.owner.startswith("Pod/")]
    assert test.containers[0]["image"] == "example.org/python:3"


@pytest.mark.parametrize(
    "change",
    [
        {"worker__image__tag": "v2"},
        {"model__fetch__revision": "v2"},
        {"model__path": "/models/other"},
        {"imagePullSecrets": [{"name": "pull"}]},
        {"podSecurityContext__fsGroup": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_pod_of_the_fetching_job_is_another_job(change: dict[str, Any]) -> None:
    fetch = {"model__fetch__enabled": True, "model__fetch__repository": "a/b"}
    (before,) = of_kind(render(changed(**fetch)), "Job")
    (after,) = of_kind(render(changed(**fetch, **change)), "Job")
    assert before["metadata"]["name"] != after["metadata"]["name"]
    assert before["spec"]["template"] != after["spec"]["template"]


def test_a_label_for_all_leaves_the_fetching_job_as_it_is() -> None:
    fetch = {"model__fetch__enabled": True, "model__fetch__repository": "a/b"}
    (before,) = of_kind(render(changed(**fetch)), "Job")
    (after,) = of_kind(render(changed(**fetch, commonLabels={"a": "b"})), "Job")
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert before["spec"]["template"] == after["spec"]["template"]


def test_workers_leave_one_by_one_and_late() -> None:
    scaling = {"enabled": True, "prometheusAddress": "http://p", "cooldownSeconds": 1200}
    (scaled,) = of_kind(render(changed(worker__autoscaling=scaling)), "ScaledObject")
    config = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    down = config["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 1200
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_pods_may_have_addresses_of_the_newer_kind(tmp_path: Any) -> None:
    objects = render(changed(listenAddress="::"))
    assert table(objects, "gateway")["listen"] == "[::]:8000"
    assert table(objects, "gateway")["admin_listen"] == "[::]:9101"
    file = tmp_path / "m3stack.toml"
    (text,) = [
        item["data"]["m3stack.toml"]
        for item in of_kind(objects, "ConfigMap")
        if item["metadata"]["name"].endswith("-worker")
    ]
    file.write_text(text)
    config = resolve(flags={}, environ={}, file=file)
    assert (config.listen, config.metrics_listen) == ("[::]:50051", "[::]:9100")


def test_an_encoder_takes_one_gpu_unless_more_are_said() -> None:
    def gpus(encode: Object) -> object:
        objects = render(changed(worker__roles={"encode": encode}))
        pod = pod_of(objects, "StatefulSet/demo-m3stack-worker-encode")
        return pod.containers[0]["resources"]["limits"].get("nvidia.com/gpu")

    assert (gpus({}), gpus({"gpus": 2}), gpus({"gpus": 0})) == (1, 2, None)


def test_names_are_asked_for_where_the_cluster_answers() -> None:
    policies = of_kind(render(changed(networkPolicy__dnsPorts=[53, 5353])), "NetworkPolicy")
    for policy in policies:
        ports = [port for rule in policy["spec"]["egress"] for port in rule.get("ports", [])]
        for protocol in ("UDP", "TCP"):
            assert {"port": 5353, "protocol": protocol} in ports


def test_notes_ask_as_the_gateway_wants_to_be_asked() -> None:
    values = changed(gateway__tls__existingSecret="tls")
    values["gateway"]["auth"] = {"existingSecret": "keys"}
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="demo", namespace=NAMESPACE)
    (notes,) = [text for name, text in files.items() if name.endswith("NOTES.txt")]
    assert "https://127.0.0.1:8000/v1/chat/completions" in notes
    assert "-H 'authorization: Bearer YOUR-KEY' \\\n" in notes
