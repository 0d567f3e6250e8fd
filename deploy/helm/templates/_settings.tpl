{{/* appliance.yaml of gateways and of workers. */}}

{{- define "appliance.databaseUrl" -}}
{{- $database := .Values.database -}}
{{- if eq $database.kind "external" -}}
{{- $from := $database.external -}}
{{- $ca := ternary "&sslrootcert=/etc/appliance/ca/ca.crt" "" (has $from.sslmode (list "verify-full" "verify-ca")) -}}
{{- printf "postgresql://%s@%s:%d/%s?sslmode=%s%s&password_file=/etc/appliance/database/password" $from.user $from.host (int $from.port) $from.name $from.sslmode $ca -}}
{{- else if eq $database.kind "inChart" -}}
{{- printf "postgresql://gateway@%s.%s.svc.%s:5432/audit?sslmode=disable&password_file=/etc/appliance/database/password" (include "appliance.postgresName" .) .Release.Namespace .Values.global.clusterDomain -}}
{{- end -}}
{{- end -}}

{{/* Listen on all addresses; NetworkPolicies restrict the clients. */}}
{{- define "appliance.anyAddress" -}}{{ ternary "::" "0.0.0.0" .Values.global.ipv6 }}{{- end -}}

{{/* The longest start of a worker, in minutes; 0 without models. */}}
{{- define "appliance.longestStart" -}}
{{- $longest := 0 -}}
{{- range (include "appliance.models" . | fromJson).models -}}
{{- $longest = max $longest (int .maxStartupMinutes) -}}
{{- end -}}
{{- $longest -}}
{{- end -}}

{{- define "appliance.gatewaySettings" -}}
{{- $values := .Values -}}
{{- $settings := deepCopy $values.settings -}}
{{- $any := include "appliance.anyAddress" . -}}
{{- $api := dict "host" $any "port" 8080 "admin_host" $any "admin_port" 8081 "drain_seconds" (int $values.gateway.drainSeconds) "stop_delay_seconds" (int $values.gateway.preStopSeconds) -}}
{{- $data := dict "directory" "/var/lib/appliance" -}}
{{- if include "appliance.controlToken" . -}}
{{- $_ := set $data "control_token_file" "/etc/appliance/control-token/token" -}}
{{- end -}}
{{- $pool := dict "urls" $values.workers.urls -}}
{{- if include "appliance.serves" . -}}
{{- $_ := set $pool "discover" (printf "http://%s.%s.svc.%s:8000" (include "appliance.workersName" .) .Release.Namespace $values.global.clusterDomain) -}}
{{- else if $values.picker.enabled -}}
{{- $_ := set $pool "discover" (include "appliance.pickedUrl" .) -}}
{{- end -}}
{{- $audit := dict -}}
{{- with include "appliance.databaseUrl" . -}}{{- $_ := set $audit "database_url" . -}}{{- end -}}
{{- with $values.keys.signingKey.existingSecret -}}
{{- $key := $values.keys.signingKey.key -}}
{{- $_ := set $audit "signing_key_file" (ternary $key (printf "/etc/appliance/signing-key/%s" $key) (hasPrefix "pkcs11:" $key)) -}}
{{- end -}}
{{- if $values.keys.payloadMasterKey.existingSecret -}}
{{- $_ := set $audit "payload_master_key_file" "/etc/appliance/payload-master-key/master.key" -}}
{{- end -}}
{{- $ours := dict "api" $api "data" $data "pool" $pool "audit" $audit -}}
{{- $_ := set $ours "recycle" (dict "start_seconds" (add (mul (include "appliance.longestStart" . | int | max 30) 60) 60)) -}}
{{- if $values.gateway.sharedFiles.existingClaim -}}
{{- $_ := set $audit "payload_keys_directory" "/var/lib/appliance-shared/payload-keys" -}}
{{- $_ := set $ours "batch" (dict "directory" "/var/lib/appliance-shared/files") -}}
{{- else if $values.gateway.persistence.filesClaim -}}
{{- $_ := set $ours "batch" (dict "directory" "/var/lib/appliance-files/files") -}}
{{- end -}}
{{- if $values.keys.forward.existingSecret -}}
{{- $_ := set $audit "forward" (dict "certificate_file" "/etc/appliance/forward/tls.crt" "key_file" "/etc/appliance/forward/tls.key") -}}
{{- end -}}
{{- if include "appliance.tlsSecret" . -}}
{{- $tls := dict "certificate_file" "/etc/appliance/tls/tls.crt" "key_file" "/etc/appliance/tls/tls.key" -}}
{{- if $values.gateway.tls.clientCaConfigMap -}}
{{- $_ := set $tls "client_ca_file" "/etc/appliance/client-ca/ca.crt" -}}
{{- end -}}
{{- $_ := set $ours "tls" $tls -}}
{{- end -}}
{{- $tenants := dict -}}
{{- if $values.keys.tenants.existingSecret -}}
{{- $_ := set $tenants "file" "/etc/appliance/tenants/tenants.yaml" -}}
{{- end -}}
{{- if $values.keys.tenantsMac.existingSecret -}}
{{- $_ := set $tenants "mac_key_file" "/etc/appliance/tenants-mac/tenants-mac.key" -}}
{{- end -}}
{{- if $tenants -}}{{- $_ := set $ours "tenants" $tenants -}}{{- end -}}
{{- if $values.oidc.jwksConfigMap -}}
{{- $_ := set $ours "oidc" (dict "jwks_file" "/etc/appliance/oidc/jwks.json") -}}
{{- end -}}
{{- with include "appliance.draftSettings" (dict "root" . "signs" true) -}}{{- $_ := set $ours "drafts" (fromYaml .) -}}{{- end -}}
{{- $_ := set $ours "log" (dict "format" "json") -}}
{{- $egress := dict "mode" "warn" -}}
{{- if and (include "appliance.serves" .) (eq $values.database.kind "sqlite") -}}
{{- $_ := set $egress "control" (get $pool "discover" | trimPrefix "http://") -}}
{{- end -}}
{{- $_ := set $ours "egress" $egress -}}
{{- /* Values computed by the chart are defaults; the schema refuses fields that the chart sets. */ -}}
{{- include "appliance.mergeInto" (dict "into" $ours "from" $settings) -}}
{{- $ours | toYaml -}}
{{- end -}}

