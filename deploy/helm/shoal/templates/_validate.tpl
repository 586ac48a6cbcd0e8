{{/* Values that are valid one by one and make no sense together. */}}
{{- define "shoal.validate" -}}
{{- $engines := include "shoal.engines" . | int }}
{{- if and .Values.node.gpus (gt $engines (int .Values.node.gpus)) }}
{{- fail (printf "node.engines is %d: a pod has only %d GPUs" $engines (int .Values.node.gpus)) }}
{{- end }}
{{- if gt (include "shoal.maxGroup" . | int) $engines }}
{{- fail (printf "node.maxGroup is %d: a pod has only %d engines" (int .Values.node.maxGroup) $engines) }}
{{- end }}
{{- with .Values.model.weights }}
{{- if and (eq .from "claim") (not .claim) }}
{{- fail "model.weights.claim: name the PersistentVolumeClaim" }}
{{- end }}
{{- if and (eq .from "hostPath") (not .hostPath) }}
{{- fail "model.weights.hostPath: name the directory" }}
{{- end }}
{{- end }}
{{- with .Values.cache }}
{{- if and (eq .from "claim") (not .claim) }}
{{- fail "cache.claim: name the PersistentVolumeClaim" }}
{{- end }}
{{- if and (eq .from "hostPath") (not .hostPath) }}
{{- fail "cache.hostPath: name the directory" }}
{{- end }}
{{- end }}
{{- with .Values.auth }}
{{- if and .existingSecret.name (or .apiKeys .adminKeys) }}
{{- fail "auth: give either existingSecret or keys" }}
{{- end }}
{{- end }}
{{- include "shoal.validateMetrics" . }}
{{- end }}

{{- define "shoal.validateMetrics" -}}
{{- $monitor := .Values.metrics.serviceMonitor }}
{{- if eq .Values.metrics.access "none" }}
{{- if $monitor.enabled }}
{{- fail "metrics.access is none: a ServiceMonitor has nothing to read" }}
{{- end }}
{{- if ne .Values.autoscaling.by "none" }}
{{- fail "metrics.access is none: an autoscaler has nothing to go by" }}
{{- end }}
{{- end }}
{{- if and $monitor.enabled (eq .Values.metrics.access "key") (include "shoal.apiKeys" .) (not $monitor.keySecret.name) }}
{{- fail "metrics.access is key: name the Secret with Prometheus' API key in metrics.serviceMonitor.keySecret" }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "autoscaling.minReplicas is %d: maxReplicas is only %d" (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- if and (eq .by "keda") (not .prometheus) }}
{{- fail "autoscaling.prometheus: KEDA needs the address of Prometheus" }}
{{- end }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) }}
{{- fail "inferencePool.endpointPicker.name: name the Service of the endpoint picker" }}
{{- end }}
{{- end }}
