{{/* Values that are valid one by one and make no sense together. */}}
{{- define "shoal.validate" -}}
{{- include "shoal.validateWhatIsServed" . }}
{{- $engines := include "shoal.engines" . | int }}
{{- $gpus := include "shoal.gpus" . | int }}
{{- if and $gpus (gt $engines $gpus) }}
{{- fail (printf "node.engines is %d: a pod has only %d GPUs" $engines $gpus) }}
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
{{- if and .open (or .apiKeys (and .existingSecret.name .existingSecret.apiKeys)) }}
{{- fail "auth.open: there are API keys: take them out, or auth.open" }}
{{- end }}
{{- if and .existingSecret.name (not .existingSecret.apiKeys) (not .open) }}
{{- fail "auth.existingSecret.apiKeys: name the key with the API keys, or add --set auth.open=true" }}
{{- end }}
{{- end }}
{{- include "shoal.validateRoutes" . }}
{{- include "shoal.validateScaling" . }}
{{- end }}

{{- define "shoal.validateWhatIsServed" -}}
{{- if .Values.demo }}
{{- if .Values.model.name }}
{{- fail (printf "demo: it serves the demo model: take out demo, or model.name (%s)" .Values.model.name) }}
{{- end }}
{{- else if not (and .Values.model.name .Values.image.repository) }}
{{- $missing := list }}
{{- if not .Values.image.repository }}{{ $missing = append $missing "--set image.repository=REGISTRY/shoal" }}{{ end }}
{{- if not .Values.model.name }}{{ $missing = append $missing "--set model.name=MODEL" }}{{ end }}
{{- fail (printf "say what to serve with which image: add %s, or --set demo=true for the demo on a CPU" (join " " $missing)) }}
{{- end }}
{{- end }}

{{- define "shoal.validateRoutes" -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.hosts: name the host: --set 'ingress.hosts[0]=llm.example.com'" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: name the gateway: --set 'httpRoute.parentRefs[0].name=GATEWAY'" }}
{{- end }}
{{- end }}

{{- define "shoal.validateScaling" -}}
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
