# The Pod Security Standard "restricted", as https://kubernetes.io/docs/concepts/security/pod-security-standards/
# lists it; volumes of kind `image` belong to it since Kubernetes 1.33.
package pod_security

import rego.v1

import data.pods

volumes_allowed := {
	"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}

deny contains sprintf("%s: %s", [pod.name, field]) if {
	some pod in pods.all
	some field in {"hostNetwork", "hostPID", "hostIPC"}
	pod.spec[field] == true
}

deny contains sprintf("%s: volume %s is a %s", [pod.name, volume.name, kind]) if {
	some pod in pods.all
	some volume in pod.spec.volumes
	some kind, _ in volume
	kind != "name"
	not kind in volumes_allowed
	not excepted(kind, volume)
}

excepted("hostPath", volume) if volume.hostPath.path in input.exceptions.hostPath

deny contains sprintf("%s: sysctls", [pod.name]) if {
	some pod in pods.all
	count(pod.spec.securityContext.sysctls) > 0
}

deny contains sprintf("%s is privileged", [container.name]) if {
	some container in pods.containers
	container.spec.securityContext.privileged == true
}

deny contains sprintf("%s may gain privileges: allowPrivilegeEscalation is not false", [container.name]) if {
	some container in pods.containers
	not context(container, "allowPrivilegeEscalation") == false
}

deny contains sprintf("%s keeps capabilities: drop is not ALL", [container.name]) if {
	some container in pods.containers
	not drops_all(container)
}

drops_all(container) if "ALL" in container.spec.securityContext.capabilities.drop

deny contains sprintf("%s adds the capability %s", [container.name, added]) if {
	some container in pods.containers
	some added in container.spec.securityContext.capabilities.add
	added != "NET_BIND_SERVICE"
	not added in object.get(input.exceptions, "capabilities", [])
}

deny contains sprintf("%s may run as root: runAsNonRoot is not true", [container.name]) if {
	some container in pods.containers
	not inherited(container, "runAsNonRoot") == true
}

deny contains sprintf("%s runs as root", [container.name]) if {
	some container in pods.containers
	inherited(container, "runAsUser") == 0
}

deny contains sprintf("%s has no seccomp profile", [container.name]) if {
	some container in pods.containers
	not seccomp_allowed(container)
}

seccomp_allowed(container) if inherited(container, "seccompProfile").type in {"RuntimeDefault", "Localhost"}

deny contains sprintf("%s has the port %d of its node", [container.name, port.hostPort]) if {
	some container in pods.containers
	some port in container.spec.ports
	port.hostPort > 0
}

deny contains sprintf("%s: procMount is %s", [container.name, mount]) if {
	some container in pods.containers
	mount := container.spec.securityContext.procMount
	mount != "Default"
}

deny contains sprintf("%s sets SELinux user or role", [container.name]) if {
	some container in pods.containers
	some field in {"user", "role"}
	inherited(container, "seLinuxOptions")[field]
}

deny contains sprintf("%s is not confined by AppArmor", [container.name]) if {
	some container in pods.containers
	inherited(container, "appArmorProfile").type == "Unconfined"
}

# A field of the container's own security context.
context(container, field) := container.spec.securityContext[field]

# The same, or the pod's where the container has none.
inherited(container, field) := context(container, field)

inherited(container, field) := container.pod.spec.securityContext[field] if not own(container, field)

own(container, field) if field in object.keys(container.spec.securityContext)
