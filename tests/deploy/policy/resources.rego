# What a container may use is said, so that one cannot starve the others on a box that has no neighbours.
package resources

import rego.v1

import data.pods

deny contains sprintf("%s: no %s of %s", [container.name, kind, resource]) if {
	some container in pods.containers
	some kind in {"requests", "limits"}
	some resource in {"cpu", "memory"}
	not container.spec.resources[kind][resource]
}

# Kubernetes refuses GPUs whose request differs from the limit.
deny contains sprintf("%s: request and limit of %s differ", [container.name, resource]) if {
	some container in pods.containers
	some resource, amount in container.spec.resources.requests
	contains(resource, "/")
	not container.spec.resources.limits[resource] == amount
}

deny contains sprintf("%s: the emptyDir %s may fill the node's disk", [pod.name, volume.name]) if {
	some pod in pods.all
	some volume in pod.spec.volumes
	volume.emptyDir
	not volume.emptyDir.sizeLimit
}
