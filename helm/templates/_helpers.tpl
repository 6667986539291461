{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "reconciler.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Leaves room for the longest suffix. */}}
{{- define "reconciler.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The Deployments, parted by a blank. */}}
{{- define "reconciler.components" -}}
{{ .Values.split | ternary "receiver reconciler" "receiver" }}
{{- end }}

{{/* Of (root, component): what selects pods, and never changes. */}}
{{- define "reconciler.selector" -}}
app.kubernetes.io/name: {{ include "reconciler.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Of (root, component). */}}
{{- define "reconciler.labels" -}}
{{ include "reconciler.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of (root, weight): what makes an object of the migration, which comes before all others and leaves nothing behind. */}}
{{- define "reconciler.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "reconciler.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "reconciler.fullname" .) "default") }}
{{- end }}

{{/* The Service that leads to the passes, the API and the pages. */}}
{{- define "reconciler.apiService" -}}
{{ include "reconciler.fullname" . }}-{{ .Values.split | ternary "reconciler" "receiver" }}
{{- end }}

{{- define "reconciler.settingsFile" -}}
reconciler.toml: |
  {{- toToml .Values.settings | nindent 2 }}
{{- end }}

{{/* Of (place, value): stops where a ConfigMap would hold a secret. */}}
{{- define "reconciler.refuseSecrets" -}}
{{- $place := .place }}
{{- if kindIs "map" .value }}
  {{- range $key, $value := .value }}
    {{- include "reconciler.refuseSecrets" (dict "place" (printf "%s.%s" $place $key) "value" $value) }}
  {{- end }}
{{- else if kindIs "slice" .value }}
  {{- range .value }}{{ include "reconciler.refuseSecrets" (dict "place" $place "value" .) }}{{ end }}
{{- else if not (regexMatch "^(file|env):" (toString .value)) }}
  {{- $named := regexMatch "[._](secrets?|key|password|token)$" $place }}
  {{- if or $named (regexMatch "^[a-z0-9+]+://[^/?#]*:.*@" (toString .value)) }}
    {{- fail (printf "%s holds a secret, and settings lie in a ConfigMap: put it into the Secret of secrets.existing or secrets.external and write file:/run/secrets/esp-reconciler/KEY" $place) }}
  {{- end }}
{{- end }}
{{- end }}
