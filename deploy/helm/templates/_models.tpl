{{/* Entries of `models`, each over `modelDefaults`. */}}

{{/* Merge one map into another in place, key by key; prints nothing.  (Sprig's merge skips false and 0.) */}}
{{- define "appliance.mergeInto" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
{{- $old := get $into $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $old) (not (has $key (list "nodeSelector" "affinity" "podAnnotations"))) -}}
{{- include "appliance.mergeInto" (dict "into" $old "from" $value) -}}
{{- else -}}
{{- $_ := set $into $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* All models, as JSON of {"models": [...]}. */}}
{{- define "appliance.models" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $model := deepCopy $.Values.modelDefaults -}}
{{- include "appliance.mergeInto" (dict "into" $model "from" .) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* Whether workers of a model and pool draft: a text, empty if not. */}}
{{- define "appliance.speculates" -}}
{{- if and (ne .method "none") (eq .task "generate") -}}yes{{- end -}}
{{- end -}}

{{/* Every group of equal workers, as JSON of {"pools": [{"model", "pool", "replicas"}]}. */}}
{{- define "appliance.pools" -}}
{{- $pools := list -}}
{{- range (include "appliance.models" . | fromJson).models -}}
{{- $main := ternary "speculative" "target-only" (ne (include "appliance.speculates" .) "") -}}
{{- $pools = append $pools (dict "model" . "pool" $main "replicas" .replicas "scales" .keda.enabled) -}}
{{- if and (eq $main "speculative") (gt (int .targetOnlyReplicas) 0) -}}
{{- $pools = append $pools (dict "model" . "pool" "target-only" "replicas" .targetOnlyReplicas "scales" false) -}}
{{- end -}}
{{- end -}}
{{- dict "pools" $pools | toJson -}}
{{- end -}}

{{/* GPUs of one pod. */}}
{{- define "appliance.gpus" -}}
{{- if eq .device "cpu" -}}0
{{- else if .gpu.count -}}{{ .gpu.count | int }}
{{- else -}}{{ div (mul (int .tensorParallel) (int .pipelineParallel)) (int .nodes) }}
{{- end -}}
{{- end -}}
