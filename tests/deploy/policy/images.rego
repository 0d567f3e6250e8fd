# Images are named by digest: a tag can mean something else tomorrow, and no operator would notice.
package images

import rego.v1

import data.pods

used contains {"by": container.name, "reference": container.spec.image} if some container in pods.containers

used contains {"by": sprintf("%s: volume %s", [pod.name, volume.name]), "reference": volume.image.reference} if {
	some pod in pods.all
	some volume in pod.spec.volumes
	volume.image
}

deny contains sprintf("%s: %s has no digest", [image.by, image.reference]) if {
	some image in used
	not regex.match(`^[^@]+@sha256:[0-9a-f]{64}$`, image.reference)
}

deny contains sprintf("%s: %s is whatever is latest", [image.by, image.reference]) if {
	some image in used
	regex.match(`:latest(@|$)`, image.reference)
}

# An image by digest never changes, so that asking a registry at every start only ties starts to the registry.
deny contains sprintf("%s is pulled at every start", [container.name]) if {
	some container in pods.containers
	container.spec.imagePullPolicy == "Always"
}
