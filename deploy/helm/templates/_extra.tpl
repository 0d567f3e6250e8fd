{{/* What a site adds to the pods of the gateway or of a model, and the problems of it. */}}

{{- define "appliance.extraVolumes" -}}
{{- with .extraVolumes }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- define "appliance.extraMounts" -}}
{{- with .extraVolumeMounts }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- define "appliance.extraEnv" -}}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "at" "gateway" "of" values) */}}
{{- define "appliance.extraProblems" -}}
{{- $at := .at -}}
{{- $offline := dict -}}
{{- range splitList "\n" (.root.Files.Get "files/offline.env") -}}
{{- if regexMatch "^[A-Z]" . -}}{{- $_ := set $offline (regexFind "^[^=]+" .) (regexReplaceAll "^[^=]+=" . "") -}}{{- end -}}
{{- end -}}
{{- range .of.extraEnv -}}
{{- if and (hasKey $offline .name) (ne (get $offline .name) (toString (get . "value"))) }}
{{ $at }}.extraEnv sets {{ .name }}, which keeps the appliance offline with {{ get $offline .name | quote }}; remove it
{{- else if regexMatch "^(http|https|ftp|all|socks|grpc|no)_proxy$" (lower .name) }}
{{ $at }}.extraEnv sets {{ .name }}: no program of the appliance uses a proxy, and none starts with one; remove it
{{- else if hasPrefix "APPLIANCE_" .name }}
{{ $at }}.extraEnv sets {{ .name }}: settings are values of the chart; use `settings`
{{- end -}}
{{- end -}}
{{- range $name, $_ := .of.podLabels -}}
{{- if regexMatch "^(app.kubernetes.io|appliance|helm.sh)/" $name }}
{{ $at }}.podLabels sets {{ $name }}, by which the chart's Services and network policies select pods; use another name
{{- end -}}
{{- end -}}
{{- end -}}
