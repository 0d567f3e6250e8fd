{{/* The pod of a gateway, and parts shared with tests and jobs that run like one. */}}

{{/* Files a gateway reads, as JSON of {"files": [{"name", "kind", "source", "key", "path"}]}. */}}
{{- define "appliance.gatewayFiles" -}}
{{- $values := .Values -}}
{{- $files := list -}}
{{- with include "appliance.controlToken" . -}}
{{- $files = append $files (dict "name" "control-token" "kind" "secret" "source" . "key" $values.keys.controlToken.key "path" "token") -}}
{{- end -}}
{{- with $values.keys.payloadMasterKey.existingSecret -}}
{{- $files = append $files (dict "name" "payload-master-key" "kind" "secret" "source" . "key" $values.keys.payloadMasterKey.key "path" "master.key") -}}
{{- end -}}
{{- with $values.keys.tenantsMac.existingSecret -}}
{{- $files = append $files (dict "name" "tenants-mac" "kind" "secret" "source" . "key" $values.keys.tenantsMac.key "path" "tenants-mac.key") -}}
{{- end -}}
{{- with $values.keys.tenants.existingSecret -}}
{{- $files = append $files (dict "name" "tenants" "kind" "secret" "source" . "key" $values.keys.tenants.key "path" "tenants.yaml") -}}
{{- end -}}
{{- with $values.keys.signingKey.existingSecret -}}
{{- $files = append $files (dict "name" "signing-key" "kind" "secret" "source" .) -}}
{{- end -}}
{{- with $values.keys.draftsKey.existingSecret -}}
{{- $files = append $files (dict "name" "drafts-key" "kind" "secret" "source" . "key" $values.keys.draftsKey.key "path" "drafts.key") -}}
{{- end -}}
{{- with $values.drafts.trustedKeys.existingConfigMap -}}
{{- $files = append $files (dict "name" "drafts-trusted" "kind" "configMap" "source" . "key" $values.drafts.trustedKeys.key "path" "drafts.pub") -}}
{{- end -}}
{{- with include "appliance.tlsSecret" . -}}
{{- $files = append $files (dict "name" "tls" "kind" "secret" "source" .) -}}
{{- end -}}
{{- with $values.keys.forward.existingSecret -}}
{{- $files = append $files (dict "name" "forward" "kind" "secret" "source" .) -}}
{{- end -}}
{{- with $values.gateway.tls.clientCaConfigMap -}}
{{- $files = append $files (dict "name" "client-ca" "kind" "configMap" "source" . "key" $values.gateway.tls.clientCaKey "path" "ca.crt") -}}
{{- end -}}
{{- with $values.oidc.jwksConfigMap -}}
{{- $files = append $files (dict "name" "oidc" "kind" "configMap" "source" . "key" $values.oidc.key "path" "jwks.json") -}}
{{- end -}}
{{- with $values.caBundle.existingConfigMap -}}
{{- $files = append $files (dict "name" "ca" "kind" "configMap" "source" . "key" $values.caBundle.key "path" "ca.crt") -}}
{{- end -}}
{{- if eq $values.database.kind "external" -}}
{{- $files = append $files (dict "name" "database" "kind" "secret" "source" $values.database.external.existingSecret "key" $values.database.external.passwordKey "path" "password") -}}
{{- else if eq $values.database.kind "inChart" -}}
{{- $files = append $files (dict "name" "database" "kind" "secret" "source" $values.database.inChart.existingSecret "key" "gateway-password" "path" "password") -}}
{{- end -}}
{{- dict "files" $files | toJson -}}
{{- end -}}

{{- define "appliance.fileMounts" -}}
- name: settings
  mountPath: /etc/appliance/appliance.yaml
  subPath: appliance.yaml
  readOnly: true
{{- range (include "appliance.gatewayFiles" . | fromJson).files }}
- name: {{ .name }}
  mountPath: /etc/appliance/{{ .name }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "appliance.fileVolumes" -}}
- name: settings
  configMap:
    name: {{ include "appliance.gatewayName" . }}
{{- range (include "appliance.gatewayFiles" . | fromJson).files }}
- name: {{ .name }}
  {{ .kind }}:
    {{- if eq .kind "secret" }}
    secretName: {{ .source }}
    # Keys that others could read are refused; the group is given by fsGroup alone.
    defaultMode: 0400
    {{- else }}
    name: {{ .source }}
    {{- end }}
    {{- if hasKey . "key" }}
    items:
      - key: {{ .key }}
        path: {{ .path }}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "appliance.gatewayEnvironment" -}}
