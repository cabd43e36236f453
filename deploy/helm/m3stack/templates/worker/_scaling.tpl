{{/* what scales the workers of one role by what waits at them; call with
(list $ NAME KIND ROLE AUTOSCALING) */}}
{{- define "m3stack.workerScaling" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $kind := index . 2 -}}
{{- $role := index . 3 -}}
{{- $scaling := index . 4 -}}
{{- include "m3stack.checkBounds" (list (printf "worker.autoscaling of %s" $name) $scaling) -}}
{{- $service := printf "%s-worker" (include "m3stack.fullname" $root) -}}
{{- $from := printf "{namespace=%q,service=%q}" $root.Release.Namespace $service -}}
{{- $of := printf "and on (namespace, pod) m3stack_worker_role{role=%q}" $role -}}
{{- $address := required "worker.autoscaling.prometheusAddress: where is Prometheus?" $scaling.prometheusAddress -}}
{{- $waiting := list
  (list "m3stack_worker_waiting_requests" $scaling.waitingRequests)
  (list "m3stack_worker_waiting_prompt_tokens" $scaling.waitingPromptTokens)
-}}
{{- if eq (add (int64 $scaling.waitingRequests) (int64 $scaling.waitingPromptTokens)) 0 -}}
{{- fail "worker.autoscaling: waitingRequests and waitingPromptTokens are both 0: nothing to scale by" -}}
{{- end -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ $name }}
  labels:
    {{- include "m3stack.labels" (list $root "worker") | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: {{ eq $kind "StatefulSet" | ternary "apps/v1" "leaderworkerset.x-k8s.io/v1" }}
    kind: {{ $kind }}
    name: {{ $name }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  pollingInterval: 15
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        # KEDA's own cooldownPeriod is for the last step to none, which is never taken here
        scaleDown:
          stabilizationWindowSeconds: {{ $scaling.cooldownSeconds }}
          policies:
            - {type: Pods, value: 1, periodSeconds: 60}
  triggers:
    {{- range $waiting }}
    {{- if gt (int64 (index . 1)) 0 }}
    - type: prometheus
      metadata:
        serverAddress: {{ $address | quote }}
        query: {{ printf "sum(%s%s %s)" (index . 0) $from $of | quote }}
        threshold: {{ int64 (index . 1) | quote }}
    {{- end }}
    {{- end }}
{{- end -}}
