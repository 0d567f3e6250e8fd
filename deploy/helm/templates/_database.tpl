{{/* The pod that creates and upgrades the tables as their owner. */}}

{{- define "appliance.databasePod" -}}
{{- $database := .Values.database -}}
{{- $owner := $database.external.owner -}}
{{- $image := include "appliance.image" (dict "root" . "image" .Values.images.gateway) -}}
{{- $url := include "appliance.databaseUrl" . | replace "postgresql://gateway@" "postgresql://audit_owner@" -}}
{{- $secret := $database.inChart.existingSecret -}}
{{- $key := "owner-password" -}}
{{- $role := "gateway" -}}
{{- if eq $database.kind "external" -}}
{{- $role = $database.external.user -}}
{{- $url = include "appliance.databaseUrl" . | replace (printf "postgresql://%s@" $role) (printf "postgresql://%s@" $owner.user) -}}
{{- $secret = $owner.existingSecret -}}
{{- $key = $owner.passwordKey -}}
{{- end -}}
metadata:
  labels:
    {{- include "appliance.labels" (dict "root" . "component" "tools") | nindent 4 }}
spec:
  {{- include "appliance.podCommon" . | nindent 2 }}
  serviceAccountName: {{ include "appliance.fullname" . }}-tools
  restartPolicy: OnFailure
  securityContext:
    {{- include "appliance.podSecurity" (dict "root" .) | nindent 4 }}
  containers:
    - name: upgrade
      image: {{ $image }}
      imagePullPolicy: {{ .Values.images.pullPolicy }}
      command: [appliance]
      args: [audit, upgrade-database, --grant-to, {{ $role }}, --url, {{ $url | quote }}]
      env:
        - {name: HOME, value: /tmp}
      securityContext:
        {{- include "appliance.containerSecurity" nil | nindent 8 }}
      resources:
        {{- toYaml .Values.tests.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: password, mountPath: /etc/appliance/database, readOnly: true}
        {{- if .Values.caBundle.existingConfigMap }}
        - {name: ca, mountPath: /etc/appliance/ca, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 64Mi}
    - name: password
      secret:
        secretName: {{ $secret }}
        defaultMode: 0400
        items:
          - {key: {{ $key }}, path: password}
    {{- if .Values.caBundle.existingConfigMap }}
    - name: ca
      configMap:
        name: {{ .Values.caBundle.existingConfigMap }}
        items:
          - {key: {{ .Values.caBundle.key }}, path: ca.crt}
    {{- end }}
{{- end -}}
