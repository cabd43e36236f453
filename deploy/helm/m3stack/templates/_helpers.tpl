{{- define "m3stack.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* what all names begin with: a label of a Service's name, and so short that the longest name of a
StatefulSet, FULLNAME-worker-prefill, leaves room in 63 characters for the hash of its revision */}}
{{- define "m3stack.fullname" -}}
{{- $name := include "m3stack.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- end -}}
{{- $full = $full | replace "." "-" | trunc 36 | trimAll "-" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $full) -}}
{{- fail (printf "%s cannot begin the name of a Service, which starts with a letter: set fullnameOverride" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* labels of one part; call with (list $ "gateway") */}}
{{- define "m3stack.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "m3stack.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- end -}}

{{/* each name stands once: the operator's labels go before the chart's, but for those that select */}}
{{- define "m3stack.labels" -}}
{{- $root := index . 0 -}}
{{- $own := dict
  "app.kubernetes.io/version" ($root.Chart.AppVersion | replace "+" "_")
  "app.kubernetes.io/managed-by" $root.Release.Service
  "app.kubernetes.io/part-of" "m3stack"
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
-}}
{{- $selects := include "m3stack.selector" . | fromYaml -}}
{{ merge $selects (deepCopy $root.Values.commonLabels) $own | toYaml }}
{{- end -}}

{{/* annotations of a pod: the configuration it was started with, and the operator's own */}}
{{- define "m3stack.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $config := include (print $root.Template.BasePath "/" $part "/configmap.yaml") $root -}}
{{ merge (dict "checksum/config" (sha256sum $config)) (deepCopy (get $root.Values $part).podAnnotations) | toYaml }}
{{- end -}}

{{/* a part's environment, as a YAML list; call with (list OWN EXTRA): a name that the operator sets
stands once, with the operator's value */}}
{{- define "m3stack.env" -}}
{{- $extra := index . 1 -}}
{{- $named := list -}}
{{- range $extra }}{{ $named = append $named .name }}{{ end -}}
{{- $all := list -}}
{{- range index . 0 }}{{ if not (has .name $named) }}{{ $all = append $all . }}{{ end }}{{ end -}}
{{ concat $all $extra | toYaml }}
{{- end -}}

{{/* refuses settings that would contradict what else the chart writes; call with
(list WHERE SETTINGS (dict NAME VALUE-TO-SET-INSTEAD)) */}}
{{- define "m3stack.refuseSettings" -}}
{{- $where := index . 0 -}}
{{- $settings := index . 1 -}}
{{- range $name, $instead := index . 2 -}}
{{- if hasKey $settings $name -}}
{{- fail (printf "%s.%s: the chart sets this, with other things that must agree: use %s" $where $name $instead) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* refuses bounds that are none; call with (list WHERE AUTOSCALING) */}}
{{- define "m3stack.checkBounds" -}}
{{- $scaling := index . 1 -}}
{{- if gt (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas) -}}
{{- fail (printf "%s: minReplicas is %d, above maxReplicas, which is %d" (index . 0) (int64 $scaling.minReplicas) (int64 $scaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{/* an address to listen at; call with (list $ PORT) */}}
{{- define "m3stack.listen" -}}
{{- $address := (index . 0).Values.listenAddress -}}
{{- contains ":" $address | ternary (printf "[%s]" $address) $address }}:{{ index . 1 }}
{{- end -}}

{{- define "m3stack.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest | quote }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) | quote }}
{{- end -}}
{{- end -}}

{{- define "m3stack.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "m3stack.fullname" .) .Values.serviceAccount.name | quote }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name | quote }}
{{- end -}}
{{- end -}}

{{/* one TOML value; whole numbers come out of YAML as floats and must not be written as such */}}
{{- define "m3stack.toml.value" -}}
{{- if kindIs "slice" . -}}
[{{ range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "m3stack.toml.value" $item }}{{ end }}]
{{- else if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ printf "%.0f" . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- else if or (kindIs "bool" .) (kindIs "int" .) (kindIs "int64" .) -}}
{{ . }}
{{- else -}}
{{ fail (printf "settings take strings, numbers, booleans and lists of them, not %v" .) }}
{{- end -}}
{{- end -}}

{{- define "m3stack.toml.table" -}}
{{- range $key := keys . | sortAlpha }}
{{ $key }} = {{ include "m3stack.toml.value" (get $ $key) }}
{{- end }}
{{- end -}}

{{/* where the gateway finds workers, as a JSON list */}}
{{- define "m3stack.workerAddresses" -}}
{{- $name := printf "%s-worker" (include "m3stack.fullname" .) -}}
{{- $service := printf "%s.%s.svc" $name .Release.Namespace -}}
{{- if eq .Values.discovery "kubernetes" -}}
{{ list (printf "k8s://%s/%s:grpc" .Release.Namespace $name) | toJson }}
{{- else if eq .Values.discovery "dns" -}}
{{ list (printf "dns://%s:%v" $service .Values.worker.port) | toJson }}
{{- else -}}
{{- $scheme := ternary "https" "http" (ne .Values.worker.tls.existingSecret "") -}}
{{- $hosts := list -}}
{{- range $index := until (int (include "m3stack.maxWorkers" .)) -}}
{{- $hosts = append $hosts (printf "%s://%s-%d.%s:%v" $scheme $name $index $service $.Values.worker.port) -}}
{{- end -}}
{{ toJson $hosts }}
{{- end -}}
{{- end -}}

{{- define "m3stack.maxWorkers" -}}
{{- if .Values.worker.autoscaling.enabled -}}
{{ .Values.worker.autoscaling.maxReplicas }}
{{- else -}}
{{ .Values.worker.replicas }}
{{- end -}}
{{- end -}}

{{/* the volume that holds the checkpoint */}}
{{- define "m3stack.modelVolume" -}}
{{- $made := and .Values.model.claim.create (printf "%s-model" (include "m3stack.fullname" .)) -}}
- name: model
{{- if .Values.model.volume }}
  {{- toYaml .Values.model.volume | nindent 2 }}
{{- else if or .Values.model.existingClaim $made }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.existingClaim | default $made | quote }}
{{- else }}
  {{- fail "say where the model is: model.existingClaim, model.claim.create or model.volume" }}
{{- end }}
{{- end -}}

{{/* labels of the pods of a part, the operator's own included */}}
{{- define "m3stack.podLabels" -}}
{{- $selects := include "m3stack.selector" . | fromYaml -}}
{{- $labels := include "m3stack.labels" . | fromYaml -}}
{{ merge $selects (deepCopy (get (index . 0).Values (index . 1)).podLabels) $labels | toYaml }}
{{- end -}}

{{/* what a pod of either part shares */}}
{{- define "m3stack.podBasics" -}}
{{- $root := index . 0 -}}
{{- $part := get $root.Values (index . 1) -}}
serviceAccountName: {{ include "m3stack.serviceAccount" $root }}
automountServiceAccountToken: {{ index . 2 }}
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* secrets as folders: mounts and volumes from a list of (name, secret, path) */}}
{{- define "m3stack.secretMounts" -}}
{{- range . }}{{- if index . 1 }}
- {name: {{ index . 0 }}, mountPath: {{ index . 2 }}, readOnly: true}
{{- end }}{{- end }}
{{- end -}}

{{- define "m3stack.secretVolumes" -}}
{{- range . }}{{- if index . 1 }}
- name: {{ index . 0 }}
  secret: {secretName: {{ index . 1 | quote }}, defaultMode: 288}
{{- end }}{{- end }}
{{- end -}}

{{- define "m3stack.gatewaySecrets" -}}
{{- list
  (list "keys" .Values.gateway.auth.existingSecret "/etc/m3stack-keys")
  (list "tls" .Values.gateway.tls.existingSecret "/etc/m3stack-tls")
  (list "worker-tls" .Values.worker.tls.gatewaySecret "/etc/m3stack-worker-tls")
  (list "limits" .Values.gateway.tenantLimitsSecret "/etc/m3stack-limits")
  | toJson -}}
{{- end -}}

{{/* settings that both programs read, as JSON */}}
{{- define "m3stack.sharedTable" -}}
{{- $shared := dict "model_path" .Values.model.path "served_model_name" .Values.model.name "log_level" .Values.logLevel -}}
{{- if gt (int64 .Values.model.maxContextTokens) 0 -}}
{{- $_ := set $shared "max_context_tokens" (int64 .Values.model.maxContextTokens) -}}
{{- end -}}
{{ toJson $shared }}
{{- end -}}
