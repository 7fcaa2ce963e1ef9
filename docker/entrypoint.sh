#!/bin/sh
# attnres-serve in a container: `serve [CHECKPOINT] [flags]`, or any other command of it.
#
#   SERVE_ARGS  flags for `serve`, separated by blanks, after those on the command line
set -eu

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
