"""Whatever the values, the objects are valid, belong together, and follow good practice."""

import functools
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate import utils

from tests.deploy.chart import NAMESPACE, RELEASE, Helm, Object, Objects
from tests.deploy.custom_resources import SPECS
from tests.deploy.matrix import MATRIX

VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""The oldest Kubernetes that the chart allows, and the newest that is known."""
HOST_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """Have the validator read each of its large files once, not anew for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.fixture(scope="module", params=MATRIX.values(), ids=MATRIX.keys())
def objects(helm: Helm, request: pytest.FixtureRequest) -> Objects:
    return helm.render(request.param)


def invalid(one: Object) -> Iterator[str]:
    """Yield what is wrong with an object."""
    schema = SPECS.get((one["apiVersion"], one["kind"]))
    try:
        if schema is not None:
            jsonschema.validate(one["spec"], schema)
            return
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)
    except (jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        yield f"{one['kind']}: {error.message}"


def test_all_objects_are_valid(objects: Objects) -> None:
    assert [line for one in objects.all for line in invalid(one)] == []


def test_invalid_objects_are_found(helm: Helm) -> None:
    objects = helm.render(MATRIX["everything"])
    wrong = objects.one("StatefulSet")
    wrong["spec"]["replica"] = 1
    assert list(invalid(wrong)) == [
        "StatefulSet: Additional properties are not allowed ('replica' was unexpected)"
    ]
    wrong = objects.one("ScaledObject")
    wrong["spec"]["triggers"][0]["metadata"]["threshold"] = 8
    assert list(invalid(wrong)) == ["ScaledObject: 8 is not of type 'string'"]
    assert list(invalid({"apiVersion": "v1", "kind": "Pot"})) != []


def test_every_way_to_keep_things_makes_valid_pods(helm: Helm) -> None:
    stored = {"claim": "c", "hostPath": "/data"}
    caches, weights_from = (
        ("perPod", "claim", "hostPath", "emptyDir"),
        ("none", "claim", "hostPath"),
    )
    for cache, weights, gpus in product(caches, weights_from, (0, 8)):
        objects = helm.render(
            {
                "cache": {"from": cache, **stored},
                "model": {"name": "/models/m", "weights": {"from": weights, **stored}},
                "node": {"gpus": gpus},
            }
        )
        assert list(invalid(objects.one("StatefulSet"))) == []
        check_volumes(objects)


def check_volumes(objects: Objects) -> None:
    """Every mount has a volume, every volume a mount, and no two mounts one place."""
    claims = objects.one("StatefulSet")["spec"].get("volumeClaimTemplates", [])
    volumes = [*objects.volumes, *(claim["metadata"]["name"] for claim in claims)]
    assert sorted(volumes) == sorted(objects.mounts)
    paths = [mount["mountPath"] for mount in objects.mounts.values()]
    assert len(set(paths)) == len(paths)


def test_volumes_and_mounts_belong_together(objects: Objects) -> None:
    check_volumes(objects)


def check_names(objects: Objects) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in objects.all]
    assert len(set(names)) == len(names)
    for kind, name in names:
        assert HOST_NAME.fullmatch(name), (kind, name)
        assert len(name) <= (63 if kind in ("Service", "StatefulSet") else 253), (kind, name)
    # What a StatefulSet adds to its name for its pods' labels: a hash of ten characters.
    assert len(objects.one("StatefulSet")["metadata"]["name"]) + 11 <= 63


def test_names_are_names_of_hosts_and_each_is_there_once(objects: Objects) -> None:
    check_names(objects)


def test_a_long_release_name_is_cut(helm: Helm) -> None:
    check_names(helm.render(MATRIX["everything"], name="r" * 53))


def test_objects_carry_the_labels_that_tools_know(objects: Objects) -> None:
    for one in objects.all:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["helm.sh/chart"] == "shoal-0.1.0"


def selectors(value: object) -> Iterator[Mapping[str, str]]:
    """Yield everything that selects pods, anywhere in an object but for peers in a network."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "from":
                continue
            if key in ("selector", "labelSelector", "podSelector") and inner:
                yield inner.get("matchLabels", inner)
            else:
                yield from selectors(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from selectors(inner)


def test_whatever_selects_pods_selects_these(objects: Objects) -> None:
    labels = objects.pod["metadata"]["labels"]
    kinds = ("StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "InferencePool")
    for one in [one for kind in kinds for one in objects.of(kind)]:
        for wanted in selectors(one["spec"]):
            assert wanted.items() <= labels.items(), one["kind"]


def test_a_service_monitor_selects_one_service(helm: Helm) -> None:
    objects = helm.render(MATRIX["monitoring"])
    monitor = objects.one("ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = [s for s in objects.of("Service") if wanted <= s["metadata"]["labels"].items()]
    assert service["spec"]["clusterIP"] == "None"
    ports = {port["name"]: port for port in service["spec"]["ports"]}
    target = ports[monitor["endpoints"][0]["port"]]["targetPort"]
    assert target in [port["name"] for port in objects.container["ports"]]
    assert monitor["namespaceSelector"] == {"matchNames": [NAMESPACE]}


def test_pods_have_no_rights_that_they_do_not_need(objects: Objects) -> None:
    pod, container = objects.pod["spec"], objects.container
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all("hostPort" not in port for port in container["ports"])
    assert objects.of("Role") == objects.of("ClusterRole") == []


def test_pods_say_what_they_need_and_no_more(objects: Objects) -> None:
    requests, limits = (objects.container["resources"][part] for part in ("requests", "limits"))
    assert requests["memory"] == limits["memory"]
    assert float(requests["cpu"]) > 0
    assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
    for volume in objects.volumes.values():
        if "emptyDir" in volume:
            assert "sizeLimit" in volume["emptyDir"], volume


def test_images_have_a_version(objects: Objects) -> None:
    image = objects.container["image"]
    assert ":" in image.rsplit("/", 1)[-1]
    assert ":latest" not in image


def test_keys_are_in_no_argument_variable_or_note(objects: Objects) -> None:
    for one in objects.all:
        if one["kind"] != "Secret":
            assert "s3cret" not in str(one)
    assert "s3cret" not in objects.notes


def test_probes_are_patient_in_the_right_places(objects: Objects) -> None:
    container = objects.container

    def seconds(probe: str) -> int:
        settings: dict[str, Any] = container[probe]
        assert settings["httpGet"]["port"] == container["ports"][0]["name"]
        # Time to answer: the front end itself waits two seconds for the controller.
        assert settings["timeoutSeconds"] > 2
        return int(settings["periodSeconds"] * settings["failureThreshold"])

    assert seconds("startupProbe") >= 900
    assert seconds("readinessProbe") <= 15
    assert seconds("livenessProbe") >= 60
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if "Probe" in probe}
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }


def test_a_pod_has_time_to_drain(objects: Objects) -> None:
    (drain,) = [a.split("=")[1] for a in objects.args if a.startswith("--shutdown-timeout=")]
    unready = objects.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    rest = objects.pod["spec"]["terminationGracePeriodSeconds"] - int(drain) - unready
    # Front ends, engines and controller may take five seconds each to end.
    assert rest > 15


def test_a_cluster_can_be_upgraded(objects: Objects) -> None:
    for budget in objects.of("PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] >= 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_helm_finds_nothing_to_complain_about(helm: Helm) -> None:
    for values in MATRIX.values():
        assert list(helm.lint(values)) == []
