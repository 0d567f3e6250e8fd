{{/* Peers that gateways, and tests and jobs like them, may call; and workers, if they trace. */}}

{{- define "appliance.dnsEgress" -}}
{{- $dns := .Values.networkPolicy.dns -}}
{{- if $dns.enabled -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $dns.namespace }}
      podSelector:
        matchLabels:
          {{- toYaml (default (dict "k8s-app" "kube-dns") $dns.podLabels) | nindent 10 }}
    {{- range $dns.addresses }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    {{- range $dns.ports }}
    - {protocol: UDP, port: {{ int . }}}
    - {protocol: TCP, port: {{ int . }}}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Host of the trace collector; empty without tracing. */}}
{{- define "appliance.collectorHost" -}}
{{- $tracing := default dict .Values.settings.tracing -}}
{{- if $tracing.enabled -}}
{{- get (urlParse (default "http://127.0.0.1:4318/v1/traces" $tracing.endpoint)) "hostname" -}}
{{- end -}}
{{- end -}}

{{/* Whether that host is a name: a text, empty if not. */}}
{{- define "appliance.collectorIsNamed" -}}
{{- $host := include "appliance.collectorHost" . -}}
{{- if and $host (not (contains ":" $host)) (not (regexMatch "^[0-9.]+$" $host)) -}}yes{{- end -}}
{{- end -}}

{{/* Whether workers need the site's authorities to verify the collector: a text, empty if not. */}}
{{- define "appliance.workerChecksCollector" -}}
{{- if and (include "appliance.collectorHost" .) .Values.caBundle.existingConfigMap -}}yes{{- end -}}
{{- end -}}

{{- define "appliance.collectorEgress" -}}
{{- $collector := .Values.networkPolicy.collector -}}
{{- if and (include "appliance.collectorHost" .) $collector.to -}}
{{- $url := urlParse (default "http://127.0.0.1:4318/v1/traces" .Values.settings.tracing.endpoint) -}}
{{- $own := regexFind "[0-9]+$" (regexFind ":[0-9]+$" (get $url "host")) -}}
{{- $port := default (ternary "443" "80" (eq (get $url "scheme") "https")) $own | int -}}
- to:
    {{- toYaml $collector.to | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ default $port (int $collector.port) }}}
{{- end -}}
{{- end -}}

{{/* Only the database, for pods without a gateway's other peers. */}}
{{- define "appliance.databaseEgress" -}}
{{- if eq .Values.database.kind "external" -}}
- to:
    {{- toYaml .Values.database.external.to | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ int .Values.database.external.port }}}
{{- else if eq .Values.database.kind "inChart" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "appliance.podSelector" (dict "root" . "component" "postgres") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 5432}
{{- end -}}
{{- end -}}

{{- define "appliance.gatewayEgress" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "appliance.podSelector" (dict "root" . "component" "worker") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 8000}
    - {protocol: TCP, port: 8001}
{{- with include "appliance.databaseEgress" . }}
{{ . }}
{{- end }}
{{- with include "appliance.collectorEgress" . }}
{{ . }}
{{- end }}
{{- range .Values.networkPolicy.gateway.peers }}
- to:
    {{- toYaml .to | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ int .port }}}
{{- end }}
{{- with include "appliance.dnsEgress" . }}
{{ . }}
{{- end }}
{{- end -}}
