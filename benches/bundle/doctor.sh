#!/usr/bin/env bash
# What doctor, topo, explain and devices say on a machine with GPUs, how long they take, and a plain copy
# loop beside the probe. Text to standard output.
set -uo pipefail
cd "$(dirname "$0")"
b=./beeline
say() { echo; echo "== $*"; }
timed() { local start=$(date +%s.%N); timeout 120 "$@"; echo "[exit $?, $(awk "BEGIN{printf \"%.2f\", $(date +%s.%N)-$start}") s]"; }
say nvidia-smi; timeout 60 nvidia-smi topo -m
say devices; timed $b devices
say doctor; timed $b doctor; timed $b doctor >/dev/null; timed $b doctor >/dev/null
say topo; timed $b topo
say explain; timed $b explain cuda:0 cuda:1; timed $b explain /tmp cuda:0
say doctor --probe; timed $b doctor --probe
if command -v nvcc >/dev/null; then
    say plain copy loop; nvcc -O3 peercopy.cu -lcuda -o /tmp/peercopy && timeout 60 /tmp/peercopy 256
fi
say doctor --save; timed $b doctor --save "${OUT:-/tmp}/machine.json"; timed $b doctor --load "${OUT:-/tmp}/machine.json" --json | head -c 600