{{/* (dict "root" $ "model" .. "pool" ..) */}}
{{- define "appliance.workerSettings" -}}
{{- $model := .model -}}
{{- $worker := dict "model" (include "appliance.weightsPath" (dict "weights" $model.target "at" "target")) "served_name" $model.name "task" $model.task -}}
{{- $_ := set $worker "host" (include "appliance.anyAddress" .root) -}}
{{- $_ := set $worker "port" 8000 -}}
{{- $_ := set $worker "device" $model.device -}}
{{- $_ := set $worker "max_startup_seconds" (mul (int $model.maxStartupMinutes) 60) -}}
{{- $_ := set $worker "drain_seconds" (int $model.drainSeconds) -}}
{{- $_ := set $worker "tensor_parallel_size" (int $model.tensorParallel) -}}
{{- $_ := set $worker "pipeline_parallel_size" (int $model.pipelineParallel) -}}
{{- $_ := set $worker "method" "none" -}}
{{- $_ := set $worker "draft" nil -}}
{{- if eq .pool "speculative" -}}
{{- $_ := set $worker "method" $model.method -}}
{{- $_ := set $worker "draft_tokens" (int $model.draftTokens) -}}
{{- $_ := set $worker "bad_draft" $model.badDraft -}}
{{- if ne $model.draft.source "none" -}}
{{- $_ := set $worker "draft" (include "appliance.weightsPath" (dict "weights" $model.draft "at" "draft")) -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.keys.scrapeToken.existingSecret -}}
{{- $_ := set $worker "scrape_token_file" "/etc/appliance/scrape-token/token" -}}
{{- end -}}
{{- include "appliance.mergeInto" (dict "into" $worker "from" $model.settings) -}}
{{- $data := dict "directory" "/var/lib/appliance" "control_token_file" "/etc/appliance/control-token/token" -}}
{{- $settings := dict "worker" $worker "data" $data "log" (dict "format" "json") -}}
{{- with include "appliance.draftSettings" (dict "root" .root "signs" false) -}}{{- $_ := set $settings "drafts" (fromYaml .) -}}{{- end -}}
{{- with .root.Values.settings.tracing -}}{{- $_ := set $settings "tracing" . -}}{{- end -}}
{{- with .root.Values.settings.sovereignty -}}
{{- if hasKey . "wall" -}}{{- $_ := set $settings "sovereignty" (dict "wall" .wall) -}}{{- end -}}
{{- end -}}
{{- $settings | toYaml -}}
{{- end -}}
