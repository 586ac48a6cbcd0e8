"""Values to render the chart with: each thing that they can change, alone and all together.

Those that the chart needs (``chart.NEEDED``) are added to them.
"""

from collections.abc import Mapping
from typing import Any

KEY = {"name": "team", "key": "s3cret"}
PROMETHEUS = "http://prometheus-operated.monitoring:9090"

EVERYTHING: Mapping[str, Any] = {
    "replicas": 3,
    "image": {
        "repository": "registry.example.com/llm/shoal",
        "tag": "0.1.0-cuda",
        "digest": "sha256:" + "0123456789abcdef" * 4,
        "pullSecrets": [{"name": "registry"}],
    },
    "model": {
        "name": "/models/llama",
        "servedName": "llama",
        "weights": {"from": "claim", "claim": "weights"},
        "hubToken": {"secret": "hub"},
    },
    "node": {
        "gpus": 4,
        "maxGroup": 2,
        "args": ["--max-model-len=8192", "--chat-template=/etc/shoal/files/chat.jinja"],
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "files": {"chat.jinja": "{{ messages }}\n"},
    },
    "cache": {"from": "perPod", "storageClass": "fast", "keepWhenScaledDown": False},
    "batch": {"enabled": True, "size": "50Gi", "storageClass": "fast"},
    "resources": {"limitCpu": True, "cpu": 16},
    "auth": {"apiKeys": [KEY], "adminKeys": [{"name": "operator", "sha256": "0" * 64}]},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"a": "b"},
        "hosts": ["llm.example.com", "llm.example.org"],
        "tls": [{"secretName": "certificate", "hosts": ["llm.example.com"]}],
    },
    "httpRoute": {
        "enabled": True,
        "annotations": {"a": "b"},
        "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
        "timeout": "600s",
    },
    "extraVolumes": [{"name": "extra", "emptyDir": {"sizeLimit": "1Gi"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "initContainers": [{"name": "fetch", "image": "registry.example.com/fetch:1"}],
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"model": "llama"},
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "affinity": {"nodeAffinity": {}},
    "runtimeClassName": "nvidia",
    "priorityClassName": "serving",
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"team": "watch"}}}],
        "egress": {"https": False, "extra": [{"ports": [{"port": 4317, "protocol": "TCP"}]}]},
    },
    "metrics": {
        "access": "key",
        "port": 9191,
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
        },
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Shoal"}},
    },
    "autoscaling": {"by": "keda", "prometheus": PROMETHEUS},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "epp"}},
}

MATRIX: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "demo": {"demo": True},
    "open": {"auth": {"open": True}},
    "ingress": {"ingress": {"enabled": True, "hosts": ["llm.example.com"]}},
    "http route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
    "everything": EVERYTHING,
    "cpu": {"node": {"gpus": 0}, "cache": {"from": "emptyDir", "size": "20Gi"}},
    "one gpu": {"node": {"gpus": 1}},
    "two engines of eight gpus": {"node": {"engines": 2}},
    "names": {"fullnameOverride": "x" * 70, "nameOverride": "llm"},
    "weights on the machine": {"model": {"weights": {"from": "hostPath", "hostPath": "/data"}}},
    "batches alone have a claim": {"batch": {"enabled": True}, "cache": {"from": "emptyDir"}},
    "cache in a claim": {"cache": {"from": "claim", "claim": "cache"}},
    "cache on the machine": {"cache": {"from": "hostPath", "hostPath": "/data/cache"}},
    "api keys": {"auth": {"apiKeys": [KEY]}},
    "admin keys": {"auth": {"adminKeys": [KEY]}},
    "keys of one's own": {"auth": {"existingSecret": {"name": "keys"}}},
    "all keys of one's own": {
        "auth": {"existingSecret": {"name": "keys", "adminKeys": "admin-keys.json"}}
    },
    "no metrics on the API's port": {"metrics": {"access": "none"}},
    "monitoring": {
        "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "rules", "dashboards")}
    },
    "hpa": {"autoscaling": {"by": "hpa", "minReplicas": 2, "maxReplicas": 2}},
    "keda": {"autoscaling": {"by": "keda", "prometheus": PROMETHEUS}},
    "gateway": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "epp"}}},
    "no extras": {
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "tolerations": [],
        "topologySpread": [],
    },
}
