# Nothing here talks to the Kubernetes API, so nothing carries a token for it.
package identity

import rego.v1

import data.pods

deny contains sprintf("%s: a token is mounted: automountServiceAccountToken is not false", [pod.name]) if {
	some pod in pods.all
	not pod.spec.automountServiceAccountToken == false
}

deny contains sprintf("ServiceAccount/%s: automountServiceAccountToken is not false", [object.metadata.name]) if {
	some object in input.objects
	object.kind == "ServiceAccount"
	not object.automountServiceAccountToken == false
}

deny contains sprintf("%s runs as the namespace's default service account", [pod.name]) if {
	some pod in pods.all
	object.get(pod.spec, "serviceAccountName", "default") == "default"
}

deny contains sprintf("%s: a token by a projected volume: %s", [pod.name, volume.name]) if {
	some pod in pods.all
	some volume in pod.spec.volumes
	some source in volume.projected.sources
	source.serviceAccountToken
}

deny contains sprintf("%s/%s: rights at the Kubernetes API", [object.kind, object.metadata.name]) if {
	some object in input.objects
	object.kind in {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
}
