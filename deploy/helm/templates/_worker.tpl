{{/* The pod of a worker: (dict "root" $ "model" .. "pool" .. "leads" true). A group of nodes has one that leads. */}}

{{- define "appliance.workerEnvironment" -}}
{{- $named := list "VLLM_HOST_IP" -}}
{{- if gt (int .model.nodes) 1 }}
# The others of the group reach it there.
- name: VLLM_HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: GROUP
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
- name: NODE
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
# What vLLM needs to know of the others; the first node of a group has the group's name.
- name: APPLIANCE_WORKER__EXTRA_ARGUMENTS
  {{- $name := include "appliance.workerName" . }}
  {{- $first := printf "%s-$(GROUP).%s.%s.svc.%s" $name $name .root.Release.Namespace .root.Values.global.clusterDomain }}
  {{- $arguments := list "--nnodes" (.model.nodes | int | toString) "--node-rank" "$(NODE)" "--master-addr" $first "--master-port" "29501" }}
  {{- if not .leads }}{{ $arguments = append $arguments "--headless" }}{{ end }}
  value: {{ concat (default list (get .model.settings "extra_arguments")) $arguments | toJson | squote }}
{{- else }}
- name: VLLM_HOST_IP
  value: 127.0.0.1
{{- end }}
{{- range .root.Files.Lines "files/offline.env" }}
{{- if regexMatch "^[A-Z_]+=" . }}
{{- $name := regexFind "^[A-Z_]+" . }}
{{- if not (has $name $named) }}
- name: {{ $name }}
  value: {{ . | trimPrefix (printf "%s=" $name) | quote }}
{{- end }}
{{- end }}
{{- end }}
# For commands by `kubectl exec`.
- name: APPLIANCE_CONFIG
  value: /etc/appliance/appliance.yaml
- name: HOME
  value: /var/cache/appliance
- name: XDG_CACHE_HOME
  value: /var/cache/appliance
{{- end -}}

{{/* Program of a further node: wait until the leader's port is closed, at most for drainSeconds. */}}
{{- define "appliance.awaitLeader" -}}
import os, socket, time
end = time.monotonic() + {{ int .drainSeconds }}
try:
    while time.monotonic() < end:
        socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], 8000), 2).close()
        time.sleep(0.5)
except OSError:
    pass
{{- end -}}

