"""What custom resources may consist of, for their definitions come with no package: JSON Schemas.

Of each kind only the fields that the chart sets, so that a wrong name is found. They were compared
with the definitions of prometheus-operator 0.93, KEDA 2.20 and Gateway API Inference Extension 1.6.
HTTPRoute's follow Gateway API 1, and were not compared.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h|d)$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required: str, optional: str = "", **types: Schema) -> Schema:
    """Return the schema of an object that has no other fields than these.

    Args:
        required: names, in words.
        optional: names, in words.
        types: schema of each.
    """
    assert set(types) == set((required + " " + optional).split())
    return {
        "type": "object",
        "required": required.split(),
        "properties": types,
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    """Return the schema of a list that is not empty."""
    return {"type": "array", "items": item, "minItems": 1}


_SELECTOR = fields("matchLabels", matchLabels={**LABELS, "minProperties": 1})
_RULE = fields(
    "expr",
    "alert record for labels annotations",
    expr=TEXT,
    alert=TEXT,
    record=TEXT,
    labels=LABELS,
    annotations=LABELS,
    **{"for": DURATION},
)
_ENDPOINT = fields(
    "port path interval relabelings",
    "authorization",
    port=TEXT,
    path=TEXT,
    interval=DURATION,
    authorization=fields(
        "type credentials", type=TEXT, credentials=fields("name key", name=TEXT, key=TEXT)
    ),
    relabelings=many(
        fields(
            "targetLabel",
            "sourceLabels replacement",
            targetLabel=TEXT,
            sourceLabels=many(TEXT),
            replacement=TEXT,
        )
    ),
)
_SCALING = fields(
    "stabilizationWindowSeconds policies",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=many(
        fields(
            "type value periodSeconds",
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
_TRIGGER = fields(
    "type name metricType metadata",
    type={"const": "prometheus"},
    name=TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    # KEDA reads texts alone.
    metadata=fields(
        "serverAddress query threshold",
        "ignoreNullValues",
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=TEXT,
        threshold={"type": "string", "pattern": "^[0-9]+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): fields(
        "selector endpoints namespaceSelector",
        selector=_SELECTOR,
        namespaceSelector=fields("matchNames", matchNames=many(TEXT)),
        endpoints=many(_ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(
        "groups", groups=many(fields("name rules", name=TEXT, rules=many(_RULE)))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        "scaleTargetRef minReplicaCount maxReplicaCount pollingInterval fallback advanced triggers",
        scaleTargetRef=fields("apiVersion kind name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        fallback=fields(
            "failureThreshold replicas behavior",
            failureThreshold=COUNT,
            replicas=COUNT,
            behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher"]},
        ),
        advanced=fields(
            "horizontalPodAutoscalerConfig",
            horizontalPodAutoscalerConfig=fields(
                "behavior",
                behavior=fields("scaleUp scaleDown", scaleUp=_SCALING, scaleDown=_SCALING),
            ),
        ),
        triggers=many(_TRIGGER),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): fields(
        "parentRefs rules",
        "hostnames",
        parentRefs=many(fields("name", "namespace", name=TEXT, namespace=TEXT)),
        hostnames=many(TEXT),
        rules=many(
            fields(
                "matches backendRefs",
                "timeouts",
                matches=many(
                    fields("path", path=fields("type value", type=TEXT, value=TEXT)),
                ),
                backendRefs=many(fields("name port", name=TEXT, port=PORT)),
                timeouts=fields("request", request=DURATION),
            )
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): fields(
        "selector targetPorts endpointPickerRef",
        selector=_SELECTOR,
        targetPorts={**many(fields("number", number=PORT)), "maxItems": 8},
        endpointPickerRef=fields(
            "name port failureMode",
            name=TEXT,
            port=fields("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
}
"""``apiVersion`` and ``kind`` -> the schema of ``spec``."""
