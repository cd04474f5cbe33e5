#!/bin/bash
# Copies programs and the shared libraries they load into a root file system.
#
#   copy-program.sh ROOT FOLDER PROGRAM...
set -euo pipefail
root=$1
folder=$2
shift 2
mkdir -p "$root$folder"
for program in "$@"; do
  path=$(command -v "$program") || { echo "rig: no program $program" >&2; exit 1; }
  cp -L "$path" "$root$folder/"
  { ldd "$path" 2> /dev/null || true; } | { grep -oE '/[^ ]+' || true; } | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -uL "$library" "$root$library"
  done
done
