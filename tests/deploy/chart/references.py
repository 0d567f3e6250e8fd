"""
Checks beyond schemas: names without an object, and selectors without a match.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]


def dangling(objects: list[Object], *, existing: frozenset[str] = frozenset()) -> list[str]:
    """
    Every reference that leads nowhere, a sentence each.

    `existing` are names of objects that a site makes beforehand, such as the Secrets its values name.
    """
    return sorted({*_twice(objects), *_in_pods(objects, existing), *_selectors(objects), *_targets(objects)})


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Owner and template of every pod, hooks included."""
    for thing in objects:
        name = f"{thing['kind']}/{thing['metadata']['name']}"
        if thing["kind"] == "Pod":
            yield name, thing
        elif thing["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield name, thing["spec"]["template"]
        elif thing["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                if part in thing["spec"]["leaderWorkerTemplate"]:
                    yield f"{name} ({part})", thing["spec"]["leaderWorkerTemplate"][part]


def containers(template: Object) -> list[Object]:
    """Those that start first as well."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def _twice(objects: list[Object]) -> Iterator[str]:
    seen = Counter((thing["kind"], thing["metadata"]["name"]) for thing in objects)
    yield from (f"{kind}/{name} is there {times} times" for (kind, name), times in seen.items() if times > 1)


def _in_pods(objects: list[Object], existing: frozenset[str]) -> Iterator[str]:
    made = {(thing["kind"], thing["metadata"]["name"]) for thing in objects}
    claims = {
        f"{thing['kind']}/{thing['metadata']['name']}": {
            claim["metadata"]["name"] for claim in thing["spec"].get("volumeClaimTemplates", [])
        }
        for thing in objects
        if thing["kind"] == "StatefulSet"
    }
    made |= {("Secret", thing["spec"]["secretName"]) for thing in objects if thing["kind"] == "Certificate"}
    made |= {
        ("PersistentVolumeClaim", f"{claim}-{owner.partition('/')[2]}-0")
        for owner, names in claims.items()
        for claim in names
    }
    for owner, template in pods(objects):
        volumes = [volume["name"] for volume in template["spec"].get("volumes", [])] + sorted(
            claims.get(owner, ())
        )
        yield from (f"{owner}: two volumes {name}" for name, times in Counter(volumes).items() if times > 1)
        mounted = set()
        for container in containers(template):
            mounts = container.get("volumeMounts", [])
            mounted |= {mount["name"] for mount in mounts}
            paths = Counter(mount["mountPath"] for mount in mounts)
            yield from (f"{owner}: two mounts at {path}" for path, times in paths.items() if times > 1)
        yield from (f"{owner}: the volume {name} is missing" for name in mounted - set(volumes))
        yield from (f"{owner}: nothing mounts {name}" for name in set(volumes) - mounted)
        for kind, name in _named(template["spec"]):
            if (kind, name) not in made and name not in existing:
                yield f"{owner}: {kind}/{name} is neither made here nor named in the values"


def _named(spec: Object) -> Iterator[tuple[str, str]]:
    """Kind and name of what a pod's spec refers to and cannot start without."""
    if name := spec.get("serviceAccountName"):
        yield "ServiceAccount", name
    yield from (("Secret", secret["name"]) for secret in spec.get("imagePullSecrets", []))
    volumes = spec.get("volumes", [])
    for volume in [*volumes, *(s for v in volumes for s in v.get("projected", {}).get("sources", []))]:
        yield from _mounted(volume)
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        yield from _in_environment(container)


def _mounted(volume: Object) -> Iterator[tuple[str, str]]:
    """Source of a volume, or of one part of a projected volume."""
    for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
        source = volume.get(field, {})
        if (name := source.get("secretName") or source.get("name")) and not source.get("optional"):
            yield kind, name
    if name := volume.get("persistentVolumeClaim", {}).get("claimName"):
        yield "PersistentVolumeClaim", name


def _in_environment(container: Object) -> Iterator[tuple[str, str]]:
    sources = [(entry, "Ref") for entry in container.get("envFrom", [])]
    sources += [(entry.get("valueFrom", {}), "KeyRef") for entry in container.get("env", [])]
    for source, suffix in sources:
        for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if field + suffix in source:
                yield kind, source[field + suffix]["name"]


def _selectors(objects: list[Object]) -> Iterator[str]:
    """Each selector finds a pod; a workload's finds its own, and no other workload's does."""
    templates = list(pods(objects))
    of_others = [
        each["spec"]["selector"]["matchLabels"] for each in objects if each["kind"] == "InferencePool"
    ]
    for thing in objects:
        name = f"{thing['kind']}/{thing['metadata']['name']}"
        if thing["kind"] in {"Deployment", "StatefulSet"}:
            found = {owner for owner, pod in templates if _selects(thing["spec"]["selector"], pod)}
            if found != {name}:
                yield f"{name}: its selector finds {sorted(found)}"
        elif thing["kind"] in {"PodDisruptionBudget", "NetworkPolicy"}:
            selector = thing["spec"].get("selector", thing["spec"].get("podSelector", {}))
            if not any(_selects(selector, pod) for _, pod in templates):
                yield f"{name}: it selects nothing"
        elif thing["kind"] == "Service" and thing["spec"].get("selector", {}) not in [{}, *of_others]:
            yield from _served(name, thing["spec"], templates)
        elif thing["kind"] == "ServiceMonitor":
            yield from _scraped(name, thing["spec"], objects)


def _served(name: str, spec: Object, templates: list[tuple[str, Object]]) -> Iterator[str]:
    """What a Service leads to has the ports it leads to."""
    chosen = [(owner, pod) for owner, pod in templates if _selects({"matchLabels": spec["selector"]}, pod)]
    if not chosen:
        yield f"{name}: it selects nothing"
    for owner, pod in chosen:
        ports = {port for container in containers(pod) for port in _ports(container)}
        if missing := {port.get("targetPort", port["port"]) for port in spec["ports"]} - ports:
            yield f"{name}: {owner} has no port {sorted(map(str, missing))}"


def _scraped(name: str, spec: Object, objects: list[Object]) -> Iterator[str]:
    """A ServiceMonitor selects an existing Service with a port of that name."""
    wanted = spec["selector"]["matchLabels"].items()
    services = [s for s in objects if s["kind"] == "Service" and wanted <= s["metadata"]["labels"].items()]
    asked = {endpoint["port"] for endpoint in spec["endpoints"]}
    if not services or any(asked - {port.get("name") for port in s["spec"]["ports"]} for s in services):
        yield f"{name}: no Service has the port {sorted(asked)}"


def _selects(selector: Object, pod: Object) -> bool:
    labels = pod["metadata"].get("labels", {})
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in selector.get("matchExpressions", [])
    )


def _ports(container: Object) -> Iterator[str | int]:
    for port in container.get("ports", []):
        yield port["containerPort"]
        if "name" in port:
            yield port["name"]


def _targets(objects: list[Object]) -> Iterator[str]:
    """Targets of autoscalers and routes exist, and only one autoscaler sets the replicas."""
    made = {(thing["kind"], thing["metadata"]["name"]): thing for thing in objects}
    for thing in objects:
        spec, name = thing.get("spec", {}), f"{thing['kind']}/{thing['metadata']['name']}"
        if "scaleTargetRef" in spec:
            target = made.get((spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]))
            if target is None:
                yield f"{name}: it scales {spec['scaleTargetRef']}, which is not there"
            elif "replicas" in target["spec"]:
                yield f"{name}: the chart sets the replicas of what it scales as well"
        for service in _services(thing):
            if ("Service", service) not in made:
                yield f"{name}: Service/{service} is not there"


def _services(thing: Object) -> list[str]:
    """Services that an object leads to by name."""
    if thing["kind"] == "StatefulSet":
        return [thing["spec"]["serviceName"]]
    if thing["kind"] == "Ingress":
        paths = [path for rule in thing["spec"].get("rules", []) for path in rule["http"]["paths"]]
        return [path["backend"]["service"]["name"] for path in paths]
    if thing["kind"] == "Route":
        return [thing["spec"]["to"]["name"]]
    return []
