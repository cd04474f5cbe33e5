#!/usr/bin/env bash
# GPU to GPU on a machine with two GPUs: p2p.sh [processes] [some] [times] [moves] [kernels] [p2p] [check]   (all of them without a
# word, in this order, for as long as BUDGET allows: 300 seconds).
#
# Made by `cargo xtask gpu-bundle --nccl FOLDER`: beeline, lib/libnccl.so.2 (ours), kernels-bench with ptx/, and
# nccl-tests' binaries in nccl-tests/ (built from NVIDIA's sources, with `processes` of kernels/bench beside them). The same
# binaries run with ours and with the machine's NCCL (NCCL=/path/libnccl.so.2 where it is not found), only the library
# swapped: ours, theirs, theirs, ours; the better of the two of each is shown, and how far theirs are apart.
set -uo pipefail
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- processes some times moves kernels p2p check
tests=$PWD/nccl-tests ours=$PWD/lib
theirs=${NCCL:-$(ldconfig -p 2>/dev/null | awk '/libnccl\.so\.2/ {print $NF; exit}')}
[ -n "$theirs" ] || theirs=$(find / -xdev -name 'libnccl.so.2*' -not -path '*/lib/libnccl.so.2' 2>/dev/null | head -1)
echo "commit $(cat COMMIT 2>/dev/null)"
echo "ours $ours/libnccl.so.2"
echo "theirs ${theirs:-none}"
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv 2>&1 | head -4
export CUDA_CACHE_DISABLE=1 NCCL_NVLS_ENABLE=0

# with FOLDER SECONDS COMMAND..: what nccl-tests says, without its preamble
with() {
    local folder=$1 seconds=$2 left=$((${BUDGET:-300} - SECONDS))
    shift 2
    [ $left -gt 5 ] || { echo "no time left for $*"; return; }
    [ $seconds -lt $left ] || seconds=$left
    LD_LIBRARY_PATH=$folder timeout -k 5 "$seconds" "$@" 2>&1 | grep -vE '^# (nccl-tests|Collective|Using|  Rank|Rank)|^#$|^$' || true
}

