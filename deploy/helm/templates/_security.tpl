{{/* The Pod Security Standard `restricted`: no root, no privilege escalation, a read-only root file system. */}}

{{- define "appliance.podSecurity" -}}
runAsNonRoot: true
{{- if not .root.Values.global.openshift }}
runAsUser: {{ default 10001 .userId | int }}
runAsGroup: {{ default 10001 .userId | int }}
fsGroup: {{ default 10001 .userId | int }}
{{- end }}
# Keys on a disk stay as their owner left them: nothing is given to the group at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "appliance.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- if . }}
  add: {{ toYaml . | nindent 4 }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Fields of every pod. */}}
{{- define "appliance.podCommon" -}}
automountServiceAccountToken: false
# Variables named after Services would be taken for settings.
enableServiceLinks: false
dnsPolicy: ClusterFirst
dnsConfig:
  options:
    # Names are resolved as they are, without search domains.
    - name: ndots
      value: "1"
{{- with include "appliance.pullSecrets" . }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "appliance.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
