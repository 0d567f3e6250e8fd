"""
Values of a small site, the least that renders, and how tests change them.
"""

from copy import deepcopy
from typing import Any

Values = dict[str, Any]
DIGEST = "sha256:" + "0123456789abcdef" * 4

SITE: Values = {
    "images": {name: {"digest": DIGEST} for name in ("gateway", "workerGpu", "workerCpu", "postgres")},
    "keys": {"controlToken": {"existingSecret": "control-token"}},
    "models": [
        {"name": "ministry-8b", "target": {"source": "pvc", "claimName": "weights", "path": "target"}}
    ],
}
"""One gateway on SQLite, one GPU worker without a draft."""
DRAFTED: Values = {
    "method": "eagle3",
    "draft": {"source": "pvc", "claimName": "weights", "path": "draft"},
}
"""What makes a model speculate."""
SEVERAL: Values = {
    "gateway": {"kind": "Deployment", "replicas": 3},
    "keys": {
        "signingKey": {"existingSecret": "signing-key"},
        "tenantsMac": {"existingSecret": "tenants-mac"},
    },
    "caBundle": {"existingConfigMap": "authorities"},
    "database": {
        "kind": "external",
        "external": {
            "host": "db.clinic.example",
            "existingSecret": "database",
            "to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}],
        },
    },
}
"""Three gateways on an existing PostgreSQL."""
IN_CHART: Values = {"database": {"kind": "inChart", "inChart": {"existingSecret": "postgres"}}}
"""PostgreSQL in the chart."""
REGISTRY: Values = {
    "drafts": {"existingClaim": "drafts", "trustedKeys": {"existingConfigMap": "drafts-trusted"}},
    "keys": {"draftsKey": {"existingSecret": "drafts-key"}},
}
"""A draft registry that gateways and workers share."""
REFRESH: Values = {
    **REGISTRY,
    "keys": {**REGISTRY["keys"], "tenantsMac": {"existingSecret": "tenants-mac"}},
    "gateway": {"sharedFiles": {"existingClaim": "shared"}},
    "draftRefresh": {
        "enabled": True,
        "model": "ministry-8b",
        "purpose": "drafts have aged, ticket 7",
        "gpu": {"type": "NVIDIA-H100-80GB-HBM3"},
    },
}
"""What a refresh of a draft needs, besides PostgreSQL and a model with a draft."""
WEIGHTS_LOAD: Values = {
    "weightsLoad": {
        "enabled": True,
        "claimName": "weights",
        "from": {"hostPath": "/mnt/usb", "path": "bundle"},
        "trustedKeys": {"existingConfigMap": "bundle-keys"},
    },
}
"""A Job that fills the claim of `SITE` from a bundle on a node."""
PICKER: Values = {
    "picker": {
        "enabled": True,
        "pods": {"labels": {"app": "vllm-llama3-8b"}, "port": 8080},
        "gateway": {"name": "inference", "namespace": "gateways"},
        "proxies": [{"namespaceSelector": {"matchLabels": {"team": "platform"}}}],
    },
}
"""An endpoint picker for pods of others."""


def site(*changes: Values, model: Values | None = None) -> Values:
    """`SITE` with `changes` put over it one after the other, and `model` over its only model."""
    values = deepcopy(SITE)
    for change in changes:
        values = over(values, change)
    if model is not None:
        values["models"] = [over(SITE["models"][0], model)]
    return values


def over(below: Values, above: Values) -> Values:
    """Maps key by key, everything else as a whole, as Helm puts one values file over another."""
    merged = deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = over(merged[key], value) if both else deepcopy(value)
    return merged


def named(values: object) -> frozenset[str]:
    """Every text in the values, which includes the names of existing objects."""
    if isinstance(values, dict):
        return frozenset[str]().union(*map(named, values.values()))
    if isinstance(values, list):
        return frozenset[str]().union(*map(named, values))
    return frozenset({values}) if isinstance(values, str) else frozenset()