# compare NAME TITLE FLAGS..: ours, theirs, theirs, ours
compare() {
    local name=$1 title=$2
    shift 2
    echo "-- $title: bytes, ours us, theirs us, ours/theirs, ours GB/s, theirs GB/s (bus; out of place | in place), theirs against theirs"
    for who in ours theirs theirs ours; do
        [ $who = ours ] && folder=$ours || folder=${theirs%/*}
        with "$folder" 25 "$tests/${name}_perf" -c 0 -g 2 "$@" | grep -E '^ +[0-9]|rror|fail|no time' | sed "s/^/$who /"
    done | awk '
        !/^(ours|theirs) +[0-9]/ {print; next}
        function least(a, key, v) {if (!((key) in a) || v < a[key]) a[key] = v}
        {
            if (!($2 in seen)) {seen[$2] = 1; order[++n] = $2}
            least(best, $1 $2 "o", $7); least(best, $1 $2 "i", $11)
            if ($9 > rate[$1 $2 "o"]) rate[$1 $2 "o"] = $9
            if ($13 > rate[$1 $2 "i"]) rate[$1 $2 "i"] = $13
            if ($1 == "theirs") {if ($2 in first) noise[$2] = $7 / first[$2]; else first[$2] = $7}
        }
        END {
            for (k = 1; k <= n; k++) {
                s = order[k]; a = best["ours" s "o"]; b = best["theirs" s "o"]; c = best["ours" s "i"]; d = best["theirs" s "i"]
                printf "%11s  %9.2f %9.2f %5.2f %6.1f %6.1f | %9.2f %9.2f %5.2f %6.1f %6.1f   %.2f\n", s, a, b, b ? a / b : 0, rate["ours" s "o"], rate["theirs" s "o"], c, d, d ? c / d : 0, rate["ours" s "i"], rate["theirs" s "i"], noise[s]
            }
        }'
}

for part in "$@"; do
    echo "== $part ($SECONDS s)"
    case $part in
    kernels) with "$ours" 110 ./kernels-bench ptx times slots faults ;;
    p2p) with "$ours" 60 ./beeline bench p2p ;;
    some)
        with "$ours" 40 ./kernels-bench ptx some
        with "$ours" 60 "$tests/order"
        for name in all_reduce all_gather reduce_scatter broadcast sendrecv alltoall; do
            echo "-- $name -g 2"
            with "$ours" 20 "$tests/${name}_perf" -b 4 -e 64M -f 13 -d float -c 1 -n 2 -w 1 -g 2 | tail -11
        done
        ;;
    check)
        with "$ours" 100 ./kernels-bench ptx check
        for mode in "-g 2" "-t 2"; do
            echo "-- all_reduce, every type and operator, $mode"
            with "$ours" 90 "$tests/all_reduce_perf" -b 4 -e 40M -f 10 -d all -o all -c 1 -n 1 -w 1 $mode |
                awk '/float|int|half|bf|fp8|f8/ {rows++; if ($9 != "0" || $13 != "0") {bad++; if (bad < 5) print}} /error|Error|fail|Avg|Out of/ {print} END {print rows + 0, "rows,", bad + 0, "with wrong values"}'
            for name in all_gather reduce_scatter broadcast reduce sendrecv alltoall; do
                echo "-- $name $mode"
                with "$ours" 20 "$tests/${name}_perf" -b 4 -e 64M -f 37 -d float -c 1 -n 2 -w 1 $mode | tail -9
            done
        done
        ;;
    processes)
        for who in ours theirs; do
            [ $who = ours ] && folder=$ours || folder=${theirs%/*}
            echo "-- $who"
            with "$folder" 60 "$tests/processes" | tee "/tmp/beeline-$who.$$"
        done
        echo "-- ours/theirs: loop, graph; predicted/measured: loop, graph"
        while read -r name bytes _ _ loop _ _ _ _ _ graph _; do
            read -r a b < <(awk -v n="$name" -v b="$bytes" '$1 == n && $2 == b {print $5, $11}' "/tmp/beeline-theirs.$$")
            kind=${name//_/}
            [ "$kind" = sendrecv ] && kind=send
            p=$(./beeline explain "$kind" --ranks 2 --bytes "$bytes" --json 2>/dev/null | grep -oE '"predicted_ns": ?[0-9]+' | head -1 | grep -oE '[0-9]+$')
            q=$(./beeline explain "$kind" --ranks 2 --bytes "$bytes" --graph --json 2>/dev/null | grep -oE '"predicted_ns": ?[0-9]+' | head -1 | grep -oE '[0-9]+$')
            awk -v n="$name" -v s="$bytes" -v l="$loop" -v g="$graph" -v a="${a:-0}" -v b="${b:-0}" -v p="${p:-0}" -v q="${q:-0}" \
                'BEGIN {printf "%-14s %10s  %5.2f %5.2f   %5.2f %5.2f\n", n, s, a ? l / a : 0, b ? g / b : 0, l ? p / l / 1000 : 0, g ? q / g / 1000 : 0}'
        done < <(grep -E '^[a-z_]+ +[0-9]+ B' "/tmp/beeline-ours.$$")
        rm -f "/tmp/beeline-ours.$$" "/tmp/beeline-theirs.$$"
        ;;
    times)
        compare all_reduce all_reduce -b 8 -e 1G -f 4 -n 20 -w 5
        for name in sendrecv broadcast alltoall all_gather reduce_scatter; do
            compare $name $name -b 64K -e 1G -f 4 -n 10 -w 3
        done
        for name in all_reduce all_gather reduce_scatter broadcast sendrecv alltoall; do
            compare $name "$name in a graph" -b 64 -e 16M -f 4 -n 20 -w 5 -G 4
        done
        ;;
    moves)
        # Large parts that are only moved: a process a GPU, by stores; then one thread with both, where they are copies, with and
        # without registration.
        echo "-- ours, a process a GPU, compared"
        with "$ours" 30 "$tests/processes" moves
        echo "-- theirs"
        with "${theirs%/*}" 30 "$tests/processes" moves times
        for name in sendrecv broadcast alltoall all_gather; do
            echo "-- $name by copies from 1 MB on, compared"
            BEELINE_COMM_COPY_ENGINE_BYTES=1000000 with "$ours" 20 "$tests/${name}_perf" -b 4M -e 1G -f 16 -n 2 -w 1 -c 1 -g 2
            echo "-- $name by stores"
            BEELINE_COMM_COPY_ENGINE_BYTES=99999999999999 with "$ours" 20 "$tests/${name}_perf" -b 64M -e 1G -f 4 -n 10 -w 3 -c 0 -g 2
            for register in 0 1 2; do
                compare $name "$name -R $register" -b 64M -e 1G -f 4 -n 10 -w 3 -R $register
            done
        done
        ;;
    *)
        echo "unknown part '$part'" >&2
        exit 2
        ;;
    esac
done
