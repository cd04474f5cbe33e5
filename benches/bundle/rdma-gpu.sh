#!/usr/bin/env bash
# RDMA between the memories of two GPUs, each in a process of its own: rdma-gpu.sh [DEVICE DEVICE]
# (cuda:0 cuda:1). Takes below six minutes. Results go to $OUT, or to ./results.
#
# Everything is compared byte for byte; a line that begins with FAIL, or a last line other than
# ALL PASSED, is a failure.
set -uo pipefail
cd "$(dirname "$0")"
out=${OUT:-$PWD/results}
mkdir -p "$out"
[ $# -eq 2 ] || set -- cuda:0 cuda:1
{
    echo "commit $(cat COMMIT 2>/dev/null || echo unknown)"
    uname -r
    nproc
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader 2>&1
    nvidia-smi topo -m 2>&1
    ulimit -l
    timeout --kill-after 5 340 ./rdma_gpu "$1" "$2" 2>&1
    code=$?
    echo "exit $code"
    exit $code
} | tee "$out/rdma-gpu.txt"
exit "${PIPESTATUS[0]}"
