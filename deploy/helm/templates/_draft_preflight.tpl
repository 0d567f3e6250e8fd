{{/* Contradictions about drafts and traces; see `appliance.problems`. */}}

{{- define "appliance.draftProblems" -}}
{{- $values := .Values -}}
{{- $refresh := $values.draftRefresh -}}
{{- if and $values.drafts.existingClaim (not $values.drafts.trustedKeys.existingConfigMap) }}
drafts.existingClaim without drafts.trustedKeys.existingConfigMap: workers would start no draft from it, because they trust no key; name the ConfigMap with the public keys
{{- end -}}
{{- if include "appliance.refreshes" . -}}
{{- if not $values.drafts.existingClaim }}
draftRefresh without drafts.existingClaim: gateways and workers could not read the trained draft; name a claim with ReadWriteMany
{{- end -}}
{{- if not $values.gateway.sharedFiles.existingClaim }}
draftRefresh without gateway.sharedFiles.existingClaim: the keys to kept content are on a gateway's own disk, and the Job could not read them; put them on a claim with ReadWriteMany
{{- end -}}
{{- if not $values.keys.draftsKey.existingSecret }}
draftRefresh without keys.draftsKey.existingSecret: a key that it creates would be lost with its pod, and no worker would trust the draft; create one and name its Secret
{{- end -}}
{{- if not $values.keys.tenantsMac.existingSecret }}
draftRefresh without keys.tenantsMac.existingSecret: the key is on a gateway's own disk, and the Job could not check which tenants allow training; put it into a Secret and name it
{{- end -}}
{{- if eq $values.database.kind "sqlite" }}
draftRefresh with database.kind sqlite: the log is on a gateway's own disk, and the Job could not read it; use PostgreSQL (external or inChart)
{{- end -}}
{{- if not $refresh.purpose }}
draftRefresh.purpose is empty: give the purpose of reading content, which the audit log records
{{- end -}}
{{- if and (eq $refresh.backend "speculators") (lt (int $refresh.steps) 1) }}
draftRefresh.backend is speculators and draftRefresh.steps is 0: it trains by steps, not by time; set the number of steps
{{- end -}}
{{- if and (eq $refresh.backend "speculators") (not $refresh.image.repository) }}
draftRefresh.backend is speculators and draftRefresh.image.repository is empty: none of our images has that library; name an image that has it
{{- end -}}
{{- if and $refresh.image.repository (not $refresh.image.digest) (not (include "appliance.allowsTags" .)) }}
draftRefresh.image.digest is empty: a tag can change its image; give its digest
{{- end -}}
{{- $models := (include "appliance.refreshModel" . | fromJson).models -}}
{{- if not $models }}
draftRefresh.model is {{ $refresh.model | quote }}: name an entry of models
{{- end -}}
{{- range $models -}}
{{- if or (ne .method "eagle3") (ne .task "generate") }}
draftRefresh.model {{ .name }} has the method {{ .method }}: only eagle3 drafts can be trained; name another model
{{- end -}}
{{- if gt (int .nodes) 1 }}
draftRefresh.model {{ .name }} is on {{ int .nodes }} nodes: a draft is trained and evaluated on one; run `appliance draft` by hand on a machine where the target fits
{{- end -}}
{{- if and (eq $refresh.backend "speculators") (eq .device "cpu") }}
draftRefresh.backend is speculators and {{ .name }} is on device cpu: it needs GPUs; use small
{{- end -}}
{{- if eq .device "gpu" -}}
{{- if and (not $refresh.gpu.type) (not .gpu.resourceClaimTemplate) }}
draftRefresh.gpu.type is empty: speed measured on another type of GPU is not comparable; give the value of the node label {{ $refresh.gpu.typeLabel }}
{{- end -}}
{{- if hasSuffix ".shared" .gpu.resource }}
draftRefresh: models.{{ .name }}.gpu.resource is {{ .gpu.resource }}: a shared GPU also serves a worker; use an exclusive one
{{- end -}}
{{- $cards := mul (int .tensorParallel) (int .pipelineParallel) -}}
{{- if and (eq (int .nodes) 1) (lt (include "appliance.refreshGpus" (dict "root" $ "model" .) | int) (int $cards)) }}
draftRefresh.gpu.count is {{ int $refresh.gpu.count }}: the target of {{ .name }} needs {{ $cards }} GPUs for the evaluation
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "appliance.collectorHost" .) (include "appliance.serves" .) $values.networkPolicy.enabled -}}
{{- if not $values.networkPolicy.collector.to }}
settings.tracing.enabled without networkPolicy.collector.to: gateways and workers could not reach the collector; name its address
{{- end -}}
{{- if and (include "appliance.collectorIsNamed" .) (not $values.networkPolicy.dns.enabled) }}
settings.tracing.endpoint is a name and networkPolicy.dns.enabled is false: no pod could resolve the collector; give its address
{{- end -}}
{{- end -}}
{{- end -}}
