{{/* The container's arguments: `shoal` is the image's entry point. */}}
{{- define "shoal.args" -}}
- serve
{{- with .Values.model.name }}
- {{ . | quote }}
{{- end }}
{{- with .Values.model.servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- --host=0.0.0.0
- --port=8000
- --engines={{ include "shoal.engines" . }}
- --max-group={{ include "shoal.maxGroup" . }}
- {{ printf "--policy=%s" .Values.node.policy | quote }}
- --shutdown-timeout={{ .Values.node.shutdownSeconds }}
- --log-format=json
- --metrics-port={{ .Values.metrics.port }}
- --metrics={{ eq .Values.metrics.access "none" | ternary "off" .Values.metrics.access }}
# On 127.0.0.1 of the pod, where `kubectl port-forward` and `kubectl exec` reach it.
- --admin-port={{ ternary "8001" "off" (not (empty (include "shoal.hasAdmin" .))) }}
{{- with include "shoal.apiKeys" . }}
- {{ printf "--api-key-file=/etc/shoal/keys/%s" . | quote }}
{{- end }}
{{- with include "shoal.adminKeys" . }}
- {{ printf "--admin-key-file=/etc/shoal/keys/%s" . | quote }}
{{- end }}
{{- if .Values.batch.enabled }}
- --batch-dir=/var/lib/shoal/batches
{{- end }}
{{- range .Values.node.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "shoal.env" -}}
{{- with .Values.model.hubToken }}
{{- if .secret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- with .Values.node.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "shoal.resources" -}}
requests:
  cpu: {{ include "shoal.cpu" . | quote }}
  memory: {{ include "shoal.memory" . }}
  {{- if include "shoal.gpus" . | int }}
  {{ .Values.resources.gpu }}: {{ include "shoal.gpus" . }}
  {{- end }}
limits:
  {{- if .Values.resources.limitCpu }}
  cpu: {{ include "shoal.cpu" . | quote }}
  {{- end }}
  memory: {{ include "shoal.memory" . }}
  {{- if include "shoal.gpus" . | int }}
  {{ .Values.resources.gpu }}: {{ include "shoal.gpus" . }}
  {{- end }}
{{- end }}

{{/* The root file system is read-only: all that is written goes to these, as the image has it. */}}
{{- define "shoal.volumeMounts" -}}
- {name: cache, mountPath: /var/cache/shoal}
{{- if .Values.batch.enabled }}
- {name: batches, mountPath: /var/lib/shoal}
{{- end }}
- {name: tmp, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- if ne .Values.model.weights.from "none" }}
- {name: weights, mountPath: {{ .Values.model.weights.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if include "shoal.keysSecret" . }}
- {name: keys, mountPath: /etc/shoal/keys, readOnly: true}
{{- end }}
{{- if .Values.node.files }}
- {name: files, mountPath: /etc/shoal/files, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "shoal.volumes" -}}
# Temporary files, and the private directory of the node's sockets.
- name: tmp
  emptyDir: {sizeLimit: 10Gi}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ include "shoal.sharedMemoryMiB" . }}Mi}
{{- $from := include "shoal.cacheFrom" . }}
{{- if eq $from "claim" }}
- name: cache
  persistentVolumeClaim: {claimName: {{ .Values.cache.claim }}}
{{- else if eq $from "hostPath" }}
- name: cache
  hostPath: {path: {{ .Values.cache.hostPath | quote }}, type: DirectoryOrCreate}
{{- else if eq $from "emptyDir" }}
- name: cache
  emptyDir: {sizeLimit: {{ include "shoal.cacheSize" . }}}
{{- end }}
{{- with .Values.model.weights }}
{{- if eq .from "claim" }}
- name: weights
  persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: true}
{{- else if eq .from "hostPath" }}
- name: weights
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
{{- end }}
{{- end }}
{{- with include "shoal.keysSecret" . }}
- name: keys
  # Not world-readable. A change reaches the node without a restart.
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if .Values.node.files }}
- name: files
  configMap: {name: {{ include "shoal.fullname" . }}-files}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
