"""What single values of the chart change."""

import json
import tomllib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.generate import CHART, ORIGINALS
from shoal.server.gate.key_ring import read_api_keys
from tests.deploy.chart import NAME, ChartError, Helm, Objects
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


def test_the_demo_is_small_and_needs_nothing(helm: Helm) -> None:
    objects = helm.render_only({"demo": True})
    assert objects.args[:2] == ["serve", "--host=0.0.0.0"]
    assert "--engines=2" in objects.args
    assert objects.container["image"] == "shoal:cpu"
    requests = objects.container["resources"]["requests"]
    assert requests == {"cpu": "2", "memory": "4Gi"}
    assert "volumeClaimTemplates" not in objects.one("StatefulSet")["spec"]
    assert "emptyDir" in objects.volumes["cache"]
    own = {"demo": True, "image": {"repository": "registry.example.com/shoal", "tag": "mine"}}
    assert helm.render_only(own).container["image"] == "registry.example.com/shoal:mine"


@pytest.mark.parametrize(
    ("values", "typed"),
    [
        ({}, "--set image.repository=REGISTRY/shoal --set model.name=MODEL, or --set demo=true"),
        ({"model": {"name": "m"}}, "add --set image.repository=REGISTRY/shoal, or"),
        ({"image": {"repository": "r"}}, "add --set model.name=MODEL, or"),
        ({"model": {"name": "m"}, "demo": True}, "take out demo, or model.name (m)"),
    ],
)
def test_without_image_and_model_the_line_to_type_is_said(
    helm: Helm, values: dict[str, Any], typed: str
) -> None:
    with pytest.raises(ChartError) as caught:
        helm.render_only(values)
    assert typed in str(caught.value)


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


