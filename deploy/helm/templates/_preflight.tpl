{{/* Contradictions in the values, each in one line that says what to do; empty if there is none. */}}

{{- define "appliance.problems" -}}
{{- $values := .Values -}}
{{- $gateway := $values.gateway -}}
{{- $certificate := include "appliance.tlsSecret" . -}}
{{- $database := $values.database -}}
{{- $most := ternary $gateway.autoscaling.maxReplicas $gateway.replicas $gateway.autoscaling.enabled | int -}}
{{- $models := (include "appliance.models" . | fromJson).models -}}
{{- $pools := (include "appliance.pools" . | fromJson).pools -}}
{{- $images := dict "gateway" true "postgres" (eq $database.kind "inChart") "workerGpu" false "workerCpu" false -}}
{{- range $models }}{{ $_ := set $images (ternary "workerCpu" "workerGpu" (eq .device "cpu")) true }}{{ end -}}
{{- range $name, $used := $images -}}
{{- $image := get $values.images $name -}}
{{- if and $used (not $image.digest) (not (include "appliance.allowsTags" $)) }}
images.{{ $name }}.digest is empty: a tag can change its image; take the digest from `appliance bundle emit`, or set global.allowTags or profile: evaluation on a test cluster
{{- end -}}
{{- end -}}
{{- if and $values.picker.enabled (not $values.picker.pods.labels) }}
picker.enabled needs picker.pods.labels: the labels of the vLLM pods to pick from
{{- end -}}
{{- if and $values.picker.enabled (not $values.keys.controlToken.existingSecret) }}
picker.enabled needs keys.controlToken.existingSecret: the token that the vLLM pods expect of the appliance
{{- end -}}
{{- $control := int (default 8001 (default dict $values.settings.pool).control_port) -}}
{{- if and (include "appliance.serves" .) (ne $control 8001) }}
settings.pool.control_port is {{ $control }}, and the chart's workers are controlled at 8001: remove it
{{- end -}}
{{- if and (eq $database.kind "sqlite") (gt $most 1) }}
database.kind is sqlite with {{ $most }} gateways: its file supports one; use PostgreSQL (external or inChart), or gateway.replicas: 1 without autoscaling
{{- end -}}
{{- if and (eq $database.kind "sqlite") (ne $gateway.kind "StatefulSet") }}
database.kind is sqlite and gateway.kind is Deployment: the log would be lost with its pod; use gateway.kind: StatefulSet
{{- end -}}
{{- if and (gt $most 1) (not $values.keys.signingKey.existingSecret) }}
{{ $most }} gateways sign one log: put its key into a Secret and name it in keys.signingKey.existingSecret
{{- end -}}
{{- if and (ne $gateway.kind "StatefulSet") (not $values.keys.signingKey.existingSecret) }}
gateway.kind is Deployment, so a signing key it creates would be lost with its pod: name a Secret in keys.signingKey.existingSecret
{{- end -}}
{{- if and (or (gt $most 1) (ne $gateway.kind "StatefulSet")) (not $values.keys.tenantsMac.existingSecret) }}
gateways need one key for the MAC of tenants and API keys, and a Deployment would lose it with its pod: put it into a Secret and name it in keys.tenantsMac.existingSecret
{{- end -}}
{{- $durability := "strict" -}}
{{- with $values.settings.audit }}{{ $durability = default "strict" .durability }}{{ end -}}
{{- if and (ne $durability "strict") (ne $gateway.kind "StatefulSet") }}
settings.audit.durability is {{ $durability }} and gateway.kind is Deployment: the spool would be lost with its pod; use gateway.kind: StatefulSet
{{- end -}}
{{- if and $gateway.autoscaling.enabled (lt (int $gateway.autoscaling.maxReplicas) (int $gateway.autoscaling.minReplicas)) }}
gateway.autoscaling.maxReplicas is less than minReplicas
{{- end -}}
{{- if and (eq $database.kind "external") (not $database.external.host) }}
database.kind is external and database.external.host is empty: name the server
{{- end -}}
{{- if and (eq $database.kind "external") (not $database.external.existingSecret) }}
database.external.existingSecret is empty: name the Secret with the password of {{ $database.external.user }}
{{- end -}}
{{- if and (eq $database.kind "external") (has $database.external.sslmode (list "verify-full" "verify-ca")) (not $values.caBundle.existingConfigMap) }}
database.external.sslmode is {{ $database.external.sslmode }} and caBundle.existingConfigMap is empty: name the ConfigMap with the authority of the server's certificate
{{- end -}}
{{- if and (eq $database.kind "external") $values.networkPolicy.enabled (not $database.external.to) }}
database.external.to is empty: name the server's address, or gateways would need egress to everywhere
{{- end -}}
{{- if and $database.external.owner.user (not $database.external.owner.existingSecret) }}
database.external.owner.existingSecret is empty: name the Secret with the password of {{ $database.external.owner.user }}
{{- end -}}
{{- if and (eq $database.kind "inChart") (not $database.inChart.existingSecret) }}
database.inChart.existingSecret is empty: name a Secret with owner-password and gateway-password
{{- end -}}
{{- if and $models (not (include "appliance.controlToken" .)) }}
keys.controlToken.existingSecret is empty: gateways and workers need the same token; create a Secret with any random string, or set profile: evaluation
{{- end -}}
{{- if and $models $values.networkPolicy.metrics.workers (not $values.keys.scrapeToken.existingSecret) }}
networkPolicy.metrics.workers is true and keys.scrapeToken.existingSecret is empty: workers answer no one without a token; create a Secret with any random string
{{- end -}}
{{- if and (ne $gateway.service.type "ClusterIP") (not $certificate) }}
gateway.service.type is {{ $gateway.service.type }} without TLS: keys and prompts would cross the network in plain text; name a certificate in gateway.tls.existingSecret
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.tlsSecret) }}
gateway.ingress without tlsSecret: keys and prompts would cross the network in plain text
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.host) }}
gateway.ingress.host is empty: without it every host name would reach the gateway
{{- end -}}
{{- if and $gateway.route.enabled (ne $gateway.route.termination "edge") (not $certificate) }}
gateway.route.termination is {{ $gateway.route.termination }} without a certificate: name one in gateway.tls.existingSecret, or use edge
{{- end -}}
{{- if and $gateway.tls.issuerRef.name $gateway.tls.existingSecret }}
gateway.tls has existingSecret and issuerRef, and the gateway one certificate: remove one of them
{{- end -}}
{{- if and $gateway.tls.dnsNames (not $gateway.tls.issuerRef.name) }}
gateway.tls.dnsNames without gateway.tls.issuerRef.name: nothing asks for a certificate with these names; name the issuer
{{- end -}}
{{- if and $gateway.tls.issuerRef.name (not (.Capabilities.APIVersions.Has "cert-manager.io/v1")) }}
gateway.tls.issuerRef needs cert-manager, and the cluster has no cert-manager.io/v1: install it, or name a Secret in gateway.tls.existingSecret (for `helm template`: --api-versions cert-manager.io/v1)
{{- end -}}
{{- if and $gateway.tls.clientCaConfigMap (not $certificate) }}
gateway.tls.clientCaConfigMap without gateway.tls.existingSecret: client certificates need TLS
{{- end -}}
{{- if and $values.networkPolicy.enabled (not $values.networkPolicy.gateway.clients) (or (ne $gateway.service.type "ClusterIP") $gateway.ingress.enabled $gateway.route.enabled $gateway.httpRoute.enabled) }}
networkPolicy.gateway.clients is empty, which allows only pods of this namespace, but the gateway is exposed outside: name its clients (a load balancer's clients and the nodes, or the namespace of the ingress controller or router)
{{- end -}}
{{- if and $gateway.httpRoute.enabled (not $gateway.httpRoute.parentRefs) }}
gateway.httpRoute.parentRefs is empty: name the Gateway that serves it
{{- end -}}
{{- include "appliance.extraProblems" (dict "root" . "at" "gateway" "of" $gateway) -}}
{{- range $models }}{{ include "appliance.extraProblems" (dict "root" $ "at" (printf "models.%s" .name) "of" .) }}{{ end -}}
{{- $tls := default dict $values.settings.tls -}}
{{- if and (or $tls.client_tenants $tls.require_client_certificate) (not $gateway.tls.clientCaConfigMap) }}
settings.tls requires client certificates and gateway.tls.clientCaConfigMap is empty: name the ConfigMap with the authority that signs them
{{- end -}}
{{- $oidc := default dict $values.settings.oidc -}}
{{- if and $values.oidc.jwksConfigMap (not (and $oidc.issuer $oidc.audience)) }}
oidc.jwksConfigMap without settings.oidc: set issuer and audience, or tokens for other services would be accepted
{{- end -}}
{{- if and $oidc (not $values.oidc.jwksConfigMap) }}
settings.oidc without oidc.jwksConfigMap: no token is accepted without the provider's public keys; name the ConfigMap with them
{{- end -}}
{{- range (default dict $values.settings.audit).witnesses -}}
{{- if and .url $values.networkPolicy.enabled (not $values.networkPolicy.gateway.peers) }}
settings.audit.witnesses has {{ .name }} without networkPolicy.gateway.peers: gateways could not reach it
{{- end -}}
{{- end -}}
{{- if and (default dict $values.settings.audit).timestamp_url $values.networkPolicy.enabled (not $values.networkPolicy.gateway.peers) }}
settings.audit.timestamp_url without networkPolicy.gateway.peers: gateways could not reach the time-stamp authority
{{- end -}}
{{- $forward := (default dict $values.settings.audit).forward -}}
{{- if and $forward $values.networkPolicy.enabled (not $values.networkPolicy.gateway.peers) }}
settings.audit.forward has {{ $forward.destination }} without networkPolicy.gateway.peers: gateways could not reach it
{{- end -}}
{{- if and $values.keys.forward.existingSecret (not $forward) }}
keys.forward.existingSecret without settings.audit.forward: name the destination there
{{- end -}}
{{- if and $models $values.networkPolicy.enabled (not $values.networkPolicy.dns.enabled) }}
networkPolicy.dns.enabled is false: gateways find workers by name; allow the resolver, or run without models and list workers.urls by address
{{- end -}}
{{- if and $values.workers.urls $values.networkPolicy.enabled (not $values.networkPolicy.gateway.peers) }}
workers.urls without networkPolicy.gateway.peers: gateways could not reach them
{{- end -}}
{{- $names := list -}}
{{- range $models -}}
{{- if has .name $names }}
models: {{ .name }} is defined twice; give each entry a unique name
{{- end -}}
{{- $names = append $names .name -}}
{{- $speculates := include "appliance.speculates" . -}}
{{- $drafts := has .method (list "eagle3" "draft_model") -}}
{{- if and $drafts (eq .task "generate") (eq .draft.source "none") }}
models.{{ .name }}: method is {{ .method }} without a draft; give it draft.source, or method: none
{{- end -}}
{{- if and (not $drafts) (ne .draft.source "none") }}
models.{{ .name }}: there is a draft, but the method {{ .method }} uses none; set method: eagle3, or draft.source: none
{{- end -}}
{{- if and (ne .method "none") (ne .task "generate") }}
models.{{ .name }}: only the task generate speculates; set method: none
{{- end -}}
{{- if and (not $speculates) (gt (int .targetOnlyReplicas) 0) }}
models.{{ .name }}: targetOnlyReplicas, but its other workers do not speculate either; use replicas only
{{- end -}}
{{- if and $values.speculation.optOut $speculates (lt (int .targetOnlyReplicas) 1) }}
models.{{ .name }}: speculation.optOut is on and no worker serves it without a draft; set targetOnlyReplicas to 1 or more
{{- end -}}
{{- if and .keda.enabled (lt (int .keda.maxReplicas) (int .keda.minReplicas)) }}
models.{{ .name }}: keda.maxReplicas is less than keda.minReplicas
{{- end -}}
{{- if and .keda.enabled (lt (int .keda.minReplicas) 1) (lt (int .targetOnlyReplicas) 1) }}
models.{{ .name }}: keda.minReplicas is 0: without a worker requests are refused and do not queue, so KEDA would never start one; set 1
{{- end -}}
{{- $cards := mul (int .tensorParallel) (int .pipelineParallel) -}}
{{- if and (eq .device "cpu") (gt (int $cards) 1) }}
models.{{ .name }}: {{ $cards }} GPUs on device cpu; set tensorParallel and pipelineParallel to 1
{{- end -}}
{{- if and (eq .device "cpu") (gt (int .nodes) 1) }}
models.{{ .name }}: several nodes on device cpu; set nodes to 1
{{- end -}}
{{- if ne (mod $cards (int .nodes)) 0 }}
models.{{ .name }}: {{ $cards }} GPUs do not divide among {{ int .nodes }} nodes
{{- end -}}
{{- if and (eq .device "gpu") (gt (int .gpu.count) 0) (lt (mul (int .gpu.count) (int .nodes)) $cards) }}
models.{{ .name }}: tensorParallel and pipelineParallel need {{ $cards }} GPUs, gpu.count gives {{ mul (int .gpu.count) (int .nodes) }}
{{- end -}}
{{- $name := .name -}}
{{- range $at, $weights := dict "target" .target "draft" .draft -}}
{{- include "appliance.weightsProblems" (dict "root" $ "in" (printf "models.%s: " $name) "at" $at "weights" $weights) -}}
{{- end -}}
{{- end -}}
{{- $load := $values.weightsLoad -}}
{{- if $load.enabled -}}
{{- include "appliance.weightsProblems" (dict "root" . "in" "" "at" "weightsLoad.from" "weights" $load.from) -}}
{{- if not $load.claimName }}
weightsLoad.claimName is empty: name the claim to fill
{{- end -}}
{{- if and (eq $load.content "bundle") (not $load.trustedKeys.existingConfigMap) }}
weightsLoad.trustedKeys.existingConfigMap is empty: no bundle is accepted without a trusted key; name the ConfigMap with the keys
{{- end -}}
{{- if and (eq $load.content "bundle") $load.name }}
weightsLoad.name is {{ $load.name }} and content is bundle: a bundle has the names of its models; remove it, or set content: directory
{{- end -}}
{{- if and (eq $load.content "directory") (not $load.name) }}
weightsLoad.name is empty: give the weights a name; a model's path is then that name and /current
{{- end -}}
{{- $claims := list -}}
{{- range $models -}}{{- range list .target .draft -}}{{- if eq .source "pvc" -}}{{- $claims = append $claims .claimName -}}{{- end -}}{{- end -}}{{- end -}}
{{- if and $models $load.claimName (not (has $load.claimName $claims)) }}
weightsLoad.claimName is {{ $load.claimName }} and no model reads that claim; name it in target.claimName or draft.claimName, with source: pvc
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Contradictions of a source of weights: (dict "root" $ "in" "models.NAME: " "at" "target" "weights" ..) */}}
{{- define "appliance.weightsProblems" -}}
{{- $weights := .weights -}}
{{- if and (eq $weights.source "workerImage") (not $weights.path) }}
{{ .in }}{{ .at }}.source is workerImage and {{ .at }}.path is empty; name the directory in the workers' image
{{- end -}}
{{- if and (eq $weights.source "pvc") (not $weights.claimName) }}
{{ .in }}{{ .at }}.source is pvc and {{ .at }}.claimName is empty; name the claim with the weights
{{- end -}}
{{- if and (eq $weights.source "hostPath") (not $weights.hostPath) }}
{{ .in }}{{ .at }}.source is hostPath and {{ .at }}.hostPath is empty; name the directory on the node
{{- end -}}
{{- if has $weights.source (list "image" "initCopy") -}}
{{- if not $weights.image.repository }}
{{ .in }}{{ .at }}.source is {{ $weights.source }} and {{ .at }}.image.repository is empty; name the image with the weights
{{- else if not $weights.image.digest }}
{{ .in }}{{ .at }}.image.digest is empty: weights need a digest
{{- end -}}
{{- end -}}
{{- if and (eq $weights.source "image") (semverCompare "<1.33.0-0" .root.Capabilities.KubeVersion.Version) }}
{{ .in }}{{ .at }}.source is image, which needs Kubernetes 1.33 (this is {{ .root.Capabilities.KubeVersion.Version }}); use another source
{{- end -}}
{{- end -}}
