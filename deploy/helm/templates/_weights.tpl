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
    {{- /* Kubernetes sets the group of a local volume only for its first pod, and never for a read-only volume. */}}
    {{- $load := .root.Values.weightsLoad }}
    readOnly: {{ not (and $load.enabled (eq $load.claimName .weights.claimName)) }}
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

{{/* The pod that fills a claim. */}}
{{- define "appliance.weightsLoadPod" -}}
{{- $load := .Values.weightsLoad -}}
{{- $from := dict "root" . "weights" $load.from "at" "from" -}}
{{- $bundle := eq $load.content "bundle" -}}
{{- $verb := ternary "load" "copy" $bundle -}}
{{- $arguments := list "bundle" $verb (include "appliance.weightsPath" $from) "--models" "/models/claim" "--data" "/models/claim/.appliance" -}}
{{- $arguments = concat $arguments (ternary (list "--trusted" "/etc/appliance/bundle-keys/bundle-keys.txt") (list "--name" $load.name) $bundle) -}}
metadata:
  labels:
    {{- include "appliance.labels" (dict "root" . "component" "weights-load") | nindent 4 }}
spec:
  {{- include "appliance.podCommon" . | nindent 2 }}
  serviceAccountName: {{ include "appliance.fullname" . }}-tools
  restartPolicy: Never
  securityContext:
    {{- include "appliance.podSecurity" (dict "root" .) | nindent 4 }}
  {{- include "appliance.scheduling" $load | nindent 2 }}
  containers:
    - name: load
      image: {{ include "appliance.image" (dict "root" . "image" .Values.images.gateway) }}
      imagePullPolicy: {{ .Values.images.pullPolicy }}
      command: [appliance]
      args: {{ toJson $arguments }}
      env:
        - {name: HOME, value: /tmp}
      securityContext:
        {{- include "appliance.containerSecurity" nil | nindent 8 }}
      resources:
        {{- toYaml .Values.tests.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: claim, mountPath: /models/claim}
        {{- include "appliance.weightsMount" $from | nindent 8 }}
        {{- if $bundle }}
        - {name: bundle-keys, mountPath: /etc/appliance/bundle-keys, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 64Mi}
    - name: claim
      persistentVolumeClaim:
        claimName: {{ $load.claimName }}
    {{- include "appliance.weightsVolume" $from | nindent 4 }}
    {{- if $bundle }}
    - name: bundle-keys
      configMap:
        name: {{ $load.trustedKeys.existingConfigMap }}
        items:
          - {key: {{ $load.trustedKeys.key }}, path: bundle-keys.txt}
    {{- end }}
{{- end -}}
