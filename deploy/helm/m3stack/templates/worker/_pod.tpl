{{/* a pod of a worker; call with (list $ "leader"), or "follower" for the other hosts of one */}}
{{- define "m3stack.workerPod" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $worker := $root.Values.worker -}}
{{- $secrets := list (list "tls" $worker.tls.existingSecret "/etc/m3stack-tls") -}}
metadata:
  labels:
    {{- $labels := include "m3stack.podLabels" (list $root "worker") | fromYaml }}
    {{- /* the second says which pods do which part of the work */}}
    {{- merge (dict "m3stack-role" $role "m3stack-work" ($worker.work | default "main")) $labels | toYaml | nindent 4 }}
  annotations:
    {{- include "m3stack.podAnnotations" (list $root "worker") | nindent 4 }}
spec:
  {{- include "m3stack.podBasics" (list $root "worker" false) | nindent 2 }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add (int64 $worker.drainSeconds) 30 }}
  containers:
    - name: worker
      image: {{ include "m3stack.image" (list $root $worker.image) }}
      imagePullPolicy: {{ $worker.image.pullPolicy }}
      args:
        - --config=/etc/m3stack/m3stack.toml
        {{- range $worker.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        # compiled kernels and tuned choices, then what the role says
        {{- $cache := list
          (dict "name" "HOME" "value" "/var/cache/m3stack")
          (dict "name" "TRITON_CACHE_DIR" "value" "/var/cache/m3stack/triton")
          (dict "name" "TORCHINDUCTOR_CACHE_DIR" "value" "/var/cache/m3stack/inductor")
        }}
        {{- include "m3stack.env" (list (concat $cache ($worker.workEnv | default list)) $worker.extraEnv) | nindent 8 }}
      ports:
        - {name: grpc, containerPort: {{ $worker.port }}}
        {{- if eq $role "leader" }}
        - {name: metrics, containerPort: {{ $worker.metricsPort }}}
        {{- end }}
      # the health service says NOT_SERVING while weights load, while it drains, and when a step
      # has not come back for stuck_step_s; behind the first pod it is all that is served
      startupProbe:
        {{- include "m3stack.workerProbe" $worker | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ max 1 (ceil (divf $worker.startupSeconds 10)) | int64 }}
      livenessProbe:
        {{- include "m3stack.workerProbe" $worker | nindent 8 }}
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 3
      readinessProbe:
        {{- include "m3stack.workerProbe" $worker | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 2
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      resources:
        {{- include "m3stack.workerResources" $root | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/m3stack, readOnly: true}
        - {name: model, mountPath: {{ $root.Values.model.mountPath | quote }}, readOnly: true}
        - {name: cache, mountPath: /var/cache/m3stack}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- include "m3stack.secretMounts" $secrets | nindent 8 }}
        {{- with $worker.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "m3stack.fullname" $root }}-worker}
    {{- include "m3stack.modelVolume" $root | nindent 4 }}
    - name: cache
      {{- if $worker.cacheVolume }}
      {{- toYaml $worker.cacheVolume | nindent 6 }}
      {{- else }}
      emptyDir: {sizeLimit: {{ $worker.cacheSize | quote }}}
      {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $worker.shmSize | quote }}}
    - name: tmp
      emptyDir: {}
    {{- include "m3stack.secretVolumes" $secrets | nindent 4 }}
    {{- with $worker.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* the kubelet's own gRPC probe speaks no TLS */}}
{{- define "m3stack.workerProbe" -}}
{{- if .tls.existingSecret -}}
exec:
  command: [python, /etc/m3stack/probe.py, {{ printf "127.0.0.1:%v" .port | quote }}, {{ required "worker.tls.serverName: a name in the workers' certificate" .tls.serverName | quote }}]
{{- else -}}
grpc: {port: {{ .port }}}
{{- end -}}
{{- end -}}

{{/* the operator's resources with the GPUs in requests and limits */}}
{{- define "m3stack.workerResources" -}}
{{- $resources := deepCopy .Values.worker.resources -}}
{{- if gt (int64 .Values.worker.gpus) 0 -}}
{{- $gpus := dict .Values.worker.gpuResource (int64 .Values.worker.gpus) -}}
{{- $_ := set $resources "limits" (merge $gpus ($resources.limits | default dict)) -}}
{{- $_ := set $resources "requests" (merge (deepCopy $gpus) ($resources.requests | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}
