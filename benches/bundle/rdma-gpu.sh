#!/usr/bin/env bash
# RDMA between the memories of two GPUs, each in a process of its own, and the local link on this machine's cores:
# rdma-gpu.sh [DEVICE DEVICE [quick|usual|figures|full]]   (cuda:0 cuda:1 figures)
#
# `figures` measures throughput and latency of every kind of memory: at most 100 s. `usual` compares every
# operation first, up to 64 MiB a message; `full` up to 1 GiB: at most six minutes. BUDGET in seconds overrides.
# Results go to $OUT, or to ./results.
#
# Everything is compared byte for byte; a line that begins with FAIL, or a last line other than
# ALL PASSED, is a failure.
set -uo pipefail
cd "$(dirname "$0")"
out=${OUT:-$PWD/results}
mkdir -p "$out"
[ $# -ge 2 ] || set -- cuda:0 cuda:1
how=${3:-figures}
case $how in
figures | quick) budget=100 ;;
*) budget=350 ;;
esac
budget=${BUDGET:-$budget}
words=("$1" "$2")
[ "$how" = usual ] || words+=("$how")
{
    echo "commit $(cat COMMIT 2>/dev/null || echo unknown)"
    uname -r
    nproc
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader 2>&1
    nvidia-smi topo -m 2>&1 | head -4
    lscpu 2>/dev/null | grep -E "^(Model name|Thread|Core|Socket|NUMA node\(s\)|L2|L3)"
    ulimit -l
    if [ -x ./verbs ]; then
        # Latency stands or falls with where the two cores are: neighbours, and two that are far apart.
        last=$(($(nproc) - 1))
        for cores in "" "--cores 0,1" "--cores 2,$((last / 2 + 1))" "--cores 1,$last"; do
            timeout 12 ./verbs --runs 3 --seconds 0.3 --only "local cores|64 B over local" $cores 2>&1
        done
        timeout 12 ./verbs --runs 3 --seconds 0.5 --only "memcpy|1 MiB over local" 2>&1
    fi
    left=$((budget - SECONDS))
    timeout --kill-after 5 $left ./rdma_gpu "${words[@]}" 2>&1
    code=$?
    echo "exit $code, $SECONDS s in all"
    exit $code
} | tee "$out/rdma-gpu.txt"
exit "${PIPESTATUS[0]}"
