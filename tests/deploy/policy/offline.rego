# A worker is kept offline by exactly the values that its parts understand: `true` is not `1`.
package offline

import rego.v1

import data.pods

# (Pods of tests are no workers, wherever they stand.)
workers contains container if {
	some container in pods.containers
	container.list == "containers"
	container.pod.kind != "Pod"
	container.pod.labels["app.kubernetes.io/component"] in {"worker", "worker-node"}
}

deny contains sprintf("%s: %s is not %s", [container.name, name, value]) if {
	some container in workers
	some name, value in input.offline
	not environment(container)[name] == value
	not own_address(container, name)
}

# Nodes of one worker reach each other at the address of their pod.
own_address(container, "VLLM_HOST_IP") if {
	container.pod.kind == "LeaderWorkerSet"
	some entry in container.spec.env
	entry.name == "VLLM_HOST_IP"
	entry.valueFrom.fieldRef.fieldPath == "status.podIP"
}

environment(container) := {entry.name: entry.value | some entry in container.spec.env; entry.value}

deny contains sprintf("%s: %s would lead it outside", [container.name, entry.name]) if {
	some container in pods.containers
	some entry in container.spec.env
	lower(entry.name) in {"http_proxy", "https_proxy", "all_proxy", "ftp_proxy"}
}
