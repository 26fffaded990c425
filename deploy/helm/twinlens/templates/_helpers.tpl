{{- define "twinlens.name" -}}
{{- if contains "twinlens" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-twinlens" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* What has pods of its own. */}}
{{- define "twinlens.parts" -}}
encoder {{ include "twinlens.llm-parts" . }}{{ if and .Values.gateway.enabled (not .Values.gateway.inPod) }} gateway{{ end }}
{{- end }}

{{- /* What LLM services are in: those that answer, and those that compute prompts for them. */}}
{{- define "twinlens.llm-parts" -}}
llm{{ if include "twinlens.prefill" . }} prefill{{ end }}
{{- end }}

{{- /* Whether some LLM services compute prompts for the others; answers nothing for no. */}}
{{- define "twinlens.prefill" -}}
{{- if .Values.prefill.enabled }}
{{- if gt (int .Values.llm.hosts) 1 }}{{ fail "prefill is not for llm.hosts above 1: KV blocks are exchanged where all ranks are on one host" }}{{ end }}
{{- if not (index .Values.llm.options "kv-host-bytes") }}{{ fail "prefill needs llm.options.kv-host-bytes: KV blocks go from host to host" }}{{ end }}yes
{{- end }}
{{- end }}

{{- /* Whether gateways are beside LLM services, in their pods; answers nothing for no. */}}
{{- define "twinlens.gateway-in-pod" -}}
{{- if and .Values.gateway.enabled .Values.gateway.inPod }}
{{- if .Values.gateway.https }}{{ fail "gateway.https is not for gateway.inPod: what is in front of the pods ends TLS" }}{{ end }}yes
{{- end }}
{{- end }}

{{- /* Below, a dict has the chart's scope as `root` and encoder, llm, prefill or gateway as `part`. The first of `tokens` is what a
     part is asked with, the others are what it asks with. */}}

{{- /* A part's values, as JSON. What those of prefill leave out is as of llm, options and variables one by one. */}}
{{- define "twinlens.own" -}}
{{- $own := deepCopy (index .root.Values (ternary "llm" .part (eq .part "prefill"))) }}
{{- if eq .part "prefill" }}
{{- range $name, $value := .root.Values.prefill }}
{{- if has $name (list "options" "environment") }}
{{- range $key, $each := $value }}{{ $_ := set (index $own $name) $key $each }}{{ end }}
{{- else }}
{{- $_ := set $own $name $value }}
{{- end }}
{{- end }}
{{- end }}
{{- $own | toJson }}
{{- end }}

{{- define "twinlens.strategy" -}}
{{- (include "twinlens.own" . | fromJson).strategy | toJson }}
{{- end }}

{{- define "twinlens.selector" -}}
app.kubernetes.io/name: twinlens
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "twinlens.labels" -}}
{{ include "twinlens.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "twinlens.metadata" -}}
name: {{ include "twinlens.name" .root }}-{{ .part }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "twinlens.labels" . | trim | nindent 2 }}
{{- end }}

{{- /* The pods of `parts`, as network policies name them. */}}
{{- define "twinlens.peers" -}}
{{- $peers := list }}
{{- range .parts }}
{{- $peers = append $peers (dict "podSelector" (dict "matchLabels" (include "twinlens.selector" (dict "root" $.root "part" .) | fromYaml))) }}
{{- end }}
{{- $peers | toJson }}
{{- end }}

{{- define "twinlens.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "twinlens.options" -}}
{{- range $name, $value := . }}
- {{ printf "--%s=%s" $name (include "twinlens.word" $value) | quote }}
{{- end }}
{{- end }}

{{- /* Helm reads numbers of values as floats; a large one would be written as 1e+06. */}}
{{- define "twinlens.word" -}}
{{- if kindIs "float64" . }}{{ if eq (floor .) . }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "twinlens.environment" -}}
{{- $values := .root.Values }}
{{- if ne .part "gateway" }}
- {name: HF_HOME, value: /srv/hub}  # a user whom the image does not know has no other home
- {name: NUMBA_CACHE_DIR, value: /srv/kernels/numba}
- {name: TRITON_CACHE_DIR, value: /srv/kernels/triton}
{{- with $values.model.hubTokenSecret }}
- {name: HF_TOKEN_PATH, value: /secrets/hub/token}
{{- end }}
{{- end }}
{{- if and $values.kvEvents.enabled (eq .part "llm") }}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}
{{- if and $values.nixl.backend (ne .part "gateway") }}
- {name: UCX_TCP_PORT_RANGE, value: {{ $values.nixl.ports | quote }}}
{{- end }}
{{- with $values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- range $name, $value := (include "twinlens.own" . | fromJson).environment }}
- {name: {{ $name | quote }}, value: {{ include "twinlens.word" $value | quote }}}
{{- end }}
{{- with (include "twinlens.own" . | fromJson).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "twinlens.mounts" -}}
{{- $values := .root.Values }}
- {name: tmp, mountPath: /tmp}
{{- if ne .part "gateway" }}
- {name: kernels, mountPath: /srv/kernels}
- {name: hub, mountPath: /srv/hub}
{{- if $values.model.volume }}
- {name: models, mountPath: /srv/models, readOnly: true}
{{- end }}
{{- if $values.model.hubTokenSecret }}
- {name: hub-token, mountPath: /secrets/hub, readOnly: true}
{{- end }}
{{- if $values.sharedMemory.hostPath }}
- {name: local, mountPath: /srv/local}
{{- end }}
{{- end }}
{{- if or $values.tls.enabled (and (eq .part "gateway") $values.gateway.https) }}
- {name: tls, mountPath: /secrets/tls, readOnly: true}
{{- end }}
{{- range $token := .tokens }}
{{- if index $values.tokens $token }}
- {name: {{ $token }}-token, mountPath: /secrets/{{ $token }}, readOnly: true}
{{- end }}
{{- end }}
{{- if (include "twinlens.own" . | fromJson).sharedMemorySize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with (include "twinlens.own" . | fromJson).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "twinlens.cache" -}}
{{- $cache := index .root.Values.cache .name }}
- name: {{ .name }}
{{- if or $cache.claimName $cache.size }}
  persistentVolumeClaim: {claimName: {{ $cache.claimName | default (printf "%s-%s" (include "twinlens.name" .root) .name) }}}
{{- else }}
  emptyDir: {}
{{- end }}
{{- end }}

{{- define "twinlens.volumes" -}}
{{- $values := .root.Values }}
- {name: tmp, emptyDir: {}}
{{- if ne .part "gateway" }}
{{- include "twinlens.cache" (dict "root" .root "name" "kernels") }}
{{- include "twinlens.cache" (dict "root" .root "name" "hub") }}
{{- with $values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.model.hubTokenSecret }}
- {name: hub-token, secret: {secretName: {{ . }}}}
{{- end }}
{{- with $values.sharedMemory.hostPath }}
- {name: local, hostPath: {path: {{ . }}, type: Directory}}
{{- end }}
{{- end }}
{{- if or $values.tls.enabled (and (eq .part "gateway") $values.gateway.https) }}
- {name: tls, secret: {secretName: {{ index $values.tls .part }}, defaultMode: 0440}}
{{- end }}
{{- range $token := .tokens }}
{{- with index $values.tokens $token }}
- {name: {{ $token }}-token, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- with (include "twinlens.own" . | fromJson).sharedMemorySize }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . }}}}
{{- end }}
{{- end }}

