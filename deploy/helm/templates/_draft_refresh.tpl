{{/* The pod that trains a new draft: harvest, train, evaluate (/opt/appliance/refresh.py in the worker's image). */}}

{{/* Whether there is one: a text, empty if not. */}}
{{- define "appliance.refreshes" -}}
{{- if or .Values.draftRefresh.enabled .Values.draftRefresh.schedule.enabled -}}yes{{- end -}}
{{- end -}}

{{/* Its model, as JSON of {"models": [...]}: one entry, or none if the name is unknown. */}}
{{- define "appliance.refreshModel" -}}
{{- $found := list -}}
{{- range (include "appliance.models" . | fromJson).models -}}
{{- if eq .name $.Values.draftRefresh.model -}}{{- $found = append $found . -}}{{- end -}}
{{- end -}}
{{- dict "models" $found | toJson -}}
{{- end -}}

{{/* Its image: (dict "root" $ "model" ..) */}}
{{- define "appliance.refreshImage" -}}
{{- $image := .root.Values.draftRefresh.image -}}
{{- if $image.repository -}}
{{- include "appliance.image" (dict "root" .root "image" $image) -}}
{{- else -}}
{{- include "appliance.workerImage" . -}}
{{- end -}}
{{- end -}}

{{/* Its GPUs: (dict "root" $ "model" ..) */}}
{{- define "appliance.refreshGpus" -}}
{{- $count := .root.Values.draftRefresh.gpu.count | int -}}
{{- if eq .model.device "cpu" -}}0
{{- else if $count -}}{{ $count }}
{{- else -}}{{ include "appliance.gpus" .model }}
{{- end -}}
{{- end -}}

{{/* The gateways' settings of the log that are needed to read content and write entries. */}}
{{- define "appliance.refreshSettings" -}}
{{- $values := .root.Values -}}
{{- $worker := include "appliance.workerSettings" (dict "root" .root "model" .model "pool" "speculative") | fromYaml -}}
{{- $audit := pick (default dict $values.settings.audit) "origin" "payload_rotation_days" -}}
{{- $_ := set $audit "database_url" (include "appliance.databaseUrl" .root) -}}
{{- $_ := set $audit "payload_keys_directory" "/var/lib/appliance-shared/payload-keys" -}}
{{- if $values.keys.payloadMasterKey.existingSecret -}}
{{- $_ := set $audit "payload_master_key_file" "/etc/appliance/payload-master-key/master.key" -}}
{{- end -}}
{{- $settings := pick $worker "worker" "log" "sovereignty" -}}
{{- $_ := set $settings "data" (dict "directory" "/var/lib/appliance") -}}
{{- $_ := set $settings "audit" $audit -}}
{{- $_ := set $settings "tenants" (dict "mac_key_file" "/etc/appliance/tenants-mac/tenants-mac.key") -}}
{{- $_ := set $settings "drafts" (include "appliance.draftSettings" (dict "root" .root "signs" true) | fromYaml) -}}
{{- $settings | toYaml -}}
{{- end -}}

{{/* Secrets and ConfigMaps it reads, as JSON of {"files": [...]}: some of a gateway's, without the log's signing key. */}}
{{- define "appliance.refreshFiles" -}}
{{- $files := list -}}
{{- range (include "appliance.gatewayFiles" . | fromJson).files -}}
{{- if has .name (list "payload-master-key" "tenants-mac" "database" "ca" "drafts-key" "drafts-trusted") -}}{{- $files = append $files . -}}{{- end -}}
{{- end -}}
{{- dict "files" $files | toJson -}}
{{- end -}}

