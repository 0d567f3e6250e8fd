# Every pod is behind a policy for both directions, and no policy opens a direction wholly.
package network

import rego.v1

import data.pods

policies contains object if {
	some object in input.objects
	object.kind == "NetworkPolicy"
}

deny contains sprintf("%s: no NetworkPolicy restricts its %s", [pod.name, direction]) if {
	some pod in pods.all
	some direction in {"Ingress", "Egress"}
	not restricted(pod, direction)
}

restricted(pod, direction) if {
	some policy in policies
	direction in policy.spec.policyTypes
	selects(object.get(policy.spec, "podSelector", {}), pod.labels)
}

selects(selector, labels) if {
	every key, value in object.get(selector, "matchLabels", {}) {
		labels[key] == value
	}
	every expression in object.get(selector, "matchExpressions", []) {
		expression.operator == "In"
		labels[expression.key] in expression.values
	}
}

rules contains {"policy": policy.metadata.name, "of": policy.spec.podSelector, "peers": "to", "rule": rule} if {
	some policy in policies
	some rule in policy.spec.egress
}

rules contains {"policy": policy.metadata.name, "of": policy.spec.podSelector, "peers": "from", "rule": rule} if {
	some policy in policies
	some rule in policy.spec.ingress
}

deny contains sprintf("NetworkPolicy/%s: a rule without `to` lets everything out", [entry.policy]) if {
	some entry in rules
	entry.peers == "to"
	count(object.get(entry.rule, "to", [])) == 0
}

deny contains sprintf("NetworkPolicy/%s: a rule without ports", [entry.policy]) if {
	some entry in rules
	count(object.get(entry.rule, "ports", [])) == 0
	not among_themselves(entry)
}

# Nodes of one worker talk to each other on ports they choose.
among_themselves(entry) if {
	count(entry.rule[entry.peers]) == 1
	entry.rule[entry.peers][0] == {"podSelector": entry.of}
}

deny contains sprintf("NetworkPolicy/%s: a rule `%s` everything: %s", [entry.policy, entry.peers, peer.ipBlock.cidr]) if {
	some entry in rules
	some peer in entry.rule[entry.peers]
	endswith(peer.ipBlock.cidr, "/0")
}

deny contains sprintf("NetworkPolicy/%s: a rule to every pod of every namespace", [entry.policy]) if {
	some entry in rules
	entry.peers == "to"
	some peer in entry.rule.to
	everything(peer)
}

everything(peer) if {
	peer.namespaceSelector == {}
	object.get(peer, "podSelector", {}) == {}
}
