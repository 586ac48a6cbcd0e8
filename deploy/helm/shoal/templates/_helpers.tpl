{{- define "shoal.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Short enough for what is added to it: the name of a pod must be a host name. */}}
{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "shoal.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "shoal.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The Service that names every pod, and that Prometheus reads. */}}
{{- define "shoal.nodesService" -}}
{{- printf "%s-nodes" (include "shoal.fullname" .) }}
{{- end }}

{{- define "shoal.selectorLabels" -}}
app.kubernetes.io/name: {{ include "shoal.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "shoal.labels" -}}
{{ include "shoal.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "shoal.chart" . }}
{{- end }}

{{- define "shoal.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "shoal.image" -}}
{{- $tag := .Values.image.tag | default (ternary "cpu" .Chart.AppVersion .Values.demo) -}}
{{- $image := printf "%s:%s" (.Values.image.repository | default "shoal") $tag -}}
{{- with .Values.image.digest -}}
{{ $image }}@{{ . }}
{{- else -}}
{{ $image }}
{{- end -}}
{{- end }}

{{/* What the demo has in place of a value: little, and nothing that lasts. */}}
{{- define "shoal.gpus" -}}
{{- ternary 0 .Values.node.gpus .Values.demo -}}
{{- end }}

{{- define "shoal.cacheFrom" -}}
{{- ternary "emptyDir" .Values.cache.from .Values.demo -}}
{{- end }}

{{- define "shoal.cacheSize" -}}
{{- ternary "2Gi" .Values.cache.size .Values.demo -}}
{{- end }}

{{- define "shoal.memory" -}}
{{- ternary "4Gi" .Values.resources.memory .Values.demo -}}
{{- end }}

{{- define "shoal.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "shoal.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- define "shoal.engines" -}}
{{- .Values.node.engines | default (include "shoal.gpus" . | int) | default 2 -}}
{{- end }}

{{- define "shoal.maxGroup" -}}
{{- .Values.node.maxGroup | default (include "shoal.engines" .) -}}
{{- end }}

{{/* Every engine is a member of one group of each size, with a communicator of its own. */}}
{{- define "shoal.sharedMemoryMiB" -}}
{{- $degrees := get (dict "1" 0 "2" 1 "4" 2 "8" 3) (include "shoal.maxGroup" .) -}}
{{- $members := mul (include "shoal.engines" .) $degrees -}}
{{- add .Values.resources.sharedMemoryMiB (mul $members .Values.resources.sharedMemoryPerMemberMiB) -}}
{{- end }}

{{- define "shoal.cpu" -}}
{{- .Values.resources.cpu | default (ternary 2 (add 2 (mul 2 (include "shoal.engines" .))) .Values.demo) -}}
{{- end }}

{{/* preStop, then `--shutdown-timeout`, then what engines and controller may take, and some to spare. */}}
{{- define "shoal.graceSeconds" -}}
{{- add .Values.preStopSeconds .Values.node.shutdownSeconds 30 -}}
{{- end }}

{{/* Not empty if the chart makes the API keys itself. */}}
{{- define "shoal.makesKeys" -}}
{{- with .Values.auth -}}
{{- if not (or .open .apiKeys .existingSecret.name) -}}
true
{{- end -}}
{{- end -}}
{{- end }}

{{/* A Secret with keys that the chart made has another name than one with keys of the values: what it
holds is read again at an upgrade, and must not be keys that were taken out of the values. */}}
{{- define "shoal.keysSecret" -}}
{{- if .Values.auth.existingSecret.name -}}
{{ .Values.auth.existingSecret.name }}
{{- else if include "shoal.makesKeys" . -}}
{{ include "shoal.fullname" . }}-made-keys
{{- else if or .Values.auth.apiKeys .Values.auth.adminKeys -}}
{{ include "shoal.fullname" . }}-keys
{{- end -}}
{{- end }}

{{/* Key of that Secret with the API keys; empty if there are none. */}}
{{- define "shoal.apiKeys" -}}
{{- if .Values.auth.existingSecret.name -}}
{{ .Values.auth.existingSecret.apiKeys }}
{{- else if or .Values.auth.apiKeys (include "shoal.makesKeys" .) -}}
api-keys.json
{{- end -}}
{{- end }}

{{- define "shoal.adminKeys" -}}
{{- if .Values.auth.existingSecret.name -}}
{{ .Values.auth.existingSecret.adminKeys }}
{{- else if or .Values.auth.adminKeys (include "shoal.makesKeys" .) -}}
admin-keys.json
{{- end -}}
{{- end }}

{{/* Not empty if there is an admin API: there is none with API keys and without admin keys. */}}
{{- define "shoal.hasAdmin" -}}
{{- if or (include "shoal.adminKeys" .) (not (include "shoal.apiKeys" .)) -}}
true
{{- end -}}
{{- end }}

{{/* A node takes minutes to start: nodes go slower than they come. */}}
{{- define "shoal.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 30
  policies:
    - {type: Pods, value: 2, periodSeconds: 60}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 300}
{{- end }}
