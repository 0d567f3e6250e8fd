{{/* Names and labels.  A name is cut, and its end made from the whole, so that what is put behind it fits into the
63 characters of a label: the longest is a model's, of a group of nodes, with the hash a StatefulSet adds. */}}

{{- define "appliance.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "appliance.fullname" -}}
{{- $short := default "appliance" .Values.nameOverride -}}
{{- $name := printf "%s-%s" .Release.Name $short -}}
{{- if contains $short .Release.Name -}}{{- $name = .Release.Name -}}{{- end -}}
{{- $name = default $name .Values.fullnameOverride -}}
{{- if gt (len $name) 26 -}}{{- $name = printf "%s-%s" ($name | trunc 20 | trimSuffix "-") (sha256sum $name | trunc 5) -}}{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "appliance.gatewayName" -}}{{ include "appliance.fullname" . }}-gateway{{- end -}}
{{- define "appliance.workersName" -}}{{ include "appliance.fullname" . }}-workers{{- end -}}
{{- define "appliance.postgresName" -}}{{ include "appliance.fullname" . }}-postgres{{- end -}}

{{/* Secret with the gateways' certificate; empty without TLS. */}}
{{- define "appliance.tlsSecret" -}}
{{- $tls := .Values.gateway.tls -}}
{{- default (ternary (printf "%s-tls" (include "appliance.gatewayName" .)) "" (ne $tls.issuerRef.name "")) $tls.existingSecret -}}
{{- end -}}

{{/* A model's name as part of an object's name; the end distinguishes names that are equal after truncation. */}}
{{- define "appliance.slug" -}}
{{- $plain := regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-" -}}
{{- if and (eq $plain .) (le (len $plain) 20) -}}
{{- $plain -}}
{{- else -}}
{{- printf "%s-%s" ($plain | trunc 14 | trimSuffix "-") (sha256sum . | trunc 5) -}}
{{- end -}}
{{- end -}}

{{/* `m` for a model's workers, `t` for target-only ones; so no model can have the name of a component. */}}
{{- define "appliance.workerName" -}}
{{ include "appliance.fullname" .root }}-{{ ternary "t" "m" (eq .pool "target-only") }}-{{ include "appliance.slug" .model.name }}
{{- end -}}

{{- define "appliance.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of an object: (dict "root" $ "component" "gateway"). */}}
{{- define "appliance.labels" -}}
{{ include "appliance.selector" .root }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: sovereign-appliance
helm.sh/chart: {{ include "appliance.chart" .root }}
{{- with .root.Values.global.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Selector labels of a component's pods. */}}
{{- define "appliance.podSelector" -}}
{{ include "appliance.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "appliance.serviceAccount" -}}
{{- $chosen := ternary .root.Values.gateway.serviceAccountName .root.Values.workers.serviceAccountName (eq .component "gateway") -}}
{{- default (printf "%s-%s" (include "appliance.fullname" .root) .component) $chosen -}}
{{- end -}}
