#!/bin/sh
# attnres-serve in a container: `serve [CHECKPOINT] [flags]`, or any other command of it.
#
#   ATTNRES_API_KEY_FILE  file with the API key, such as /run/secrets/api_key
#   SERVE_ARGS            flags for `serve`, separated by blanks, after those on the command line
set -eu

if [ -n "${ATTNRES_API_KEY_FILE:-}" ]; then
  # vLLM reads the key from this variable; a flag would show it to everyone who can list processes.
  VLLM_API_KEY=$(cat "$ATTNRES_API_KEY_FILE" 2>/dev/null || true)
  if [ -z "$VLLM_API_KEY" ]; then
    echo "attnres-entrypoint: uid $(id -u) finds no key in $ATTNRES_API_KEY_FILE; check its permissions." >&2
    exit 2
  fi
  export VLLM_API_KEY
fi
if [ "${1:-}" = serve ]; then
  shift
  case "${1:--}" in
    -*) model=/model ;;
    *) model=$1 && shift ;;
  esac
  # What is given comes later and has precedence.  SIGTERM lets running requests end in that time.
  set -f # words, not file names
  # shellcheck disable=SC2086
  set -- serve "$model" --host 0.0.0.0 --shutdown-timeout 30 "$@" ${SERVE_ARGS:-}
fi
exec attnres-serve "$@"