- name: HOME
  value: /var/lib/appliance
- name: APPLIANCE_CONFIG
  value: /etc/appliance/appliance.yaml
{{- if .Values.caBundle.existingConfigMap }}
- name: SSL_CERT_FILE
  value: /etc/appliance/ca/ca.crt
{{- end }}
{{- end -}}

{{- define "appliance.gatewayPod" -}}
{{- $gateway := .Values.gateway -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne (include "appliance.tlsSecret" .) "") -}}
metadata:
  labels:
    {{- include "appliance.labels" (dict "root" . "component" "gateway") | nindent 4 }}
    {{- with $gateway.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: gateway
    # New settings, new pods.
    checksum/settings: {{ include "appliance.gatewaySettings" . | sha256sum }}
    {{- with $gateway.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "appliance.podCommon" . | nindent 2 }}
  serviceAccountName: {{ include "appliance.serviceAccount" (dict "root" . "component" "gateway") }}
  # Requests end within drainSeconds; what is written after them needs a moment.
  terminationGracePeriodSeconds: {{ add (int $gateway.preStopSeconds) (int $gateway.drainSeconds) 30 }}
  securityContext:
    {{- include "appliance.podSecurity" (dict "root" .) | nindent 4 }}
  {{- include "appliance.scheduling" $gateway | nindent 2 }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: {{ $gateway.topologySpread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "appliance.podSelector" (dict "root" $ "component" "gateway") | nindent 10 }}
    {{- end }}
  containers:
    - name: gateway
      image: {{ include "appliance.image" (dict "root" . "image" .Values.images.gateway) }}
      imagePullPolicy: {{ .Values.images.pullPolicy }}
      command: [env, --block-signal=TERM, appliance]
      args: [gateway, --config, /etc/appliance/appliance.yaml]
      env:
        {{- include "appliance.gatewayEnvironment" . | nindent 8 }}
        {{- include "appliance.extraEnv" $gateway | nindent 8 }}
      ports:
        - name: api
          containerPort: 8080
        - name: admin
          containerPort: 8081
      securityContext:
        {{- include "appliance.containerSecurity" nil | nindent 8 }}
      resources:
        {{- toYaml $gateway.resources | nindent 8 }}
      # Probes use the admin listener, which clients that use up the API's connections cannot reach.
      # The database may have to be upgraded first, and a spool to be brought in.
      startupProbe:
        httpGet: {path: /healthz, port: admin, scheme: {{ $scheme }}}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 150
      # Requests wait, or get 503, while all workers are away; without an endpoint clients would be refused.
      readinessProbe:
        httpGet: {path: "/readyz?exclude=workers", port: admin, scheme: {{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Says that the process answers, and nothing of workers or database: those are no reason to restart it.
      livenessProbe:
        httpGet: {path: /healthz, port: admin, scheme: {{ $scheme }}}
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 4
      volumeMounts:
        - name: data
          mountPath: /var/lib/appliance
        - name: tmp
          mountPath: /tmp
        {{- if $gateway.sharedFiles.existingClaim }}
        - name: shared
          mountPath: /var/lib/appliance-shared
        {{- else if $gateway.persistence.filesClaim }}
        - name: files
          mountPath: /var/lib/appliance-files
        {{- end }}
        {{- with include "appliance.draftsMount" (dict "root" . "readOnly" false) }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- include "appliance.fileMounts" . | nindent 8 }}
        {{- include "appliance.extraMounts" $gateway | nindent 8 }}
    {{- with $gateway.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        medium: Memory
        sizeLimit: {{ $gateway.tmpSize }}
    {{- if eq $gateway.kind "Deployment" }}
    - name: data
      emptyDir:
        sizeLimit: {{ $gateway.persistence.ephemeralSize }}
    {{- end }}
    {{- if $gateway.sharedFiles.existingClaim }}
    - name: shared
      persistentVolumeClaim:
        claimName: {{ $gateway.sharedFiles.existingClaim }}
    {{- else if $gateway.persistence.filesClaim }}
    - name: files
      persistentVolumeClaim:
        claimName: {{ $gateway.persistence.filesClaim }}
    {{- end }}
    {{- with include "appliance.draftsVolume" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- include "appliance.fileVolumes" . | nindent 4 }}
    {{- include "appliance.extraVolumes" $gateway | nindent 4 }}
{{- end -}}
