{{/* Whom gateways, and tests and jobs in their place, may call. */}}

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

{{- define "appliance.gatewayEgress" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "appliance.podSelector" (dict "root" . "component" "worker") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 8000}
{{- if eq .Values.database.kind "external" }}
- to:
    {{- toYaml .Values.database.external.to | nindent 4 }}
  ports:
    - {protocol: TCP, port: {{ int .Values.database.external.port }}}
{{- else if eq .Values.database.kind "inChart" }}
- to:
    - podSelector:
        matchLabels:
          {{- include "appliance.podSelector" (dict "root" . "component" "postgres") | nindent 10 }}
  ports:
    - {protocol: TCP, port: 5432}
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