{{/* (dict "root" $ "model" .. "run" "a word, or empty: the name of its Job") */}}
{{- define "appliance.refreshPod" -}}
{{- $root := .root -}}
{{- $refresh := .root.Values.draftRefresh -}}
{{- $model := .model -}}
{{- $gpus := include "appliance.refreshGpus" . | int -}}
{{- $config := list "--config" "/etc/appliance/appliance.yaml" -}}
{{- $sources := list (dict "root" $root "weights" $model.target "at" "target") -}}
{{- if ne $model.draft.source "none" -}}
{{- $sources = append $sources (dict "root" $root "weights" $model.draft "at" "draft") -}}
{{- end -}}
{{- $selector := deepCopy $refresh.nodeSelector -}}
{{- if and (gt $gpus 0) $refresh.gpu.type -}}
{{- $_ := set $selector $refresh.gpu.typeLabel $refresh.gpu.type -}}
{{- end -}}
metadata:
  labels:
    {{- include "appliance.labels" (dict "root" $root "component" "draft-refresh") | nindent 4 }}
    appliance/model: {{ include "appliance.slug" $model.name }}
  annotations:
    kubectl.kubernetes.io/default-container: refresh
    checksum/settings: {{ include "appliance.refreshSettings" . | sha256sum }}
    {{- with $refresh.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "appliance.podCommon" $root | nindent 2 }}
  serviceAccountName: {{ default (printf "%s-draft-refresh" (include "appliance.fullname" $root)) $refresh.serviceAccountName }}
  {{- if and (gt $gpus 0) $model.gpu.runtimeClassName }}
  runtimeClassName: {{ $model.gpu.runtimeClassName }}
  {{- end }}
  # A failed pod is evaluated by the policy below, and replaced; finished steps are in the registry.
  restartPolicy: Never
  # A checkpoint is written, and the workers of an evaluation are ended.
  terminationGracePeriodSeconds: 300
  securityContext:
    {{- include "appliance.podSecurity" (dict "root" $root) | nindent 4 }}
  {{- include "appliance.scheduling" (set (deepCopy (pick $refresh "priorityClassName" "tolerations" "affinity")) "nodeSelector" $selector) | nindent 2 }}
  initContainers:
    # Made as a gateway makes it, or mounting a part of the disk below would leave a directory of root's there.
    - name: keys
      image: {{ include "appliance.refreshImage" . }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: [/opt/appliance/bin/python, -I, -c]
      args: ["import os; os.makedirs('/var/lib/appliance-shared/payload-keys', 0o700, exist_ok=True)"]
      securityContext:
        {{- include "appliance.containerSecurity" nil | nindent 8 }}
      resources:
        requests: {cpu: 100m, memory: 64Mi, ephemeral-storage: 16Mi}
        limits: {cpu: "1", memory: 256Mi, ephemeral-storage: 64Mi}
      volumeMounts:
        - {name: shared, mountPath: /var/lib/appliance-shared}
    {{- range $sources }}
    {{- if eq .weights.source "initCopy" }}
    {{- include "appliance.weightsCopy" . | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- if and (gt $gpus 0) $model.gpu.resourceClaimTemplate }}
  resourceClaims:
    - name: gpus
      resourceClaimTemplateName: {{ $model.gpu.resourceClaimTemplate }}
  {{- end }}
  containers:
    - name: refresh
      image: {{ include "appliance.refreshImage" . }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: [/opt/appliance/bin/python, -I, /opt/appliance/refresh.py]
      args:
        {{- toYaml $config | nindent 8 }}
        - --state
        - /var/lib/appliance-drafts/refreshes
        - --run
        - {{ printf "%s.%s" (include "appliance.slug" $model.name) (default "$(JOB)" .run) | quote }}
        - {{ printf "--purpose=%s" $refresh.purpose | quote }}
        {{- if gt (int $refresh.steps) 0 }}
        - {{ printf "--steps=%d" (int $refresh.steps) }}
        {{- else }}
        - {{ printf "--minutes=%d" (int $refresh.minutes) }}
        {{- end }}
        {{- if gt $gpus 0 }}
        - --gpu
        {{- end }}
        - --train=--backend
        - {{ printf "--train=%s" $refresh.backend }}
        {{- range $step := list "harvest" "train" "evaluate" }}
        {{- range (get $refresh.arguments $step) }}
        - {{ printf "--%s=%s" $step . | quote }}
        {{- end }}
        {{- end }}
      env:
        {{- if not .run }}
        - name: JOB
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['batch.kubernetes.io/job-name']
        {{- end }}
        {{- include "appliance.workerEnvironment" (dict "root" $root "model" $model "pool" "speculative" "leads" true) | trim | nindent 8 }}
      securityContext:
        {{- include "appliance.containerSecurity" nil | nindent 8 }}
      resources:
        {{- if and (gt $gpus 0) $model.gpu.resourceClaimTemplate }}
        claims:
          - name: gpus
        {{- end }}
        {{- range $bound := list "requests" "limits" }}
        {{ $bound }}:
          {{- toYaml (get $refresh.resources $bound) | nindent 10 }}
          {{- if and (gt $gpus 0) (not $model.gpu.resourceClaimTemplate) }}
          {{ $model.gpu.resource }}: {{ $gpus }}
          {{- end }}
        {{- end }}
      volumeMounts:
        {{- range $sources }}
        {{- include "appliance.weightsMount" . | nindent 8 }}
        {{- end }}
        - name: settings
          mountPath: /etc/appliance/appliance.yaml
          subPath: appliance.yaml
          readOnly: true
        {{- range (include "appliance.refreshFiles" $root | fromJson).files }}
        - name: {{ .name }}
          mountPath: /etc/appliance/{{ .name }}
          readOnly: true
        {{- end }}
        {{- include "appliance.draftsMount" (dict "root" $root "readOnly" false) | nindent 8 }}
        # The keys to kept content, to read alone: samples are sealed with those that are there.  Not the files of
        # batches next to them.
        - name: shared
          mountPath: /var/lib/appliance-shared/payload-keys
          subPath: payload-keys
          readOnly: true
        - name: data
          mountPath: /var/lib/appliance
        - name: cache
          mountPath: /var/cache/appliance
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
  volumes:
    {{- range $sources }}
    {{- include "appliance.weightsVolume" . | nindent 4 }}
    {{- end }}
    - name: settings
      configMap:
        name: {{ include "appliance.fullname" $root }}-draft-refresh
    {{- range (include "appliance.refreshFiles" $root | fromJson).files }}
    - name: {{ .name }}
      {{ .kind }}:
        {{- if eq .kind "secret" }}
        secretName: {{ .source }}
        defaultMode: 0400
        {{- else }}
        name: {{ .source }}
        {{- end }}
        items:
          - key: {{ .key }}
            path: {{ .path }}
    {{- end }}
    {{- include "appliance.draftsVolume" $root | nindent 4 }}
    - name: shared
      persistentVolumeClaim:
        claimName: {{ $root.Values.gateway.sharedFiles.existingClaim }}
    - name: data
      emptyDir:
        sizeLimit: 1Gi
    - name: cache
      emptyDir:
        sizeLimit: {{ $refresh.cacheSize }}
    - name: tmp
      emptyDir:
        sizeLimit: 4Gi
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $refresh.shmSize }}
{{- end -}}

{{/* Spec of its Job: (dict "root" $ "model" .. "run" ..) */}}
{{- define "appliance.refreshJob" -}}
backoffLimit: 6
activeDeadlineSeconds: {{ mul (int .root.Values.draftRefresh.deadlineMinutes) 60 }}
podFailurePolicy:
  rules:
    # An evicted pod is restarted, any number of times.
    - action: Ignore
      onPodConditions:
        - {type: DisruptionTarget, status: "True"}
    # 3: the draft was refused, and a retry would give the same result; 64: wrong arguments.
    - action: FailJob
      onExitCodes:
        containerName: refresh
        operator: In
        values: [3, 64]
template:
  {{- include "appliance.refreshPod" . | nindent 2 }}
{{- end -}}
