#!/usr/bin/env bash
# Installs the system tools m3stack builds and runs with, where they are missing, and says so.
set -euo pipefail

declare -A package_of=(
  [cc]=build-essential [cmake]=cmake [nasm]=nasm [pkg-config]=pkg-config
  [ffmpeg]=ffmpeg [ffprobe]=ffmpeg
)
missing=()
for tool in "${!package_of[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package_of[$tool]}")
done
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)

if ((${#missing[@]})); then
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  echo "==> system packages missing: ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    echo "error: no apt-get here; install these with your package manager, then run again" >&2
    exit 1
  fi
  sudo=()
  if [[ $(id -u) != 0 ]]; then
    command -v sudo >/dev/null || { echo "error: run as root: apt-get install ${missing[*]}" >&2; exit 1; }
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq "${missing[@]}" >/dev/null
fi

if ! command -v cargo >/dev/null; then
  echo "error: no Rust toolchain (cargo); install one from https://rustup.rs, then run again" >&2
  exit 1
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: Python 3.11 or newer is needed, this is $(python3 --version)" >&2
  exit 1
fi
