"""Values to render the chart with: each thing that they can change, alone and all together."""

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
    "resources": {"limitCpu": True, "cpu": 16},
    "auth": {"apiKeys": [KEY], "adminKeys": [{"name": "operator", "sha256": "0" * 64}]},
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
        "egress": {"https": False, "extra": [{"ports": [{"port": 4317, "protocol": "TCP"}]}]},
    },
    "metrics": {
        "access": "key",
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "keySecret": {"name": "scrape"},
        },
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Shoal"}},
    },
    "autoscaling": {"by": "keda", "prometheus": PROMETHEUS},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "epp"}},
}

MATRIX: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "cpu": {"node": {"gpus": 0}, "cache": {"from": "emptyDir", "size": "20Gi"}},
    "one gpu": {"node": {"gpus": 1}},
    "two engines of eight gpus": {"node": {"engines": 2}},
    "names": {"fullnameOverride": "x" * 70, "nameOverride": "llm"},
    "weights on the machine": {"model": {"weights": {"from": "hostPath", "hostPath": "/data"}}},
    "cache in a claim": {"cache": {"from": "claim", "claim": "cache"}},
    "cache on the machine": {"cache": {"from": "hostPath", "hostPath": "/data/cache"}},
    "api keys": {"auth": {"apiKeys": [KEY]}},
    "admin keys": {"auth": {"adminKeys": [KEY]}},
    "keys of one's own": {"auth": {"existingSecret": {"name": "keys"}}},
    "all keys of one's own": {
        "auth": {"existingSecret": {"name": "keys", "adminKeys": "admin-keys.json"}}
    },
    "no metrics": {"metrics": {"access": "none"}},
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
