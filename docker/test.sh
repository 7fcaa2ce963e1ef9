#!/usr/bin/env bash
# Run the CPU image with compose.yaml's confinement, ask it, kill it, drain it: docker/test.sh [IMAGE]
#
#   CONTAINER  docker or podman (default: the first that answers); none of them is no failure
#   TIMEOUT    seconds a start may take (default 600)
#   RELEASE    1: the image has to be made on a base that is named by digest
#
# Without IMAGE it is attnres-serve:cpu, and is built first (`make image`, several minutes and GB);
# with RELEASE=1 it is the one that `make image-release` made.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=
for candidate in ${CONTAINER:-docker podman}; do
  if "$candidate" info >/dev/null 2>&1; then tool=$candidate && break; fi
done
if [ -z "$tool" ]; then
  echo "image-test: skipped, because no engine of ${CONTAINER:-docker or podman} answers here."
  exit 0
fi
image=${1:-attnres-serve:cpu}
if [ -z "${1:-}${RELEASE:-}" ]; then make image CONTAINER="$tool"; fi

name=attnres-serve-test-$$
folder=$(mktemp -d)
chmod 755 "$folder"
finish() {
  status=$?
  if [ "$status" != 0 ]; then "$tool" logs "$name" 2>&1 | tail -n 40 || true; fi
  "$tool" rm -f "$name" >/dev/null 2>&1 || true
  "$tool" volume rm -f "$name" >/dev/null 2>&1 || true
  rm -rf "$folder"
  exit "$status"
}
trap finish EXIT

say() { echo "image-test: $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }
# A request through the published port; the key is in a file, so that no process list shows it.
ask() { curl --silent --show-error --max-time 300 --config "$folder/curl" "$@"; }
# expect WHAT PATTERN TEXT
expect() { grep -Eq "$2" <<<"$3" || fail "$1: expected /$2/, found: $3"; }

state() { "$tool" inspect --format '{{.State.Running}} {{.State.ExitCode}}' "$name"; }
wait_until_healthy() {
  local begin=$SECONDS
  port=$("$tool" port "$name" 8000 | head -n 1 | sed 's/.*://')
  until curl --silent --fail --max-time 5 "http://127.0.0.1:$port/health" >/dev/null 2>&1; do
    case $(state) in false*) fail "it ended while starting" ;; esac
    [ $((SECONDS - begin)) -lt "${TIMEOUT:-600}" ] || fail "not healthy after ${TIMEOUT:-600} s"
    sleep 1
  done
  say "$1: healthy after $((SECONDS - begin)) s"
}

expect "user, entrypoint and version of the image" \
  '^10001:10001 \[attnres-entrypoint\] [0-9]+\.[0-9]+\.[0-9]+$' \
  "$("$tool" inspect --format '{{.Config.User}} {{.Config.Entrypoint}} {{index .Config.Labels "org.opencontainers.image.version"}}' "$image")"
if [ "${RELEASE:-}" = 1 ]; then
  expect "the base of a release" '@sha256:[0-9a-f]{64}$' \
    "$("$tool" inspect --format '{{index .Config.Labels "org.opencontainers.image.base.name"}}' "$image")"
fi

key=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
echo "$key" > "$folder/api_key"
chmod 644 "$folder/api_key" # for uid 10001, whatever the umask
(umask 077 && echo "header = \"Authorization: Bearer $key\"" > "$folder/curl")
"$tool" run --detach --init --name "$name" \
  --read-only --tmpfs /tmp:size=1g,mode=1777,noexec --cap-drop ALL --security-opt no-new-privileges \
  --memory 8g --pids-limit 2048 --shm-size 1g \
  --publish 127.0.0.1::8000 \
  --volume "$PWD/examples/demo/checkpoint:/model:ro" \
  --volume "$name:/cache" \
  --volume "$folder/api_key:/run/secrets/api_key:ro" \
  --env ATTNRES_API_KEY_FILE=/run/secrets/api_key --env HF_HUB_OFFLINE=1 \
  --env VLLM_CPU_KVCACHE_SPACE=1 \
  "$image" serve /model --served-model-name demo >/dev/null
wait_until_healthy "first start, compiled"

# /health answers before the last lines of a start are written.
for _ in $(seq 60); do
  start=$("$tool" logs "$name" 2>&1 | sed -n '1,/^  metrics /p')
  if grep -q '^  metrics ' <<<"$start"; then break; fi
  sleep 1
done
expect "the end of the start" '^  metrics +http' "$start"
[ "$(wc -l <<<"$start")" -le 15 ] || fail "a start of more than 15 lines: $start"

body='{"model": "demo", "prompt": "import os\n\n\ndef ", "max_tokens": 24, "temperature": 0'
expect "without the key" '^401$' "$(curl --silent --output /dev/null --write-out '%{http_code}' \
  --max-time 30 "http://127.0.0.1:$port/v1/models")"
post() { ask "http://127.0.0.1:$port$1" --header 'Content-Type: application/json' --data "$2" "${@:3}"; }
complete() { post /v1/completions "$1"; }
answer=$(complete "$body}")
expect "a completion" '"completion_tokens": ?24' "$answer"
# Structured output needs packages that name Triton, which the image leaves out.
expect "a completion by a pattern" '"text": ?"(yes|no)"' \
  "$(complete "$body, \"structured_outputs\": {\"regex\": \"(yes|no)\"}}")"
