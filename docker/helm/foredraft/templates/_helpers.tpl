{{- define "foredraft.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "foredraft.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "foredraft.labels" -}}
{{ include "foredraft.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "foredraft.secret" -}}
{{ .Values.secret.existing | default (include "foredraft.name" .) }}
{{- end }}

{{/* The used entries of the Secret, with a comma before and after each. */}}
{{- define "foredraft.entries" -}}
{{- $entries := ternary .Values.secret.entries (keys .Values.secret.create | sortAlpha) (ne .Values.secret.existing "") -}}
,{{ join "," $entries }},
{{- end }}

{{- define "foredraft.claim" -}}
accessModes: [{{ .Values.cache.accessMode }}]
{{- with .Values.cache.storageClass }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.cache.size | quote }}
{{- end }}
