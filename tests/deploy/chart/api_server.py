"""
A stand-in for the Kubernetes API: enough of its REST interface for a real Helm engine to install through.

It keeps objects in memory, speaks discovery, server-side apply with one manager (what is applied *is*
the object), deletion and watches, and refuses what the schemas of the Kubernetes version it plays refuse.
What controllers would do it only claims: workloads are ready at once, jobs and pods of tests have
succeeded.  So it shows that a chart can be installed, upgraded and rolled back, not that its pods run.
"""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from aiohttp import web

Object = dict[str, Any]
PROTOBUF = b"k8s\x00"
"""What starts a body that client libraries sent in the binary form."""


@dataclass(frozen=True)
class Resource:
    """One kind of object: `api_version` is `v1` or `group/version`."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def base(self) -> str:
        """The path that its group and version are served under."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


BUILT_IN = (
    Resource("v1", "Namespace", "namespaces", namespaced=False),
    Resource("v1", "ConfigMap", "configmaps"),
    Resource("v1", "Secret", "secrets"),
    Resource("v1", "Service", "services"),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    Resource("v1", "Pod", "pods"),
    Resource("apps/v1", "Deployment", "deployments"),
    Resource("apps/v1", "ReplicaSet", "replicasets"),
    Resource("apps/v1", "StatefulSet", "statefulsets"),
    Resource("batch/v1", "Job", "jobs"),
    Resource("batch/v1", "CronJob", "cronjobs"),
    Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("networking.k8s.io/v1", "Ingress", "ingresses"),
    Resource("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Resource("resource.k8s.io/v1", "ResourceClaimTemplate", "resourceclaimtemplates"),
)
EXTENSIONS = (
    Resource("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors"),
    Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    Resource("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    Resource("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    Resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets"),
    Resource("inference.networking.k8s.io/v1", "InferencePool", "inferencepools"),
    Resource("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    Resource("cert-manager.io/v1", "Certificate", "certificates"),
    Resource("route.openshift.io/v1", "Route", "routes"),
)


class ApiServer:
    """The state, and the web application that serves it."""

    def __init__(
        self,
        *,
        version: str,
        admit: Callable[[Object], list[str]],
        extensions: tuple[Resource, ...] = (),
    ) -> None:
        """`admit` returns the error of an object; `extensions` are the installed custom resources."""
        self.version = version
        self.admit = admit
        self.resources = (*BUILT_IN, *extensions)
        self.objects: dict[str, Object] = {}
        """By path."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of everything that was asked."""
        self.unserved: list[str] = []
        """What was asked and is not spoken here: a test that sees any must not conclude anything."""
        self._revision = 0
        self._watchers: list[asyncio.Queue[tuple[str, Object]]] = []
        self.app = web.Application(client_max_size=2**24)
        self.app.router.add_route("*", "/{path:.*}", self._serve)

    def kind(self, kind: str) -> dict[str, Object]:
        """All objects of `kind` by name."""
        return {o["metadata"]["name"]: o for o in self.objects.values() if o["kind"] == kind}

    def installed(self) -> dict[tuple[str, str], Object]:
        """All objects by kind and name, but for the engine's own records of releases."""
        return {
            (o["kind"], o["metadata"]["name"]): o
            for o in self.objects.values()
            if not o.get("type", "").startswith("helm.sh/release")
        }

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path.rstrip("/") or "/"
        self.requests.append((request.method, path))
        if request.method == "GET" and (found := self._discovery(path)) is not None:
            return web.json_response(found)
        for resource in self.resources:
            if (place := _place(resource, path)) is not None:
                return await self._object(request, resource, path, place)
        self.unserved.append(f"{request.method} {path}")
        return _status(404, "NotFound", f"{path} is not served here")

    def _discovery(self, path: str) -> Object | None:
        groups = sorted({r.api_version for r in self.resources if "/" in r.api_version})
        if path.startswith("/openapi/v3"):
            return self._openapi(path.removeprefix("/openapi/v3"))
        if path == "/version":
            major, minor = self.version.split(".")[:2]
            return {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            shown = [{"groupVersion": group, "version": group.split("/")[1]} for group in groups]
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {"name": v["groupVersion"].split("/")[0], "versions": [v], "preferredVersion": v}
                    for v in shown
                ],
            }
        served = [r for r in self.resources if r.base == path]
        if not served:
            return None
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": served[0].api_version,
            "resources": [
                {
                    "name": r.plural,
                    "singularName": r.kind.lower(),
                    "namespaced": r.namespaced,
                    "kind": r.kind,
                    "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
                }
                for r in served
            ],
        }

    def _openapi(self, base: str) -> Object | None:
        """Only that PATCH takes `fieldValidation`: by that, clients leave validation to this side."""
        if not base:
            bases = {r.base for r in self.resources}
            return {"paths": {b.strip("/"): {"serverRelativeURL": f"/openapi/v3{b}"} for b in bases}}
        paths: Object = {}
        for r in (r for r in self.resources if r.base == base):
            group, _, version = r.api_version.rpartition("/")
            paths[f"{base}/{r.plural}/{{name}}"] = {
                "patch": {
                    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                    "responses": {},
                    "x-kubernetes-group-version-kind": {"group": group, "kind": r.kind, "version": version},
                }
            }
        return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths} if paths else None

    async def _object(
        self, request: web.Request, resource: Resource, path: str, place: tuple[str, str]
    ) -> web.StreamResponse:
        namespace, name = place
        if request.method == "GET" and name:
            found = self.objects.get(path)
            return web.json_response(found) if found else _status(404, "NotFound", f"{path} is not there")
        if request.method == "GET":
            if request.query.get("watch") in {"1", "true"}:
                return await self._watch(request, resource, namespace)
            return web.json_response(self._list(request, resource, namespace))
        if request.method == "DELETE":
            return self._delete(path)
        return self._write(request, path, namespace, await request.read())

    def _delete(self, path: str) -> web.Response:
        found = self.objects.pop(path, None)
        if found is None:
            return _status(404, "NotFound", f"{path} is not there")
        self._tell("DELETED", found)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _write(self, request: web.Request, path: str, namespace: str, body: bytes) -> web.Response:
        if request.method == "PATCH" and "apply-patch" not in request.content_type:
            self.unserved.append(f"PATCH {request.content_type} {path}")
            return _status(415, "UnsupportedMediaType", "only server-side apply is spoken here")
        sent = _decoded(body)
        if request.method == "POST":
            path = f"{path}/{sent['metadata']['name']}"
            if path in self.objects:
                return _status(409, "AlreadyExists", f"{path} is there already")
        return self._store(path, namespace, sent, dry="dryRun" in request.query)

    def _store(self, path: str, namespace: str, sent: Object, *, dry: bool) -> web.Response:
        if faults := self.admit(sent):
            return _status(422, "Invalid", "; ".join(faults))
        stored = json.loads(json.dumps(sent)) | _claimed_status(sent)
        if namespace:
            stored["metadata"]["namespace"] = namespace
        before = self.objects.get(path)
        if before is not None and (fixed := _fixed(before)) != _fixed(sent):
            return _status(
                422, "Invalid", f"{sent['kind']}/{sent['metadata']['name']}: {sorted(fixed)} are immutable"
            )
        stored["metadata"]["uid"] = before["metadata"]["uid"] if before else f"uid-{self._revision + 1}"
        stored["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        stored["metadata"]["generation"] = 1
        if before is not None:
            stored["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if stored["kind"] == "Service" and stored["spec"].get("type") == "LoadBalancer":
            stored["spec"].setdefault("clusterIP", "10.96.0.1")
        if dry or stored == before:
            return web.json_response(stored)
        self._revision += 1
        stored["metadata"]["resourceVersion"] = str(self._revision)
        self.objects[path] = stored
        self._tell("MODIFIED" if before else "ADDED", stored)
        return web.json_response(stored, status=200 if before else 201)

    def _list(self, request: web.Request, resource: Resource, namespace: str) -> Object:
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": {"resourceVersion": str(self._revision)},
            "items": [o for o in self.objects.values() if _wanted(request, resource, namespace, o)],
        }

    async def _watch(self, request: web.Request, resource: Resource, namespace: str) -> web.StreamResponse:
        if "sendInitialEvents" in request.query:
            return _status(422, "Invalid", "sendInitialEvents: Forbidden: list first, then watch")
        queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._watchers.append(queue)
        try:
            await answer.prepare(request)
            while request.transport is not None and not request.transport.is_closing():
                try:
                    event, changed = await asyncio.wait_for(queue.get(), timeout=0.2)
                except TimeoutError:
                    continue
                if _wanted(request, resource, namespace, changed):
                    line = json.dumps({"type": event, "object": changed})
                    await answer.write(line.encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self._watchers.remove(queue)
        return answer

    def _tell(self, event: str, changed: Object) -> None:
        for queue in self._watchers:
            queue.put_nowait((event, changed))


def _place(resource: Resource, path: str) -> tuple[str, str] | None:
    """Namespace and name in `path`, each possibly empty; None for another resource."""
    if not path.startswith(resource.base + "/"):
        return None
    parts = path.removeprefix(resource.base + "/").split("/")
    namespace = ""
    if resource.namespaced and parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    if parts[0] != resource.plural or len(parts) > 2:
        return None
    return namespace, parts[1] if len(parts) == 2 else ""


def _wanted(request: web.Request, resource: Resource, namespace: str, candidate: Object) -> bool:
    metadata = candidate["metadata"]
    fields = request.query.get("fieldSelector", "")
    labels = [pair for pair in request.query.get("labelSelector", "").split(",") if pair]
    return (
        (candidate["apiVersion"], candidate["kind"]) == (resource.api_version, resource.kind)
        and namespace in {"", metadata.get("namespace")}
        and fields in {"", f"metadata.name={metadata['name']}"}
        and all(metadata.get("labels", {}).get(k) == v for k, v in (pair.split("=", 1) for pair in labels))
    )


def _fixed(thing: Object) -> Object:
    """Fields that the API refuses to change once an object is there."""
    spec = thing.get("spec", {})
    if thing["kind"] == "Job":
        return {"selector": spec.get("selector"), "template": spec["template"]}
    if thing["kind"] == "Deployment":
        return {"selector": spec["selector"]}
    if thing["kind"] == "StatefulSet":
        changing = {
            "replicas",
            "template",
            "updateStrategy",
            "persistentVolumeClaimRetentionPolicy",
            "minReadySeconds",
            "ordinals",
        }
        return {key: value for key, value in spec.items() if key not in changing}
    return {}


def _claimed_status(sent: Object) -> Object:
    """What the controllers would report once all is well."""
    spec = sent.get("spec") or {}
    replicas = spec.get("replicas", 1)
    ready = {"type": "Ready", "status": "True"}
    if sent["kind"] == "Deployment":
        progressed = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
        available = [{"type": "Available", "status": "True"}, progressed]
        counts = dict.fromkeys(
            ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas
        )
        return {"status": {"observedGeneration": 1, "conditions": available, **counts}}
    if sent["kind"] == "StatefulSet":
        counts = dict.fromkeys(("replicas", "currentReplicas", "updatedReplicas", "readyReplicas"), replicas)
        revisions = {"currentRevision": "r", "updateRevision": "r"}
        return {"status": {"observedGeneration": 1, **counts, **revisions}}
    if sent["kind"] == "Job":
        done = [{"type": "Complete", "status": "True"}]
        return {"status": {"succeeded": 1, "conditions": done, "startTime": "2026-01-01T00:00:00Z"}}
    if sent["kind"] == "Pod":
        return {"status": {"phase": "Succeeded", "conditions": [ready]}}
    if sent["kind"] == "PersistentVolumeClaim":
        return {"status": {"phase": "Bound"}}
    return {}


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
    return web.json_response(body | {"code": code}, status=code)


def _decoded(body: bytes) -> Object:
    """An object from JSON, YAML or, for a Secret, the binary form that typed clients send."""
    if not body.startswith(PROTOBUF):
        return yaml.safe_load(body)
    envelope = dict(_fields(body.removeprefix(PROTOBUF)))
    about = dict(_fields(envelope[1]))
    kind = about[2].decode()
    if kind != "Secret":
        raise web.HTTPUnsupportedMediaType(text=f"{kind} in the binary form is not understood here")
    secret = list(_fields(envelope[2]))
    metadata = list(_fields(dict(secret)[1]))
    labels = dict(_pair(value) for number, value in metadata if number == 11)
    data = dict(_pair(value) for number, value in secret if number == 2)
    return {
        "apiVersion": about[1].decode(),
        "kind": kind,
        "metadata": {
            "name": dict(metadata)[1].decode(),
            "labels": {key.decode(): value.decode() for key, value in labels.items()},
        },
        "type": dict(secret)[3].decode(),
        "data": {key.decode(): base64.b64encode(value).decode() for key, value in data.items()},
    }


def _pair(entry: bytes) -> tuple[bytes, bytes]:
    """One entry of a map."""
    fields = dict(_fields(entry))
    return fields[1], fields.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each length-delimited field; numbers are passed over."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            _, at = _varint(message, at)
        elif tag & 7 == 2:
            size, at = _varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise web.HTTPUnsupportedMediaType(text=f"wire type {tag & 7} is not understood here")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
