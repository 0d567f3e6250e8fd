{{/* Images: by digest, below the registry of the site. */}}

{{/* (dict "root" $ "image" (dict "repository" .. "tag" .. "digest" ..)) */}}
{{- define "appliance.image" -}}
{{- $registry := trimSuffix "/" .root.Values.global.imageRegistry -}}
{{- $repository := ternary (printf "%s/%s" $registry .image.repository) .image.repository (ne $registry "") -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion (get .image "tag")) -}}
{{- end -}}
{{- end -}}

{{- define "appliance.workerImage" -}}
{{- $image := ternary .root.Values.images.workerCpu .root.Values.images.workerGpu (eq .model.device "cpu") -}}
{{- include "appliance.image" (dict "root" .root "image" $image) -}}
{{- end -}}

{{- define "appliance.pullSecrets" -}}
{{- with .Values.global.imagePullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}
