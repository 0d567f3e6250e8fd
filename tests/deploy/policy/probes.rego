# What serves can be asked whether it is ready, whether it lives, and for how long it may start.
# A worker is not asked whether it lives: it would be killed for being busy, and its own supervisor restarts it.
package probes

import rego.v1

import data.pods

serving contains container if {
	some container in pods.containers
	container.list == "containers"
	container.pod.kind in {"Deployment", "StatefulSet"}
}

# Of a group only the leader serves; the others are its hands and share its fate.
serving contains container if {
	some container in pods.containers
	container.list == "containers"
	container.pod.kind == "LeaderWorkerSet"
	container.spec.ports
}

deny contains sprintf("%s: no %s", [container.name, probe]) if {
	some container in serving
	some probe in {"startupProbe", "readinessProbe", "livenessProbe"}
	not container.spec[probe]
	not spared(container, probe)
}

spared(container, "livenessProbe") if container.pod.labels["app.kubernetes.io/component"] == "worker"

deny contains sprintf("%s: a worker that is killed for being busy", [container.name]) if {
	some container in serving
	container.pod.labels["app.kubernetes.io/component"] == "worker"
	container.spec.livenessProbe
}

# One question for both would kill a pod for being busy.
deny contains sprintf("%s: it is killed by the same question by which it is not ready", [container.name]) if {
	some container in serving
	question(container.spec.livenessProbe) == question(container.spec.readinessProbe)
}

question(probe) := object.filter(probe, ["httpGet", "tcpSocket", "exec", "grpc"])
