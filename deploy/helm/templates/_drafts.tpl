{{/* The draft registry, which gateways, workers and the refresh share. */}}

{{/* Section `drafts` of appliance.yaml: (dict "root" $ "signs" true); empty if nothing is shared. */}}
{{- define "appliance.draftSettings" -}}
{{- $values := .root.Values -}}
{{- $drafts := dict -}}
{{- if $values.drafts.existingClaim -}}
{{- $_ := set $drafts "directory" "/var/lib/appliance-drafts/registry" -}}
{{- end -}}
{{- if $values.drafts.trustedKeys.existingConfigMap -}}
{{- $_ := set $drafts "trusted_keys_file" "/etc/appliance/drafts-trusted/drafts.pub" -}}
{{- end -}}
{{- if and .signs $values.keys.draftsKey.existingSecret -}}
{{- $_ := set $drafts "signing_key_file" "/etc/appliance/drafts-key/drafts.key" -}}
{{- end -}}
{{- with $drafts -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* (dict "root" $ "readOnly" true) */}}
{{- define "appliance.draftsMount" -}}
{{- if .root.Values.drafts.existingClaim -}}
- name: drafts
  mountPath: /var/lib/appliance-drafts
  {{- if .readOnly }}
  readOnly: true
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "appliance.draftsVolume" -}}
{{- if .Values.drafts.existingClaim -}}
- name: drafts
  persistentVolumeClaim:
    claimName: {{ .Values.drafts.existingClaim }}
{{- end -}}
{{- end -}}

{{- define "appliance.draftsTrustedMount" -}}
{{- if .Values.drafts.trustedKeys.existingConfigMap -}}
- name: drafts-trusted
  mountPath: /etc/appliance/drafts-trusted
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "appliance.draftsTrustedVolume" -}}
{{- if .Values.drafts.trustedKeys.existingConfigMap -}}
- name: drafts-trusted
  configMap:
    name: {{ .Values.drafts.trustedKeys.existingConfigMap }}
    items:
      - key: {{ .Values.drafts.trustedKeys.key }}
        path: drafts.pub
{{- end -}}
{{- end -}}
