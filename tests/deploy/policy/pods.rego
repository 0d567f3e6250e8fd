# Every pod that the rendered objects would make, and every container in them.
package pods

import rego.v1

all contains pod if {
	some object in input.objects
	object.kind == "Pod"
	pod := {"name": named(object), "kind": "Pod", "labels": labels(object), "spec": object.spec}
}

all contains pod if {
	some object in input.objects
	object.kind in {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"}
	pod := from_template(object, object.spec.template)
}

all contains pod if {
	some object in input.objects
	object.kind == "CronJob"
	pod := from_template(object, object.spec.jobTemplate.spec.template)
}

# A group of pods that starts and ends together, for a model that spans nodes.
all contains pod if {
	some object in input.objects
	object.kind == "LeaderWorkerSet"
	some part in {"leaderTemplate", "workerTemplate"}
	template := object.spec.leaderWorkerTemplate[part]
	pod := from_template(object, template)
}

from_template(object, template) := {
	"name": named(object),
	"kind": object.kind,
	"labels": labels(template),
	"spec": template.spec,
}

named(object) := sprintf("%s/%s", [object.kind, object.metadata.name])

labels(object) := object.metadata.labels if object.metadata.labels

else := {}

containers contains container if {
	some pod in all
	some list in {"containers", "initContainers", "ephemeralContainers"}
	some entry in pod.spec[list]
	container := {"name": sprintf("%s: %s", [pod.name, entry.name]), "list": list, "pod": pod, "spec": entry}
}