def test_batches_have_a_disk_that_outlives_the_pod(helm: Helm) -> None:
    objects = helm.render(
        {"batch": {"enabled": True, "size": "9Gi"}, "cache": {"keepWhenScaledDown": False}}
    )
    spec = objects.one("StatefulSet")["spec"]
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in spec["volumeClaimTemplates"]}
    assert claims.keys() == {"cache", "batches"}
    assert claims["batches"]["resources"] == {"requests": {"storage": "9Gi"}}
    assert spec["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Retain"
    (container,) = spec["template"]["spec"]["containers"]
    place = objects.mounts["batches"]["mountPath"]
    assert f"--batch-dir={place}/batches" in container["args"]


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


def test_a_capability_can_be_added(helm: Helm) -> None:
    wanted = {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    container = container_with(helm, securityContext={"capabilities": wanted})
    assert container["securityContext"]["capabilities"] == wanted
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_what_is_extra_is_taken_as_it_is(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    assert objects.pod["spec"]["initContainers"] == EVERYTHING["initContainers"]
    assert objects.volumes["extra"] == EVERYTHING["extraVolumes"][0]
    assert objects.mounts["extra"] == EVERYTHING["extraVolumeMounts"][0]


def test_extra_objects_may_have_templates(helm: Helm) -> None:
    plain = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-templated'}\n"
    objects = helm.render({"extraObjects": [plain, text]})
    assert objects.one("ConfigMap", "plain") == plain
    assert objects.one("ConfigMap", "demo-templated")


# --- keys ---


def made_keys(objects: Objects) -> dict[str, list[dict[str, str]]]:
    """Return the keys that the chart made, by their file."""
    data = objects.one("Secret", f"{NAME}-made-keys")["data"]
    return {file: json.loads(b64decode(text)) for file, text in data.items()}


def test_keys_are_made_unless_the_api_is_to_be_open(helm: Helm) -> None:
    objects = helm.render()
    one, two = made_keys(objects), made_keys(helm.render())
    assert {file: [key["name"] for key in keys] for file, keys in one.items()} == {
        "api-keys.json": ["default"],
        "admin-keys.json": ["operator"],
    }
    texts = [key["key"] for made in (one, two) for keys in made.values() for key in keys]
    assert len(set(texts)) == 4
    assert min(map(len, texts)) >= 32
    assert "--api-key-file=/etc/shoal/keys/api-keys.json" in objects.args
    assert "--admin-key-file=/etc/shoal/keys/admin-keys.json" in objects.args
    assert f"get secret {NAME}-made-keys" in objects.notes
    for text in texts:
        assert text not in objects.notes


def test_an_open_api_has_no_keys_and_says_so(helm: Helm) -> None:
    objects = helm.render({"auth": {"open": True}})
    assert objects.of("Secret") == []
    assert not any("key-file" in arg for arg in objects.args)
    assert "The API is open" in objects.notes
    assert "The API is open" not in helm.render().notes


def test_keys_of_the_operator_are_used_with_made_ones(helm: Helm) -> None:
    objects = helm.render({"auth": {"adminKeys": [KEY]}})
    assert made_keys(objects)["admin-keys.json"] == [KEY]


def test_keys_that_leave_the_values_are_not_found_again(helm: Helm) -> None:
    """At an upgrade made keys are read from the cluster, by a name that given ones never have."""
    given = helm.render({"auth": {"apiKeys": [KEY]}}).one("Secret")["metadata"]["name"]
    assert given != helm.render().one("Secret")["metadata"]["name"]


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
        ({"auth": {"open": True}}, "8001"),
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


def test_two_ports_may_be_reached_and_only_what_is_needed_left(helm: Helm) -> None:
    policy = helm.render().one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [
        {"ports": [{"port": name, "protocol": "TCP"}]} for name in ("http", "metrics")
    ]
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert ports == {53, 443}


def test_networks_can_be_closed_further(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    policy = objects.one("NetworkPolicy")["spec"]
    api, metrics = policy["ingress"]
    *peers, tested = api["from"]
    assert peers == EVERYTHING["networkPolicy"]["from"]
    assert metrics["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    assert [rule["ports"][0]["port"] for rule in (api, metrics)] == ["http", "metrics"]
    labels = objects.one("Pod")["metadata"]["labels"]
    assert tested["podSelector"]["matchLabels"].items() <= labels.items()
    ports = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert ports == {53, 4317}


def test_clients_have_one_address_and_routers_one_for_each_node(helm: Helm) -> None:
    objects = helm.render({"service": {"port": 80}})
    clients, nodes = (objects.one("Service", name) for name in (NAME, f"{NAME}-nodes"))
    assert [port["name"] for port in nodes["spec"]["ports"]] == ["http", "metrics"]
    assert clients["spec"]["ports"][0]["port"] == 80
    assert nodes["spec"]["clusterIP"] == "None"
    assert objects.one("StatefulSet")["spec"]["serviceName"] == f"{NAME}-nodes"


def test_hosts_and_gateways_lead_to_the_service_of_clients(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    service = objects.one("Service", NAME)["spec"]["ports"][0]
    ingress = objects.one("Ingress")["spec"]
    assert [rule["host"] for rule in ingress["rules"]] == EVERYTHING["ingress"]["hosts"]
    for rule in ingress["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["path"] == "/v1"  # and not /metrics, which is open
        assert path["backend"]["service"] == {"name": NAME, "port": {"name": service["name"]}}
    assert ingress["tls"] == EVERYTHING["ingress"]["tls"]
    route = objects.one("HTTPRoute")["spec"]
    assert route["parentRefs"] == EVERYTHING["httpRoute"]["parentRefs"]
    (rule,) = route["rules"]
    assert rule["backendRefs"] == [{"name": NAME, "port": service["port"]}]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "600s"}
    opened = helm.render({"ingress": {"enabled": True, "hosts": ["a"], "paths": ["/v1", "/ready"]}})
    (rule,) = opened.one("Ingress")["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1", "/ready"]


def test_helms_test_is_no_node(helm: Helm) -> None:
    objects = helm.render({"service": {"port": 80}})
    test = objects.one("Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    for service in objects.of("Service"):
        assert not service["spec"]["selector"].items() <= test["metadata"]["labels"].items()
    (container,) = test["spec"]["containers"]
    assert container["image"] == objects.container["image"]
    assert container["args"] == [f"http://{NAME}:80", "/etc/shoal/keys/api-keys.json"]


# --- monitoring ---


def test_nothing_needs_a_custom_resource_unless_asked_for(helm: Helm) -> None:
    assert {one["kind"] for one in helm.render().all} == {
        "StatefulSet",
        "Secret",
        "Pod",
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


def test_prometheus_reads_a_port_that_needs_no_key(helm: Helm) -> None:
    objects = helm.render(EVERYTHING)
    assert {"--metrics=key", "--metrics-port=9191"} <= set(objects.args)
    ports = {port["name"]: port["containerPort"] for port in objects.container["ports"]}
    assert ports == {"http": 8000, "metrics": 9191}
    nodes = objects.one("Service", f"{NAME}-nodes")["spec"]["ports"]
    (port,) = (port for port in nodes if port["name"] == "metrics")
    assert (port["port"], port["targetPort"]) == (9191, "metrics")
    (endpoint,) = objects.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] == "metrics"
    assert "authorization" not in endpoint


def test_metrics_on_the_api_s_port_can_be_for_no_one(helm: Helm) -> None:
    assert "--metrics=open" in helm.render().args
    assert "--metrics=off" in helm.render(MATRIX["no metrics on the API's port"]).args


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
    ({"auth": {"open": True, "apiKeys": [KEY]}}, "auth.open: there are API keys"),
    ({"auth": {"open": True, "existingSecret": {"name": "keys"}}}, "auth.open: there are API"),
    (
        {"auth": {"existingSecret": {"name": "keys", "apiKeys": ""}}},
        "auth.existingSecret.apiKeys: name the key",
    ),
    ({"ingress": {"enabled": True}}, "ingress.hosts: name the host"),
    ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name the gateway"),
    (
        {"auth": {"existingSecret": {"name": "keys"}, "apiKeys": [KEY]}},
        "auth: give either existingSecret or keys",
    ),
    ({"metrics": {"port": 8000}}, "/metrics/port"),
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
