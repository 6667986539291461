{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Of (root, env): what every container of the program has. */}}
{{- define "reconciler.container" -}}
{{- with .root.Values.image -}}
image: {{ printf "%s%s" .repository (.digest | empty | ternary (printf ":%s" (.tag | default $.root.Chart.AppVersion)) (printf "@%s" .digest)) | quote }}
imagePullPolicy: {{ .pullPolicy }}
{{- end }}
env:
  {{- $env := dict "RECONCILER_CONFIG" "/etc/esp-reconciler/reconciler.toml" }}
  {{- range $given := list .root.Values.env .env }}
    {{- range $name, $value := $given }}{{ $_ := set $env $name $value }}{{ end }}
  {{- end }}
  {{- /* Kubernetes puts $(NAME) into a text only where NAME stands before it. */}}
  {{- range $isFrom := list true false }}
  {{- range $name, $value := $env }}
  {{- if eq $isFrom (kindIs "map" $value) }}
  - name: {{ $name | quote }}
    {{- if $isFrom }}
    valueFrom: {{- toYaml $value | nindent 6 }}
    {{- else }}
    value: {{ $value | quote }}
    {{- end }}
  {{- end }}
  {{- end }}
  {{- end }}
{{- with .root.Values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .root.Values.securityContext | nindent 2 }}
volumeMounts:
  - name: settings
    mountPath: /etc/esp-reconciler
    readOnly: true
  - name: secrets
    mountPath: /run/secrets/esp-reconciler
    readOnly: true
  - name: data
    mountPath: {{ include "reconciler.inForce" (dict "root" .root "env" .env "variable" "RECONCILER_DATABASE__DATA_DIR" "value" .root.Values.settings.database.data_dir) | quote }}
  - name: tmp
    mountPath: /tmp
  {{- with .root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Of (root, settings, secret, data): the volumes of those mounts. `secret` is the one that the release itself has. */}}
{{- define "reconciler.volumes" -}}
- name: settings
  configMap:
    name: {{ .settings | quote }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      {{- range .root.Values.secrets.existing }}
      - secret: {{- toYaml . | nindent 10 }}
      {{- end }}
      {{- if or .root.Values.secrets.external.enabled (not .root.Values.secrets.existing) }}
      - secret:
          name: {{ .secret | quote }}
      {{- end }}
- name: data
  {{- toYaml (.data | default (dict "emptyDir" (dict))) | nindent 2 }}
- name: tmp
  emptyDir: {}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of (root, serviceAccount, own): what every pod has, and where it may run. */}}
{{- define "reconciler.podSpec" -}}
serviceAccountName: {{ .serviceAccount | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Of (root, component). */}}
{{- define "reconciler.deployment" -}}
{{- $own := index .root.Values .component }}
{{- $full := include "reconciler.fullname" .root }}
{{- $container := include "reconciler.container" (dict "root" .root "env" $own.env) }}
{{- $least := add .root.Values.preStopSeconds 40 }}
{{- if lt (int .root.Values.terminationGracePeriodSeconds) (int $least) }}
  {{- fail (printf "terminationGracePeriodSeconds is too short for work under way to end: set it to %d or more" $least) }}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $full }}-{{ .component }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels: {{- include "reconciler.labels" . | nindent 4 }}
  {{- with $own.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if not (dig "autoscaling" "enabled" false $own) }}
  replicas: {{ int64 $own.replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  strategy:
    rollingUpdate:
      {{- /* A claim that one node at a time may mount has to be let go of first. */}}
      {{- $first := hasKey ($own.dataVolume | default dict) "persistentVolumeClaim" }}
      maxSurge: {{ $first | ternary 0 1 }}
      maxUnavailable: {{ $first | ternary 1 0 }}
  selector:
    matchLabels: {{- include "reconciler.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "reconciler.labels" (dict "root" .root "component" .component "own" $own.podLabels) | nindent 8 }}
      {{- $checksum := dict "checksum/settings" (include "reconciler.settingsFile" .root | sha256sum) }}
      annotations: {{- toYaml (merge $checksum ($own.podAnnotations | default dict)) | nindent 8 }}
    spec:
      {{- include "reconciler.podSpec" (dict "root" .root "own" $own "serviceAccount" (include "reconciler.serviceAccount" .root)) | nindent 6 }}
      terminationGracePeriodSeconds: {{ int64 .root.Values.terminationGracePeriodSeconds }}
      {{- if or .root.Values.migrate.check .root.Values.extraInitContainers }}
      initContainers:
        {{- with .root.Values.extraInitContainers }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if .root.Values.migrate.check }}
        - name: schema
          args: [migrate, --check]
          {{- $container | nindent 10 }}
          resources: {{- toYaml .root.Values.migrate.resources | nindent 12 }}
        {{- end }}
      {{- end }}
      containers:
        - name: {{ .component }}
          args: [serve{{ if .root.Values.split }}, --only, {{ .component }}{{ end }}]
          {{- $container | nindent 10 }}
          resources: {{- toYaml $own.resources | nindent 12 }}
          ports:
            - name: http
              containerPort: {{ include "reconciler.inForce" (dict "root" .root "env" $own.env "variable" "RECONCILER_RECEIVER__PORT" "value" .root.Values.settings.receiver.port) }}
          startupProbe:
            httpGet: {path: /healthz, port: http}
            {{- toYaml .root.Values.probes.startup | nindent 12 }}
          livenessProbe:
            httpGet: {path: /healthz, port: http}
            {{- toYaml .root.Values.probes.liveness | nindent 12 }}
          readinessProbe:
            httpGet: {path: /readyz, port: http}
            {{- toYaml .root.Values.probes.readiness | nindent 12 }}
          {{- if .root.Values.preStopSeconds }}
          lifecycle:
            preStop:
              exec:
                command: [sleep, {{ int64 .root.Values.preStopSeconds | quote }}]
          {{- end }}
      volumes: {{- include "reconciler.volumes" (dict "root" .root "settings" $full "secret" $full "data" $own.dataVolume) | nindent 8 }}
      {{- if .root.Values.topologySpread.keys }}
      topologySpreadConstraints:
        {{- range .root.Values.topologySpread.keys }}
        - topologyKey: {{ . | quote }}
          maxSkew: 1
          whenUnsatisfiable: {{ $.root.Values.topologySpread.whenUnsatisfiable }}
          labelSelector:
            matchLabels: {{- include "reconciler.selector" $ | nindent 14 }}
          matchLabelKeys: [pod-template-hash]
        {{- end }}
      {{- end }}
{{- end }}