{{- define "twinlens.pod-metadata" -}}
labels:
  {{- include "twinlens.labels" . | trim | nindent 2 }}
  {{- if and (eq .part "llm") .root.Values.inferencePool.enabled }}
  llm-d.ai/engine-type: {{ .root.Values.inferencePool.engine }}  # by which a picker knows whose metrics these are
  {{- end }}
{{- with (include "twinlens.own" . | fromJson).podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* All of a pod's spec but for its containers. */}}
{{- define "twinlens.pod" -}}
{{- $values := .root.Values }}
{{- $own := include "twinlens.own" . | fromJson }}
{{- $inside := and (eq .part "llm") .serves (include "twinlens.gateway-in-pod" .root) }}
serviceAccountName: {{ include "twinlens.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add 5 (ternary (max $own.graceSeconds $values.gateway.graceSeconds) $own.graceSeconds (not (empty $inside))) 15 }}  # preStop's pause, --grace-seconds, and time to take all apart
securityContext:
  {{- mergeOverwrite (deepCopy $values.podSecurityContext) $own.podSecurityContext | toYaml | nindent 2 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if $own.topologySpreadConstraints }}
{{- range $own.topologySpreadConstraints }}
  - {{- mergeOverwrite (dict "labelSelector" (dict "matchLabels" (include "twinlens.selector" $ | fromYaml))) . | toYaml | nindent 4 }}
{{- end }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [pod-template-hash]  # pods that an upgrade is about to end do not count
    labelSelector:
      matchLabels:
        {{- include "twinlens.selector" $ | trim | nindent 8 }}
{{- end }}
{{- $near := and (has .part (list "llm" "prefill")) $values.sharedMemory.hostPath }}
{{- if $own.affinity }}
affinity:
  {{- toYaml $own.affinity | nindent 2 }}
{{- else if or $near (not $own.topologySpreadConstraints) }}
affinity:
  {{- if not $own.topologySpreadConstraints }}
  podAntiAffinity:  # over zones; as a second constraint it would undo the first wherever nodes are in no zone
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels:
              {{- include "twinlens.selector" . | trim | nindent 14 }}
  {{- end }}
  {{- if $near }}
  podAffinity:  # rows cross by shared memory from an encoder of the same node
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "twinlens.selector" (dict "root" .root "part" "encoder") | trim | nindent 14 }}
  {{- end }}
{{- end }}
{{- if and $inside $values.tls.enabled }}
hostAliases: [{ip: 127.0.0.1, hostnames: [{{ include "twinlens.name" .root }}-llm]}]  # as its certificate names the service
{{- end }}
volumes:
  {{- include "twinlens.volumes" (ternary (merge (dict "tokens" (append .tokens "gateway")) .) . (not (empty $inside))) | trim | nindent 2 }}
  {{- with concat $own.extraVolumes (ternary $values.gateway.extraVolumes list (not (empty $inside))) | uniq }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "twinlens.security" -}}
{{- $default := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "runAsNonRoot" true "capabilities" (dict "drop" (list "ALL")) }}
{{- mergeOverwrite $default (include "twinlens.own" . | fromJson).securityContext | toYaml }}
{{- end }}

{{- /* How health is asked for: by the kubelet, which knows neither TLS nor tokens, or by a command. */}}
{{- define "twinlens.health" -}}
{{- $values := .root.Values }}
{{- $token := index $values.tokens (first .tokens) }}
{{- if or $values.tls.enabled $token }}
exec:
  command:
    - twinlens
    - health
    - 127.0.0.1:{{ .port }}
    - --service={{ .service }}
    {{- if $values.tls.enabled }}
    - --ca-file=/secrets/tls/ca.crt
    - --cert-file=/secrets/tls/tls.crt
    - --key-file=/secrets/tls/tls.key
    - --server-name={{ include "twinlens.name" .root }}-{{ .part }}
    {{- end }}
    {{- if $token }}
    - --token-file=/secrets/{{ first .tokens }}/token
    {{- end }}
{{- else }}
grpc: {port: {{ .port }}, service: {{ .service }}}
{{- end }}
timeoutSeconds: 10
{{- end }}

{{- define "twinlens.service-probes" -}}
startupProbe:
  {{- include "twinlens.health" . | trim | nindent 2 }}
  periodSeconds: 5
  failureThreshold: {{ .starts }}
readinessProbe:
  {{- include "twinlens.health" . | trim | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 2
livenessProbe:  # whether the process lives; one that is not ready mends itself, and keeps its caches
  httpGet: {path: /metrics, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 15
  failureThreshold: 4
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}  # until its address is given to nobody new
{{- end }}

{{- /* What an encoder or an LLM service listens with. */}}
{{- define "twinlens.server" -}}
{{- $values := .root.Values }}
- --listen=0.0.0.0:{{ .port }}
- --metrics-listen=0.0.0.0:9400
- --grace-seconds={{ (include "twinlens.own" . | fromJson).graceSeconds }}
{{- if $values.sharedMemory.hostPath }}
- --local-dir=/srv/local
{{- end }}
{{- with $values.nixl.backend }}
- --nixl={{ . }}
{{- end }}
{{- if $values.tls.enabled }}
- --tls-cert=/secrets/tls/tls.crt
- --tls-key=/secrets/tls/tls.key
- --tls-client-ca=/secrets/tls/ca.crt
{{- end }}
{{- if index $values.tokens (first .tokens) }}
- --auth-token-file=/secrets/{{ first .tokens }}/token
{{- end }}
{{- end }}

{{- /* One LLM service's container; `rank` is 0 on the host that serves. */}}
{{- define "twinlens.llm-container" -}}
{{- $values := .root.Values }}
{{- $own := include "twinlens.own" . | fromJson }}
{{- $hosts := int $own.hosts }}
{{- $publishes := and $values.kvEvents.enabled (eq .part "llm") }}
name: {{ .part }}
image: {{ include "twinlens.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
command: [python, -m, llm_service]
args:
  - --model={{ $values.model.name }}
  {{- with $values.model.revision }}
  - --revision={{ . }}
  {{- end }}
  {{- if gt $hosts 1 }}
  - --nodes={{ $hosts }}
  - --rendezvous=$(LWS_LEADER_ADDRESS):29500
  - --node-rank={{ if .serves }}0{{ else }}$(LWS_WORKER_INDEX){{ end }}
  {{- end }}
  {{- if .serves }}
  - --encoders=dns:///{{ include "twinlens.name" .root }}-encoder:7001
  {{- include "twinlens.server" . | trim | nindent 2 }}
  {{- if $values.tls.enabled }}
  - --encoder-ca=/secrets/tls/ca.crt
  - --encoder-cert=/secrets/tls/tls.crt
  - --encoder-key=/secrets/tls/tls.key
  {{- end }}
  {{- if $values.tokens.encoder }}
  - --encoder-token-file=/secrets/encoder/token
  {{- end }}
  {{- if eq .part "prefill" }}
  - --lend-prefill
  {{- else if include "twinlens.prefill" .root }}
  - --prefill-services=dns:///{{ include "twinlens.name" .root }}-prefill:7002
  {{- if $values.tls.enabled }}
  - --prefill-ca=/secrets/tls/ca.crt
  - --prefill-cert=/secrets/tls/tls.crt
  - --prefill-key=/secrets/tls/tls.key
  {{- end }}
  {{- if $values.tokens.llm }}
  - --prefill-token-file=/secrets/llm/token
  {{- end }}
  {{- end }}
  {{- if $publishes }}
  {{- $model := get $own.options "served-model-name" | default (ternary $values.model.name (base $values.model.name) $values.model.hub) }}
  - --kv-events=tcp://*:{{ $values.kvEvents.port }}
  - --kv-events-replay=tcp://*:{{ $values.kvEvents.replayPort }}
  - --kv-events-topic={{ $values.kvEvents.topic | default (printf "kv@$(POD_IP):8000@%s" $model) }}
  {{- end }}
  {{- end }}
  {{- include "twinlens.options" $own.options | trim | nindent 2 }}
{{- if .serves }}
ports:
  - {name: grpc, containerPort: 7002}
  - {name: metrics, containerPort: 9400}
  {{- if $publishes }}
  - {name: kv-events, containerPort: {{ $values.kvEvents.port }}}
  - {name: kv-replay, containerPort: {{ $values.kvEvents.replayPort }}}
  {{- end }}
{{ include "twinlens.service-probes" . }}
{{- end }}
securityContext:
  {{- include "twinlens.security" . | trim | nindent 2 }}
resources:
  {{- toYaml $own.resources | nindent 2 }}
env:
  {{- include "twinlens.environment" . | trim | nindent 2 }}
volumeMounts:
  {{- include "twinlens.mounts" . | trim | nindent 2 }}
{{- end }}

{{- /* A gateway's container; `inside` where it is in the pod of an LLM service. */}}
{{- define "twinlens.gateway-container" -}}
{{- $values := .root.Values }}
{{- $inside := .inside }}
{{- $scheme := ternary "HTTPS" "HTTP" $values.gateway.https }}
name: gateway
image: {{ include "twinlens.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
command: [python, -m, gateway]
args:
  - --listen=0.0.0.0:8000
  {{- if not $inside }}
  - --llm=dns:///{{ include "twinlens.name" .root }}-llm:7002
  {{- else if $values.tls.enabled }}
  - --llm={{ include "twinlens.name" .root }}-llm:7002
  {{- else }}
  - --llm=127.0.0.1:7002
  {{- end }}
  - --grace-seconds={{ $values.gateway.graceSeconds }}
  {{- if $values.tokens.gateway }}
  - --auth-token-file=/secrets/gateway/tokens
  {{- end }}
  {{- if $values.tokens.llm }}
  - --llm-token-file=/secrets/llm/token
  {{- end }}
  {{- if $values.tls.enabled }}
  - --llm-ca=/secrets/tls/ca.crt
  - --llm-cert=/secrets/tls/tls.crt
  - --llm-key=/secrets/tls/tls.key
  {{- end }}
  {{- if $values.gateway.https }}
  - --tls-cert=/secrets/tls/tls.crt
  - --tls-key=/secrets/tls/tls.key
  {{- end }}
  {{- include "twinlens.options" $values.gateway.options | trim | nindent 2 }}
ports: [{name: http, containerPort: 8000}]
readinessProbe:  # whether there is an LLM service that can serve
  httpGet: {path: /health/ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:  # whether the process answers
  httpGet: {path: /health/live, port: http, scheme: {{ $scheme }}}
  periodSeconds: 20
  timeoutSeconds: 15
  failureThreshold: 4
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}  # until its address is given to nobody new
securityContext:
  {{- include "twinlens.security" . | trim | nindent 2 }}
resources:
  {{- toYaml $values.gateway.resources | nindent 2 }}
{{- with include "twinlens.environment" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- include "twinlens.mounts" . | trim | nindent 2 }}
{{- end }}
