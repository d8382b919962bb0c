{{- define "kvcast.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvcast.labels" -}}
app.kubernetes.io/name: kvcast
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end -}}

{{- define "kvcast.selector" -}}
app.kubernetes.io/name: kvcast
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "kvcast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvcast.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* How a part is protected: a folder of certificates, or the word of who installs it. */ -}}
{{- define "kvcast.protection" -}}
{{- if .secret -}}
tls = "/etc/kvcast/tls"
{{- else if .root.Values.insecure -}}
insecure = true
{{- else -}}
{{- fail (printf "tls.%s: name a Secret, or say insecure: true" .key) -}}
{{- end -}}
{{- end -}}

{{- /* Further keys of a TOML file; strings, numbers, booleans and lists are JSON there, too. */ -}}
{{- define "kvcast.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ $value | toJson }}
{{- end -}}
{{- end -}}
