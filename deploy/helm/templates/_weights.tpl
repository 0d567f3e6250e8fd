{{/* Weights: their source, and their path in a worker.  (dict "root" $ "weights" .. "at" "target") */}}

{{/* Directory inside the container. */}}
{{- define "appliance.weightsPath" -}}
{{- $path := trimAll "/" .weights.path -}}
{{- if eq .weights.source "initCopy" -}}{{- $path = "" -}}{{- end -}}
{{- if eq .weights.source "workerImage" -}}/{{ $path }}{{- else -}}
{{- printf "/models/%s%s" .at (ternary "" (printf "/%s" $path) (eq $path "")) -}}
{{- end -}}
{{- end -}}

{{- define "appliance.weightsMount" -}}
{{- if ne .weights.source "workerImage" -}}
- name: {{ .at }}
  mountPath: /models/{{ .at }}
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "appliance.weightsVolume" -}}
{{- if ne .weights.source "workerImage" -}}
- name: {{ .at }}
{{- if eq .weights.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .weights.claimName }}
    readOnly: true
{{- else if eq .weights.source "hostPath" }}
  hostPath:
    path: {{ .weights.hostPath }}
    type: Directory
{{- else if eq .weights.source "image" }}
  image:
    reference: {{ include "appliance.image" (dict "root" .root "image" .weights.image) }}
    pullPolicy: {{ .root.Values.images.pullPolicy }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .weights.copySize }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "appliance.weightsCopy" -}}
- name: copy-{{ .at }}
  image: {{ include "appliance.image" (dict "root" .root "image" .weights.image) }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  command: [cp, -rL, {{ printf "/%s/." (trimAll "/" .weights.path) | quote }}, /models/{{ .at }}/]
  securityContext:
    {{- include "appliance.containerSecurity" nil | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 256Mi, ephemeral-storage: 1Gi}
    limits: {cpu: "2", memory: 2Gi, ephemeral-storage: {{ .weights.copySize }}}
  volumeMounts:
    - name: {{ .at }}
      mountPath: /models/{{ .at }}
{{- end -}}
