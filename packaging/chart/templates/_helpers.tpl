{{- define "delaywheel.name" -}}
{{- /* A node's id is the name of its pod, and has 31 characters at most; a service's has no dot and no digit first. */ -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]{0,28}$" .Release.Name) }}{{ fail (printf "release name %s: 29 characters at most, a letter and then a-z, 0-9 and -, since nodes and services are called as it is" .Release.Name) }}{{ end -}}
{{ .Release.Name }}
{{- end -}}

{{- define "delaywheel.selector" -}}
app.kubernetes.io/name: delaywheel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "delaywheel.labels" -}}
{{ include "delaywheel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "delaywheel.peers" -}}
{{ include "delaywheel.name" . }}-nodes.{{ .Release.Namespace }}.svc
{{- end -}}

{{- /* The secret of the nodes' certificate: a given one, or that which cert-manager makes. */ -}}
{{- define "delaywheel.tls" -}}
{{- if .Values.tls.secret }}{{ .Values.tls.secret }}{{ else if .Values.certManager.issuer }}{{ include "delaywheel.name" . }}-tls{{ end -}}
{{- end -}}

{{- define "delaywheel.members" -}}
{{- $members := dict -}}
{{- range $n := until (int .Values.nodes) -}}
{{- $node := printf "%s-%d" (include "delaywheel.name" $) $n -}}
{{- $_ := set $members $node (printf "%s.%s:7421" $node (include "delaywheel.peers" $)) -}}
{{- end -}}
{{- toJson $members -}}
{{- end -}}

{{- /* What pods of nodes and of the page have alike. */ -}}
{{- define "delaywheel.pod" -}}
automountServiceAccountToken: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "delaywheel.container" -}}
image: "{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with .Values.kafka.secret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}

{{- /* What no schema can say: two values, or the beginning of a name. */ -}}
{{- define "delaywheel.check" -}}
{{- range .Values.extraEnv -}}
{{- if and (hasPrefix "DELAYWHEEL_" .name) (not (hasPrefix "DELAYWHEEL_KAFKA__" .name)) -}}
{{- fail (printf "extraEnv %s: a setting is settings.%s" .name (trimPrefix "DELAYWHEEL_" .name | lower)) -}}
{{- end -}}
{{- end -}}
{{- if gt (int (default 0 .Values.settings.min_insync)) (int .Values.nodes) -}}
{{- fail (printf "settings.min_insync %v: there are %v nodes" .Values.settings.min_insync .Values.nodes) -}}
{{- end -}}
{{- $given := merge (dict) .Values.settings (dict "max_message_bytes" 1000000 "max_request_bytes" 16777216 "transaction_bytes" 16777216 "max_caller_in_flight_bytes" 33554432 "max_in_flight_bytes" 134217728 "span_seconds" 604800 "late_window_seconds" 120) -}}
{{- range list (list "max_message_bytes" "max_request_bytes") (list "max_message_bytes" "transaction_bytes") (list "max_request_bytes" "max_caller_in_flight_bytes") (list "max_caller_in_flight_bytes" "max_in_flight_bytes") -}}
{{- if gt (int64 (get $given (first .))) (int64 (get $given (last .))) -}}
{{- fail (printf "settings.%s: it is above %s" (first .) (last .)) -}}
{{- end -}}
{{- end -}}
{{- $kept := int64 (default 0 $given.ledger_retention_hours) -}}
{{- $needed := add 24 (div (add $given.span_seconds $given.late_window_seconds 3599) 3600) -}}
{{- if and $kept (lt $kept $needed) -}}
{{- fail (printf "settings.ledger_retention_hours %d: at least %d, by span_seconds and late_window_seconds, or 0" $kept $needed) -}}
{{- end -}}
{{- if hasPrefix "dw-" (default "" $given.ttl_header) -}}
{{- fail (printf "settings.ttl_header %s: no message can have a header of this name" $given.ttl_header) -}}
{{- end -}}
{{- $ingress := printf "delaywheel-%s-ingress" .Values.cluster -}}
{{- range $topic := $given.ingress_topics -}}
{{- if or (not (regexMatch "^[a-zA-Z0-9._-]{1,249}$" $topic)) (has $topic (list "." "..")) -}}
{{- fail (printf "settings.ingress_topics %s: no name of a topic" $topic) -}}
{{- end -}}
{{- if regexMatch (printf "^delaywheel-%s-(control|outcomes|dead|halves)$" $.Values.cluster) $topic -}}
{{- fail (printf "settings.ingress_topics %s: the service's own" $topic) -}}
{{- end -}}
{{- end -}}
{{- $is_on := ne (toString $given.ingress) "false" -}}
{{- if and $given.halves (or (not $is_on) (hasKey (default dict $given.ingress_destinations) $ingress)) -}}
{{- fail (printf "settings.halves: they come through %s, which has to be on, and to lead anywhere" $ingress) -}}
{{- end -}}
{{- range $topic, $_ := $given.ingress_destinations -}}
{{- if not (or (has $topic (default list $given.ingress_topics)) (and $is_on (eq $topic $ingress))) -}}
{{- fail (printf "settings.ingress_destinations.%s: no ingress topic" $topic) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.settings.insecure) (not (and (include "delaywheel.tls" .) .Values.access.secret)) -}}
{{- fail "settings.insecure: without tls.secret (or certManager.issuer) and access.secret whoever reaches the nodes may do everything; true says that this is meant" -}}
{{- end -}}
{{- end -}}
