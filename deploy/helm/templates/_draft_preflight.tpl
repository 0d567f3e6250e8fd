{{/* Contradictions about drafts and traces; see `appliance.problems`. */}}

{{- define "appliance.draftProblems" -}}
{{- $values := .Values -}}
{{- $refresh := $values.draftRefresh -}}
{{- if and $values.drafts.existingClaim (not $values.drafts.trustedKeys.existingConfigMap) }}
drafts.existingClaim without drafts.trustedKeys.existingConfigMap: workers would start no draft from it, as they trust nobody's signature; name the ConfigMap with the public keys
{{- end -}}
{{- if include "appliance.refreshes" . -}}
{{- if not $values.drafts.existingClaim }}
draftRefresh without drafts.existingClaim: gateways and workers would not see what it trains; name a claim that many pods can mount
{{- end -}}
{{- if not $values.gateway.sharedFiles.existingClaim }}
draftRefresh without gateway.sharedFiles.existingClaim: the keys to kept content are on a gateway's own disk, and it could read none; put them on a claim that many pods can mount
{{- end -}}
{{- if not $values.keys.draftsKey.existingSecret }}
draftRefresh without keys.draftsKey.existingSecret: a key that it makes would be gone with its pod, and nobody would trust the draft; make one and name its Secret
{{- end -}}
{{- if eq $values.database.kind "sqlite" }}
draftRefresh with database.kind sqlite: the log is on a gateway's own disk, and it could read none of it; use PostgreSQL (external or inChart)
{{- end -}}
{{- if not $refresh.purpose }}
draftRefresh.purpose is empty: say why content is read, the audit log records it
{{- end -}}
{{- if and (eq $refresh.backend "speculators") (lt (int $refresh.steps) 1) }}
draftRefresh.backend is speculators and draftRefresh.steps is 0: it trains by steps and not by the clock; say how many
{{- end -}}
{{- if and (eq $refresh.backend "speculators") (not $refresh.image.repository) }}
draftRefresh.backend is speculators and draftRefresh.image.repository is empty: no image of ours has that library; name one that has it
{{- end -}}
{{- if and $refresh.image.repository (not $refresh.image.digest) (not $values.global.allowTags) }}
draftRefresh.image.digest is empty: a tag can come to name another image; give its digest
{{- end -}}
{{- $models := (include "appliance.refreshModel" . | fromJson).models -}}
{{- if not $models }}
draftRefresh.model is {{ $refresh.model | quote }}: name an entry of models
{{- end -}}
{{- range $models -}}
{{- if or (ne .method "eagle3") (ne .task "generate") }}
draftRefresh.model {{ .name }} has the method {{ .method }}: only drafts of eagle3 are trained; name another model
{{- end -}}
{{- if gt (int .nodes) 1 }}
draftRefresh.model {{ .name }} is on {{ int .nodes }} nodes: a draft is trained and judged on one; run `appliance draft` by hand where the target fits
{{- end -}}
{{- if and (eq $refresh.backend "speculators") (eq .device "cpu") }}
draftRefresh.backend is speculators and {{ .name }} is on device cpu: it trains on GPUs alone; use small
{{- end -}}
{{- if eq .device "gpu" -}}
{{- if and (not $refresh.gpu.type) (not .gpu.resourceClaimTemplate) }}
draftRefresh.gpu.type is empty: speed that is measured on another kind of GPU says nothing of the one that serves; give the value that its nodes have in the label {{ $refresh.gpu.typeLabel }}
{{- end -}}
{{- if hasSuffix ".shared" .gpu.resource }}
draftRefresh: models.{{ .name }}.gpu.resource is {{ .gpu.resource }}: a shared GPU is a serving worker's as well; use one that is given out whole
{{- end -}}
{{- $cards := mul (int .tensorParallel) (int .pipelineParallel) -}}
{{- if and (eq (int .nodes) 1) (lt (include "appliance.refreshGpus" (dict "root" $ "model" .) | int) (int $cards)) }}
draftRefresh.gpu.count is {{ int $refresh.gpu.count }}: the target of {{ .name }} needs {{ $cards }} GPUs to be judged with
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "appliance.collectorHost" .) $values.models $values.networkPolicy.enabled -}}
{{- if not $values.networkPolicy.collector.to }}
settings.tracing.enabled without networkPolicy.collector.to: gateways and workers could not reach the collector; say where it is
{{- end -}}
{{- if and (include "appliance.collectorIsNamed" .) (not $values.networkPolicy.dns.enabled) }}
settings.tracing.endpoint is a name and networkPolicy.dns.enabled is false: nobody could find the collector; give its address
{{- end -}}
{{- end -}}
{{- end -}}
