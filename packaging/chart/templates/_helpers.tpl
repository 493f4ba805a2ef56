{{- define "delaywheel.name" -}}
{{- /* A node's id is the name of its pod, and has 31 characters at most. */ -}}
{{- if gt (len .Release.Name) 29 }}{{ fail (printf "release name %s: 29 characters at most, since a node is called as its pod" .Release.Name) }}{{ end -}}
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

{{- /* What no schema can say, since it is about two values. */ -}}
{{- define "delaywheel.check" -}}
{{- if gt (int (default 0 .Values.settings.min_insync)) (int .Values.nodes) -}}
{{- fail (printf "settings.min_insync %v: there are %v nodes" .Values.settings.min_insync .Values.nodes) -}}
{{- end -}}
{{- if and (not .Values.settings.insecure) (not (and (include "delaywheel.tls" .) .Values.access.secret)) -}}
{{- fail "settings.insecure: without tls.secret (or certManager.issuer) and access.secret whoever reaches the nodes may do everything; true says that this is meant" -}}
{{- end -}}
{{- end -}}
