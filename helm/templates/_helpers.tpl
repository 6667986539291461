{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "reconciler.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Leaves room for the longest suffix. Services take less than other objects: no dot, and a letter first. */}}
{{- define "reconciler.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- $full = .Values.fullnameOverride | default $full | replace "." "-" | trunc 50 | trimAll "-" }}
{{- if not (regexMatch "^[a-z]" $full) }}
  {{- fail (printf "a Service's name begins with a letter, and %s doesn't: set fullnameOverride" $full) }}
{{- end }}
{{- $full }}
{{- end }}

{{/* The Deployments, parted by a blank. */}}
{{- define "reconciler.components" -}}
{{ .Values.split | ternary "receiver reconciler" "receiver" }}
{{- end }}

{{/* Of (root, component): what selects pods, and never changes. */}}
{{- define "reconciler.selector" -}}
app.kubernetes.io/name: {{ include "reconciler.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Of (root, component, own): an object's own labels win over those of every object. */}}
{{- define "reconciler.labels" -}}
{{ include "reconciler.selector" . }}
app.kubernetes.io/version: {{ include "reconciler.labelText" (.root.Values.image.tag | default .root.Chart.AppVersion) }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ include "reconciler.labelText" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) }}
{{- with merge (dict) (.own | default dict) (.root.Values.commonLabels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What of a text may be a label's value: a tag may be longer, and end in what a label may not. */}}
{{- define "reconciler.labelText" -}}
{{ regexReplaceAll "[^A-Za-z0-9_.-]" . "_" | trunc 63 | trimAll "-_." | quote }}
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

{{/* Of (root, env, variable, value): a setting that pods depend on, where an environment says otherwise. */}}
{{- define "reconciler.inForce" -}}
{{- $common := index (.root.Values.env | default dict) .variable }}
{{- $own := index (.env | default dict) .variable | default $common }}
{{- kindIs "string" $own | ternary $own .value }}
{{- end }}

{{/* Of (place, value): stops where a secret would lie open, in a ConfigMap or a Deployment. */}}
{{- define "reconciler.refuseSecrets" -}}
{{- $place := .place }}
{{- if kindIs "map" .value }}
  {{- range $key, $value := .value }}
    {{- include "reconciler.refuseSecrets" (dict "place" (printf "%s.%s" $place $key) "value" $value) }}
  {{- end }}
{{- else if kindIs "slice" .value }}
  {{- range .value }}{{ include "reconciler.refuseSecrets" (dict "place" $place "value" .) }}{{ end }}
{{- else if and .value (not (regexMatch "^(file|env):" (toString .value))) }}
  {{- $named := regexMatch "(?i)[._](secrets?|key|password|token)$" $place }}
  {{- $text := regexReplaceAll "\\$\\([^)]*\\)" (toString .value) "" }}
  {{- if or (and $named $text) (regexMatch "^[a-z0-9+]+://[^/?#]*:.+@" $text) }}
    {{- fail (printf "%s holds a secret, and whoever may look at the cluster's objects would see it: put it into the Secret of secrets.existing or secrets.external and write file:/run/secrets/esp-reconciler/KEY" $place) }}
  {{- end }}
{{- end }}
{{- end }}