info=$(ask "http://127.0.0.1:$port/v1/attn_res")
expect "the cpp backend" '"backend": ?"cpp"' "$info"
expect "compiled mode" '"executed_compiled": ?\{[^}]*"single_pass": ?[1-9]' "$info"

# Every site's weights over its sources sum to 1, for every token.
judge_trace='
import json, sys
trace = json.load(sys.stdin)
rows = [row for site in trace["sites"] for row in site["weights"]]
worst = max(abs(sum(row) - 1) for row in rows)
print(len(trace["tokens"]), len(trace["sites"]), "exact" if worst < 1e-3 else worst)'
traced='{"model": "demo", "prompt": "import os\n\n\ndef ", "max_tokens": 4}'
trace=$(post /v1/attn_res/trace "$traced")
expect "a trace of every site" '^[1-9][0-9]* [1-9][0-9]* exact$' \
  "$("$tool" exec -i "$name" python -c "$judge_trace" <<<"$trace")"
# The page needs no key; the files it names are there.
public() { curl --silent --show-error --fail --max-time 30 "http://127.0.0.1:$port/$1"; }
page=$(public attn_res)
expect "the page" '<title>Depth attention</title>' "$page"
files=$(grep -oE '(src|href)="attn_res/[^"]+"' <<<"$page" | cut -d '"' -f 2)
expect "the page's files" 'page\.js' "$files"
for file in $files; do public "$file" >/dev/null || fail "the page's $file"; done

inside() { "$tool" exec "$name" "$@"; }
expect "the command of charts" '^attnres-serve [0-9.]+$' "$(inside vllm --version)"
expect "the user" '^10001$' "$(inside id -u)"
expect "capabilities" '^CapBnd:[[:space:]]0+$' "$(inside grep CapBnd /proc/1/status)"
expect "no new privileges" '^NoNewPrivs:[[:space:]]1$' "$(inside grep NoNewPrivs /proc/1/status)"
# Mounts, and not whether this user can write: modes forbid that, too.
mounts=$(inside cat /proc/mounts)
expect "a root file system that is read-only" '^[^ ]+ / [^ ]+ ro[, ]' "$mounts"
expect "a model that is mounted read-only" '^[^ ]+ /model [^ ]+ ro[, ]' "$mounts"
expect "a /tmp that runs nothing" '^[^ ]+ /tmp [^ ]+ [^ ]*noexec' "$mounts"
server=$(inside sh -c 'grep -la "attnres-serv[e]" /proc/[0-9]*/cmdline | head -n 1 | cut -d / -f 3')
expect "the process" 'attnres-serve serve /model' \
  "$(inside sh -c 'tr "\0" " " < /proc/$0/cmdline' "$server")"
inside python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)" \
  || fail "the health check inside the container"
expect "tcmalloc and OpenMP" 'libiomp5.*libtcmalloc_minimal' \
  "$(inside sh -c 'grep -oE "lib(iomp5|tcmalloc_minimal)" /proc/$0/maps | sort -u | tr "\n" " "' "$server")"
if inside sh -c 'cat /proc/[0-9]*/cmdline' 2>/dev/null | grep -aq "$key"; then
  fail "the key is on a command line"
fi

"$tool" kill --signal KILL "$name" >/dev/null
"$tool" wait "$name" >/dev/null
"$tool" start "$name" >/dev/null
sleep 3 # in the middle of the imports, before vLLM listens to signals
"$tool" stop -t 30 "$name" >/dev/null 2>&1
case $(state) in *" 137") fail "SIGTERM was not heard while it started" ;; esac
"$tool" start "$name" >/dev/null
wait_until_healthy "start after a kill"
text() { grep -oE '"text": ?"([^"\\]|\\.)*"' <<<"$1"; }
[ "$(text "$(complete "$body}")")" = "$(text "$answer")" ] || fail "another answer after a kill"

# A request that runs when SIGTERM arrives is answered to its end, and the process leaves by itself.
long='{"model": "demo", "prompt": "def f", "max_tokens": 400, "ignore_eos": true, "stream": true}'
post /v1/completions "$long" --no-buffer > "$folder/stream" &
request=$!
until [ "$(grep -c '^data: {' "$folder/stream")" -gt 5 ]; do
  kill -0 "$request" 2>/dev/null || fail "the long request ended early: $(head -c 300 "$folder/stream")"
  sleep 0.05
done
before=$(grep -c '^data: {' "$folder/stream")
begin=$SECONDS
"$tool" stop -t 45 "$name" >/dev/null
wait "$request" || fail "the running request was cut off"
after=$(grep -c '^data: {' "$folder/stream")
[ "$after" -gt "$before" ] || fail "the request had ended before the stop"
expect "the end of the stream" '^data: \[DONE\]' "$(tail -n 2 "$folder/stream")"
expect "the state after the stop" '^false 0$' "$(state)"
say "drained: $before of $after chunks before the stop, which took $((SECONDS - begin)) s"
say "passed"
