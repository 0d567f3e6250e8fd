# Secrets are in Secrets, and come from there.
package secrets

import rego.v1

import data.pods

# (Lower case, and no `(?i)` or `\b`: the expressions of the engine in the tests know neither.)
secret_name := `(password|passwd|secret|token|api_?key|private_?key|credential)s?$`

# What looks like a secret wherever it stands: a key in PEM, a key of the appliance, a URL with a password, a password.
secret_text contains `-----begin [a-z ]*private key`

secret_text contains `sk-[a-z2-7]{8}-`

secret_text contains `://[^/\s:@]+:[^/\s:@$]+@`

secret_text contains `(password|passwd|secret_?key)("?:\s+|":|\s*=)\s*["']?[^\s"'{$<]`

reveals(text) if {
	some expression in secret_text
	regex.match(expression, lower(text))
}

deny contains sprintf("%s: %s is written in the pod", [container.name, entry.name]) if {
	some container in pods.containers
	some entry in container.spec.env
	regex.match(secret_name, lower(entry.name))
	object.get(entry, "value", "") != ""
}

deny contains sprintf("%s: %s holds a secret", [container.name, entry.name]) if {
	some container in pods.containers
	some entry in container.spec.env
	reveals(entry.value)
}

deny contains sprintf("%s: a secret on its command line", [container.name]) if {
	some container in pods.containers
	some list in {"command", "args"}
	some argument in container.spec[list]
	reveals(argument)
}

deny contains sprintf("ConfigMap/%s: a secret in %s", [object.metadata.name, key]) if {
	some object in input.objects
	object.kind == "ConfigMap"
	some key, text in object.data
	reveals(text)
}
