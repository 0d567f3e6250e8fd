# A program that is taken over finds nowhere to write itself down.
package filesystem

import rego.v1

import data.pods

deny contains sprintf("%s: readOnlyRootFilesystem is not true", [container.name]) if {
	some container in pods.containers
	not container.spec.securityContext.readOnlyRootFilesystem == true
}

# Weights and settings are read; what is written has a volume of its own.
deny contains sprintf("%s may write to %s of the node", [container.name, volume.hostPath.path]) if {
	some container in pods.containers
	some mount in container.spec.volumeMounts
	some volume in container.pod.spec.volumes
	volume.name == mount.name
	volume.hostPath
	not mount.readOnly == true
}