{{- define "appliance.workerPod" -}}
{{- $model := .model -}}
{{- $gpus := include "appliance.gpus" $model | int -}}
{{- $sources := list (dict "root" .root "weights" $model.target "at" "target") -}}
{{- if and (eq .pool "speculative") (ne $model.draft.source "none") -}}
{{- $sources = append $sources (dict "root" .root "weights" $model.draft "at" "draft") -}}
{{- end -}}
metadata:
  labels:
    {{- include "appliance.labels" (dict "root" .root "component" (ternary "worker" "worker-node" .leads)) | nindent 4 }}
    appliance/model: {{ include "appliance.slug" $model.name }}
    appliance/pool: {{ .pool }}
    {{- with $model.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: worker
    checksum/settings: {{ include "appliance.workerSettings" . | sha256sum }}
    {{- with $model.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "appliance.podCommon" .root | nindent 2 }}
  serviceAccountName: {{ include "appliance.serviceAccount" (dict "root" .root "component" "worker") }}
  {{- if and (eq $model.device "gpu") $model.gpu.runtimeClassName }}
  runtimeClassName: {{ $model.gpu.runtimeClassName }}
  {{- end }}
  # It ends when its last request has, at the latest after drainSeconds; its processes need a moment.
  terminationGracePeriodSeconds: {{ add (int $model.drainSeconds) 60 }}
  securityContext:
    {{- include "appliance.podSecurity" (dict "root" .root) | nindent 4 }}
  {{- include "appliance.scheduling" $model | nindent 2 }}
  {{- $copied := false }}
  {{- range $sources }}{{ if eq .weights.source "initCopy" }}{{ $copied = true }}{{ end }}{{ end }}
  {{- if $copied }}
  initContainers:
    {{- range $sources }}
    {{- if eq .weights.source "initCopy" }}
    {{- include "appliance.weightsCopy" . | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- if $model.gpu.resourceClaimTemplate }}
  resourceClaims:
    - name: gpus
      resourceClaimTemplateName: {{ $model.gpu.resourceClaimTemplate }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "appliance.workerImage" . }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      command: [env, --block-signal=TERM, appliance]
      args: [worker, --config, /etc/appliance/appliance.yaml]
      env:
        {{- include "appliance.workerEnvironment" . | trim | nindent 8 }}
        {{- include "appliance.extraEnv" $model | nindent 8 }}
      securityContext:
        {{- include "appliance.containerSecurity" (ternary (list "IPC_LOCK") nil $model.rdma.enabled) | nindent 8 }}
      resources:
        {{- if $model.gpu.resourceClaimTemplate }}
        claims:
          - name: gpus
        {{- end }}
        {{- range $bound := list "requests" "limits" }}
        {{ $bound }}:
          {{- toYaml (get $model.resources $bound) | nindent 10 }}
          {{- if and (gt $gpus 0) (not $model.gpu.resourceClaimTemplate) }}
          {{ $model.gpu.resource }}: {{ $gpus }}
          {{- end }}
          {{- with $model.rdma.resources }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        {{- end }}
      {{- if .leads }}
      ports:
        - name: worker
          containerPort: 8000
        - name: control
          containerPort: 8001
      # Reading, loading and compiling; five minutes more to hash the weights before that.
      startupProbe:
        httpGet: {path: /health, port: worker}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ add (mul (int $model.maxStartupMinutes) 6) 30 }}
      # Gateways look at its health themselves, every second, and its supervisor restarts the engine by itself.
      # Ready says only that the pod is up and not about to go: a worker that left DNS while its engine is
      # restarted on purpose would be taken for one that is gone.
      readinessProbe:
        httpGet: {path: /health, port: worker}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ add (mul (int $model.maxStartupMinutes) 6) 30 }}
      # No liveness probe: it would kill a worker that is busy.  One that cannot be helped ends by itself.
      {{- end }}
      {{- if not .leads }}
      # A further node computes until the first one, which serves, has finished its requests and ended.
      lifecycle:
        preStop:
          exec:
            command: [/opt/appliance/bin/python, -I, -c, {{ include "appliance.awaitLeader" $model | quote }}]
      {{- end }}
      volumeMounts:
        {{- range $sources }}
        {{- include "appliance.weightsMount" . | nindent 8 }}
        {{- end }}
        - name: settings
          mountPath: /etc/appliance/appliance.yaml
          subPath: appliance.yaml
          readOnly: true
        - name: control-token
          mountPath: /etc/appliance/control-token
          readOnly: true
        {{- if .root.Values.keys.scrapeToken.existingSecret }}
        - name: scrape-token
          mountPath: /etc/appliance/scrape-token
          readOnly: true
        {{- end }}
        {{- with include "appliance.draftsMount" (dict "root" .root "readOnly" true) }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "appliance.draftsTrustedMount" .root }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if include "appliance.workerChecksCollector" .root }}
        - name: ca
          mountPath: /etc/appliance/ca
          readOnly: true
        {{- end }}
        - name: data
          mountPath: /var/lib/appliance
        - name: cache
          mountPath: /var/cache/appliance
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- include "appliance.extraMounts" $model | nindent 8 }}
    {{- with $model.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- range $sources }}
    {{- include "appliance.weightsVolume" . | nindent 4 }}
    {{- end }}
    - name: settings
      configMap:
        name: {{ include "appliance.workerName" . }}
    - name: control-token
      secret:
        secretName: {{ include "appliance.controlToken" .root }}
        defaultMode: 0400
        items:
          - key: {{ .root.Values.keys.controlToken.key }}
            path: token
    {{- with .root.Values.keys.scrapeToken }}
    {{- if .existingSecret }}
    - name: scrape-token
      secret:
        secretName: {{ .existingSecret }}
        defaultMode: 0400
        items:
          - key: {{ .key }}
            path: token
    {{- end }}
    {{- end }}
    {{- with include "appliance.draftsVolume" .root }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "appliance.draftsTrustedVolume" .root }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if include "appliance.workerChecksCollector" .root }}
    - name: ca
      configMap:
        name: {{ .root.Values.caBundle.existingConfigMap }}
        items:
          - key: {{ .root.Values.caBundle.key }}
            path: ca.crt
    {{- end }}
    - name: data
      emptyDir:
        sizeLimit: 1Gi
    - name: cache
      emptyDir:
        sizeLimit: {{ $model.cacheSize }}
    - name: tmp
      emptyDir:
        sizeLimit: 4Gi
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $model.shmSize }}
    {{- include "appliance.extraVolumes" $model | nindent 4 }}
{{- end -}}
