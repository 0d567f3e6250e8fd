{{/* Entries of `models`, each over `modelDefaults`; without any, the demo of the profile `evaluation`. */}}

{{/* Merge one map into another in place, key by key; prints nothing.  (Sprig's merge skips false and 0.) */}}
{{- define "appliance.mergeInto" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
{{- $old := get $into $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $old) (not (has $key (list "nodeSelector" "affinity" "podAnnotations" "podLabels"))) -}}
{{- include "appliance.mergeInto" (dict "into" $old "from" $value) -}}
{{- else -}}
{{- $_ := set $into $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* All models, as JSON of {"models": [...]}. */}}
{{- define "appliance.models" -}}
{{- $models := list -}}
{{- range $key, $entry := default (include "appliance.demoModels" . | fromYaml) .Values.models -}}
{{- $model := deepCopy $.Values.modelDefaults -}}
{{- if kindIs "string" $key -}}{{- $_ := set $model "name" $key -}}{{- end -}}
{{- include "appliance.mergeInto" (dict "into" $model "from" $entry) -}}
{{- /* A draft is there to be used. */ -}}
{{- if and (eq $model.method "auto") (ne $model.draft.source "none") -}}{{- $_ := set $model "method" "eagle3" -}}{{- end -}}
{{- if eq $model.method "auto" -}}{{- $_ := set $model "method" "none" -}}{{- end -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* Whether any model is served: a text, empty if not. */}}
{{- define "appliance.serves" -}}
{{- if (include "appliance.models" . | fromJson).models -}}yes{{- end -}}
{{- end -}}

{{/* Whether the profile is `evaluation`: a text, empty if not. */}}
{{- define "appliance.evaluates" -}}{{- if eq .Values.profile "evaluation" -}}yes{{- end -}}{{- end -}}

{{/* Whether images are accepted by tag: a text, empty if not. */}}
{{- define "appliance.allowsTags" -}}
{{- if or .Values.global.allowTags (include "appliance.evaluates" .) -}}yes{{- end -}}
{{- end -}}

{{/* The demo, small enough for a node with two cores; its weights are in the workers' image. */}}
{{- define "appliance.demoModels" -}}
{{- if include "appliance.evaluates" . -}}
demo-coder:
  device: cpu
  maxStartupMinutes: 10
  target: {source: workerImage, path: /opt/appliance/demo/demo-coder}
  draft: {source: workerImage, path: /opt/appliance/demo/demo-coder-eagle31}
  settings: {max_num_seqs: 16}
  resources:
    requests: {cpu: 500m, memory: 3Gi, ephemeral-storage: 1Gi}
    limits: {cpu: "2", memory: 8Gi, ephemeral-storage: 8Gi}
  shmSize: 1Gi
  cacheSize: 4Gi
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/* Secret with the control token; empty if there is none. */}}
{{- define "appliance.controlToken" -}}
{{- $made := ternary (printf "%s-control-token" (include "appliance.fullname" .)) "" (ne (include "appliance.evaluates" .) "") -}}
{{- default $made .Values.keys.controlToken.existingSecret -}}
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
