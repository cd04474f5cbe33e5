#!/usr/bin/env bash
# GPU to GPU on a machine with two GPUs: p2p.sh [check] [times] [processes] [p2p] [kernels]   (all without a
# word, in this order, for as long as BUDGET allows: 540 seconds).
#
# The folder holds beeline, lib/libnccl.so.2 (ours), kernels-bench with ptx/, and nccl-tests' binaries in
# nccl-tests/ (built from NVIDIA's sources, with `processes` of kernels/bench beside them). The same binaries run
# with ours and with the machine's NCCL (NCCL=/path/libnccl.so.2 where it is not found), only the library swapped.
set -uo pipefail
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- check times processes p2p kernels
tests=$PWD/nccl-tests ours=$PWD/lib
theirs=${NCCL:-$(ldconfig -p 2>/dev/null | awk '/libnccl\.so\.2/ {print $NF; exit}')}
[ -n "$theirs" ] || theirs=$(find / -xdev -name 'libnccl.so.2*' -not -path '*/p2p-bundle*' 2>/dev/null | head -1)
echo "commit $(cat COMMIT 2>/dev/null)"
echo "ours $ours/libnccl.so.2"
echo "theirs ${theirs:-none}"
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv 2>&1 | head -4
export CUDA_CACHE_DISABLE=1 NCCL_NVLS_ENABLE=0

# with FOLDER SECONDS COMMAND..: what nccl-tests says, without its preamble
with() {
    local folder=$1 seconds=$2 left=$((${BUDGET:-540} - SECONDS))
    shift 2
    [ $left -gt 5 ] || { echo "no time left for $*"; return; }
    [ $seconds -lt $left ] || seconds=$left
    LD_LIBRARY_PATH=$folder timeout -k 5 "$seconds" "$@" 2>&1 | grep -vE '^# (nccl-tests|Collective|Using|  Rank|Rank)|^#$|^$' || true
}

for part in "$@"; do
    echo "== $part"
    case $part in
    kernels) with "$ours" 110 ./kernels-bench ptx times faults ;;
    p2p) with "$ours" 60 ./beeline bench p2p ;;
    check)
        for mode in "-g 2" "-t 2"; do
            echo "-- all_reduce, every type and operator, $mode"
            with "$ours" 90 "$tests/all_reduce_perf" -b 4 -e 4M -f 100 -d all -o all -c 1 -n 1 -w 1 $mode |
                awk '/float|int|half|bf|fp8|f8/ {rows++; if ($9 != "0" || $13 != "0") {bad++; if (bad < 5) print}} /error|Error|fail|Avg|Out of/ {print} END {print rows + 0, "rows,", bad + 0, "with wrong values"}'
            for name in all_gather reduce_scatter broadcast reduce sendrecv alltoall; do
                echo "-- $name $mode"
                with "$ours" 20 "$tests/${name}_perf" -b 4 -e 64M -f 37 -d float -c 1 -n 2 -w 1 $mode | tail -9
            done
        done
        ;;
    processes)
        echo "-- ours"
        with "$ours" 60 "$tests/processes"
        echo "-- theirs"
        with "${theirs%/*}" 60 "$tests/processes"
        ;;
    times)
        for name in all_reduce all_gather reduce_scatter broadcast sendrecv alltoall; do
            for who in ours theirs; do
                [ $who = ours ] && folder=$ours || folder=${theirs%/*}
                echo "-- $name $who"
                with "$folder" 25 "$tests/${name}_perf" -b 8 -e 1G -f 8 -c 0 -n 20 -w 5 -g 2 | grep -E '^ +[0-9]|rror|fail'
                echo "-- $name $who in a graph"
                with "$folder" 20 "$tests/${name}_perf" -b 8 -e 16M -f 8 -c 0 -n 20 -w 5 -G 4 -g 2 | grep -E '^ +[0-9]|rror|fail'
            done
        done
        ;;
    *)
        echo "unknown part '$part'" >&2
        exit 2
        ;;
    esac
done
