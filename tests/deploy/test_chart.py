"""What single values of the chart change."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.generate import CHART, ORIGINALS
from shoal.server.gate.key_ring import read_api_keys
from tests.deploy.chart import NAME, ChartError, Helm
from tests.deploy.matrix import EVERYTHING, KEY, MATRIX, PROMETHEUS

ROOT = Path(__file__).parents[2]


def container_with(helm: Helm, **values: Any) -> dict[str, Any]:
    return helm.render(values).container


def test_the_chart_is_of_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]


# --- pods ---


def test_an_image_is_named_by_its_tag_and_pinned_by_its_digest(helm: Helm) -> None:
    assert container_with(helm)["image"] == "shoal:0.1.0"
    digest = "sha256:" + "a" * 64
    image = {"repository": "registry.example.com/shoal", "digest": digest}
    pinned = container_with(helm, image=image)["image"]
    assert pinned == f"registry.example.com/shoal:0.1.0@{digest}"


def test_gpus_engines_and_groups_go_together(helm: Helm) -> None:
    objects = helm.render({"node": {"gpus": 4, "maxGroup": 2}})
    assert {"--engines=4", "--max-group=2"} <= set(objects.args)
    assert objects.container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert objects.pod["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_without_gpus_none_are_asked_for(helm: Helm) -> None:
    objects = helm.render(MATRIX["cpu"])
    assert {"--engines=2", "--max-group=2"} <= set(objects.args)
    assert "nvidia.com/gpu" not in objects.container["resources"]["requests"]
    assert "tolerations" not in objects.pod["spec"]


def test_other_gpus_have_another_name(helm: Helm) -> None:
    values = {"node": {"gpus": 2}, "resources": {"gpu": "nvidia.com/gpu.shared"}}
    assert helm.render(values).container["resources"]["limits"]["nvidia.com/gpu.shared"] == 2


@pytest.mark.parametrize(
    ("engines", "largest", "mebibytes"),
    [
        (1, 1, 1024),
        (2, 2, 1024 + 256 * 2),
        (8, 1, 1024),
        (8, 2, 1024 + 256 * 8),
        (8, 8, 1024 + 256 * 24),
    ],
)
def test_shared_memory_grows_with_the_groups_an_engine_can_be_in(
    helm: Helm, engines: int, largest: int, mebibytes: int
) -> None:
    objects = helm.render({"node": {"gpus": engines, "maxGroup": largest}})
    assert objects.mounts["shared-memory"]["mountPath"] == "/dev/shm"
    assert objects.volumes["shared-memory"]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": f"{mebibytes}Mi",
    }


def test_every_process_has_a_core_unless_told_otherwise(helm: Helm) -> None:
    eight = container_with(helm)["resources"]
    assert eight["requests"]["cpu"] == "18"
    assert "cpu" not in eight["limits"]
    guaranteed = container_with(helm, resources={"cpu": 12, "limitCpu": True})["resources"]
    assert guaranteed["requests"] == guaranteed["limits"]
    assert guaranteed["limits"]["cpu"] == "12"


def test_a_model_of_the_hub_has_a_token(helm: Helm) -> None:
    objects = helm.render({"model": {"name": "org/model", "hubToken": {"secret": "hub"}}})
    assert objects.args[:2] == ["serve", "org/model"]
    reference = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert objects.container["env"] == [reference]


def test_without_a_model_the_demo_is_served(helm: Helm) -> None:
    objects = helm.render()
    assert objects.args[:2] == ["serve", "--host=0.0.0.0"]
    assert "env" not in objects.container


def test_weights_are_mounted_read_only(helm: Helm) -> None:
    weights = {"from": "claim", "claim": "llama"}
    objects = helm.render({"model": {"name": "/models/llama", "weights": weights}})
    assert objects.mounts["weights"] == {
        "name": "weights",
        "mountPath": "/models",
        "readOnly": True,
    }
    claim = objects.volumes["weights"]["persistentVolumeClaim"]
    assert claim == {"claimName": "llama", "readOnly": True}


def test_a_pod_has_a_cache_of_its_own_that_outlives_it(helm: Helm) -> None:
    cache = {"size": "500Gi", "storageClass": "fast"}
    spec = helm.render({"cache": cache}).one("StatefulSet")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "500Gi"}},
    }
    assert spec["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (
            {"from": "claim", "claim": "shared"},
            {"persistentVolumeClaim": {"claimName": "shared"}},
        ),
        (
            {"from": "hostPath", "hostPath": "/data"},
            {"hostPath": {"path": "/data", "type": "DirectoryOrCreate"}},
        ),
        ({"from": "emptyDir", "size": "9Gi"}, {"emptyDir": {"sizeLimit": "9Gi"}}),
    ],
)
def test_a_cache_can_be_elsewhere(
    helm: Helm, cache: dict[str, str], volume: dict[str, Any]
) -> None:
    objects = helm.render({"cache": cache})
    assert objects.volumes["cache"] == {"name": "cache", **volume}
    assert "volumeClaimTemplates" not in objects.one("StatefulSet")["spec"]


def test_files_are_mounted_and_a_change_restarts_the_pods(helm: Helm) -> None:
    one = helm.render({"node": {"files": {"chat.jinja": "{{ one }}"}}})
    two = helm.render({"node": {"files": {"chat.jinja": "{{ two }}"}}})
    assert one.one("ConfigMap")["data"] == {"chat.jinja": "{{ one }}"}
    assert one.volumes["files"]["configMap"]["name"] == one.one("ConfigMap")["metadata"]["name"]
    checksums = [o.pod["metadata"]["annotations"]["checksum/files"] for o in (one, two)]
    assert checksums[0] != checksums[1]


def test_a_new_version_of_the_chart_restarts_no_pod_by_its_labels(helm: Helm) -> None:
    assert "helm.sh/chart" not in helm.render().pod["metadata"]["labels"]


def test_pods_are_spread_over_machines(helm: Helm) -> None:
    (spread,) = helm.render().pod["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"


def test_an_autoscaler_has_the_number_of_pods_to_itself(helm: Helm) -> None:
    assert helm.render({"replicas": 5}).one("StatefulSet")["spec"]["replicas"] == 5
    for scaled in ("keda", "hpa"):
        assert "replicas" not in helm.render(MATRIX[scaled]).one("StatefulSet")["spec"]


def test_drain_sets_the_grace_period(helm: Helm) -> None:
    objects = helm.render({"node": {"shutdownSeconds": 600}, "preStopSeconds": 20})
    assert "--shutdown-timeout=600" in objects.args
    assert objects.pod["spec"]["terminationGracePeriodSeconds"] == 650


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_pods_run_as_the_images_are_made_to(helm: Helm, kind: str) -> None:
    image = (ROOT / "deploy" / "docker" / f"Dockerfile.{kind}").read_text()
    objects = helm.render()
    user = objects.pod["spec"]["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in image
    assert f"HOME={objects.mounts['cache']['mountPath']} " in image
    assert f"TMPDIR={objects.mounts['tmp']['mountPath']} " in image
    assert 'ENTRYPOINT ["tini", "--", "shoal"]' in image


# --- keys ---


def test_keys_are_a_file_that_the_server_reads(helm: Helm, tmp_path: Path) -> None:
    objects = helm.render(EVERYTHING)
    secret = objects.one("Secret")
    assert objects.volumes["keys"]["secret"]["secretName"] == secret["metadata"]["name"]
    for file in ("api-keys.json", "admin-keys.json"):
        path = tmp_path / file
        path.write_text(secret["stringData"][file])
        (key,) = read_api_keys(path)
        option = file.replace("keys.json", "key-file")
        assert f"--{option}={objects.mounts['keys']['mountPath']}/{file}" in objects.args
        assert key.name == {"api-keys.json": "team", "admin-keys.json": "operator"}[file]


def test_key_files_are_readable_by_the_pod_alone(helm: Helm) -> None:
    objects = helm.render({"auth": {"apiKeys": [KEY]}})
    assert objects.volumes["keys"]["secret"]["defaultMode"] == 0o440
    assert objects.pod["spec"]["securityContext"]["fsGroup"] > 0


def test_an_existing_secret_is_used_as_it_is(helm: Helm) -> None:
    objects = helm.render(MATRIX["all keys of one's own"])
    assert objects.of("Secret") == []
    assert objects.volumes["keys"]["secret"]["secretName"] == "keys"
    assert "--admin-key-file=/etc/shoal/keys/admin-keys.json" in objects.args


@pytest.mark.parametrize(
    ("values", "port"),
    [
        ({}, "8001"),
        ({"auth": {"apiKeys": [KEY]}}, "off"),
        ({"auth": {"apiKeys": [KEY], "adminKeys": [KEY]}}, "8001"),
        ({"auth": {"existingSecret": {"name": "keys"}}}, "off"),
    ],
)
def test_the_admin_api_has_keys_if_the_public_one_has(
    helm: Helm, values: dict[str, Any], port: str
) -> None:
    objects = helm.render(values)
    assert f"--admin-port={port}" in objects.args
    assert ("port-forward pod/demo-shoal-0 8001" in objects.notes) == (port == "8001")


def test_the_admin_port_is_offered_to_no_one(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    assert not any(arg.startswith("--admin-host") for arg in objects.args)
    offered = [objects.of("Service"), objects.of("NetworkPolicy"), objects.container["ports"]]
    assert "8001" not in json.dumps(offered)


# --- network ---


def test_only_the_api_may_be_reached_and_only_what_is_needed_left(helm: Helm) -> None:
    policy = helm.render().one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert ports == {53, 443}


def test_networks_can_be_closed_further(helm: Helm) -> None:
    policy = helm.render(EVERYTHING).one("NetworkPolicy")["spec"]
    assert policy["ingress"][0]["from"] == EVERYTHING["networkPolicy"]["from"]
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert ports == {53, 4317}


def test_clients_have_one_address_and_routers_one_for_each_node(helm: Helm) -> None:
    objects = helm.render({"service": {"port": 80}})
    clients, nodes = (objects.one("Service", name) for name in (NAME, f"{NAME}-nodes"))
    assert clients["spec"]["ports"][0]["port"] == 80
    assert nodes["spec"]["clusterIP"] == "None"
    assert objects.one("StatefulSet")["spec"]["serviceName"] == f"{NAME}-nodes"


# --- monitoring ---


def test_nothing_needs_a_custom_resource_unless_asked_for(helm: Helm) -> None:
    assert {one["kind"] for one in helm.render().all} == {
        "StatefulSet",
        "Service",
        "ServiceAccount",
        "PodDisruptionBudget",
        "NetworkPolicy",
    }


def test_rules_are_those_that_are_tested(helm: Helm) -> None:
    objects = helm.render(MATRIX["monitoring"])
    for original in ORIGINALS["rules"].iterdir():
        rule = objects.one("PrometheusRule", f"{NAME}-{original.stem}")
        assert rule["spec"] == yaml.safe_load(original.read_text())


def test_dashboards_are_those_that_are_tested(helm: Helm) -> None:
    objects = helm.render(MATRIX["monitoring"])
    originals = sorted(ORIGINALS["dashboards"].iterdir())
    assert len(objects.of("ConfigMap")) == len(originals)
    for original in originals:
        name = original.stem.removeprefix("shoal-")
        board = objects.one("ConfigMap", f"{NAME}-{name}-dashboard")
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(board["data"][original.name]) == json.loads(original.read_text())


def test_prometheus_calls_jobs_and_nodes_as_rules_and_dashboards_do(helm: Helm) -> None:
    (endpoint,) = helm.render(MATRIX["monitoring"]).one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["relabelings"] == [
        {"targetLabel": "job", "replacement": "shoal"},
        {"targetLabel": "instance", "sourceLabels": ["__meta_kubernetes_pod_name"]},
    ]
    assert endpoint["path"] == "/metrics"
    assert "authorization" not in endpoint


def test_prometheus_has_a_key_where_metrics_need_one(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    assert "--metrics=key" in objects.args
    (endpoint,) = objects.one("ServiceMonitor")["spec"]["endpoints"]
    credentials = {"name": "scrape", "key": "key"}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": credentials}


def test_metrics_can_be_for_no_one(helm: Helm) -> None:
    assert "--metrics=open" in helm.render().args
    assert "--metrics=off" in helm.render(MATRIX["no metrics"]).args


# --- scaling ---


def test_keda_counts_what_waits_and_what_runs_on_this_releases_nodes(helm: Helm) -> None:
    scaled = helm.render(MATRIX["keda"]).one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": NAME,
    }
    queries = {t["name"]: t["metadata"]["query"] for t in scaled["triggers"]}
    here = 'namespace="llm", service="demo-shoal-nodes"'
    assert queries == {
        "waiting": f"sum(shoal_pool_waiting{{{here}}})",
        "running": f'sum(shoal_engine_requests{{{here}, state="running"}})',
    }
    assert {t["metadata"]["serverAddress"] for t in scaled["triggers"]} == {PROMETHEUS}
    assert {t["metadata"]["ignoreNullValues"] for t in scaled["triggers"]} == {"false"}


def test_the_hpa_goes_by_the_same(helm: Helm) -> None:
    scaled = helm.render(MATRIX["hpa"]).one("HorizontalPodAutoscaler")["spec"]
    keda = helm.render(MATRIX["keda"]).one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == keda["scaleTargetRef"]
    assert scaled["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    targets = [m["pods"]["target"]["averageValue"] for m in scaled["metrics"]]
    assert targets == [t["metadata"]["threshold"] for t in keda["triggers"]]


def test_nodes_go_slower_than_they_come(helm: Helm) -> None:
    values = {"autoscaling": {"by": "hpa", "scaleDownSeconds": 900}}
    behavior = helm.render(values).one("HorizontalPodAutoscaler")["spec"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 900
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] < 900


def test_only_one_autoscaler_can_be_had(helm: Helm) -> None:
    scalers = ("ScaledObject", "HorizontalPodAutoscaler")
    for name, count in (("defaults", 0), ("keda", 1), ("hpa", 1)):
        objects = helm.render(MATRIX[name])
        assert sum(len(objects.of(kind)) for kind in scalers) == count


def test_a_gateway_finds_pods_and_what_engine_they_are(helm: Helm) -> None:
    objects = helm.render(MATRIX["gateway"])
    pool = objects.one("InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": objects.container["ports"][0]["containerPort"]}]
    assert pool["endpointPickerRef"]["name"] == "epp"
    assert objects.pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"


# --- what is refused ---

WRONG = [
    ({"node": {"gpus": 3}}, "/node/gpus"),
    ({"node": {"gpu": 8}}, "gpu"),
    ({"replicas": "two"}, "/replicas"),
    ({"image": {"tag": "latest"}}, "/image/tag"),
    ({"image": {"digest": "sha256:1"}}, "/image/digest"),
    ({"probes": {"startupSeconds": 60}}, "/probes/startupSeconds"),
    ({"auth": {"apiKeys": [{"name": "a"}]}}, "/auth/apiKeys/0"),
    ({"autoscaling": {"by": "both"}}, "/autoscaling/by"),
    ({"node": {"gpus": 2, "engines": 4}}, "node.engines is 4: a pod has only 2 GPUs"),
    ({"node": {"gpus": 2, "maxGroup": 4}}, "node.maxGroup is 4: a pod has only 2 engines"),
    ({"model": {"weights": {"from": "claim"}}}, "model.weights.claim: name the"),
    ({"model": {"weights": {"from": "hostPath"}}}, "model.weights.hostPath: name the"),
    ({"cache": {"from": "claim"}}, "cache.claim: name the"),
    ({"cache": {"from": "hostPath"}}, "cache.hostPath: name the"),
    (
        {"auth": {"existingSecret": {"name": "keys"}, "apiKeys": [KEY]}},
        "auth: give either existingSecret or keys",
    ),
    (
        {"metrics": {"access": "none", "serviceMonitor": {"enabled": True}}},
        "metrics.access is none: a ServiceMonitor",
    ),
    (
        {"metrics": {"access": "none"}, "autoscaling": {"by": "hpa"}},
        "metrics.access is none: an autoscaler",
    ),
    (
        {
            "auth": {"apiKeys": [KEY]},
            "metrics": {"access": "key", "serviceMonitor": {"enabled": True}},
        },
        "metrics.access is key: name the Secret",
    ),
    (
        {"autoscaling": {"by": "hpa", "minReplicas": 5}},
        "autoscaling.minReplicas is 5: maxReplicas is only 4",
    ),
    ({"autoscaling": {"by": "keda"}}, "autoscaling.prometheus: KEDA needs"),
    ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name: name the"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_values_are_refused_by_name(helm: Helm, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ChartError) as caught:
        helm.render(values)
    assert message in str(caught.value)
