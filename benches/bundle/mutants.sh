#!/usr/bin/env bash
# The kernels of collectives, each time without one of their checks, on two GPUs: mutants.sh [FOLDER] [one]
# With `one`, both ranks are on one GPU, and no kernel starts early: admission's mutants must survive then. JOBS=4 of them run
# side by side, for BUDGET=200 seconds in all; who has had no turn by then is named.
#
# FOLDER is what `cargo xtask mutate --ptx FOLDER` wrote. The bare kernels (`none`) must pass; a part of kernels-bench that they do
# not pass is named and left out. Of each other one kernels-bench must say that it is wrong, or not end in the time limit, which
# follows from the bare ones'. The parts that were made for a check come first.
set -uo pipefail
cd "$(dirname "$0")"
now() { date +%s; }
began=$(now)
export folder=${1:-mutants} mode=${2:-} limit=60 until=$((began + ${BUDGET:-200}))

# kernels-bench for the mutant $1 with the parts that follow; ended as soon as anything is wrong.
bench() {
    local name=$1 log=/tmp/mutant-$1.txt end=$(($(now) + limit)) code=0 pid
    shift
    # shellcheck disable=SC2086
    CUDA_CACHE_PATH=/tmp/mutant-cache-$name ./kernels-bench "$folder/$name" mutant "$@" $mode >"$log" 2>&1 &
    pid=$!
    while kill -0 $pid 2>/dev/null; do
        grep -qE 'WRONG|ERROR' "$log" && code=1
        (($(now) >= end)) && code=124
        ((code)) && kill -9 $pid
        sleep 0.2
    done
    wait $pid 2>/dev/null || code=$((code ? code : $?))
    return $code
}
# The parts made for it, then the others.
parts_of() {
    local first
    case $1 in
        kernels-admission* | kernels-announce* | kernels-early-wait) first=opposite ;;
        kernels-blocks-counted | kernels-count*) first=counted ;;
        kernels-direct-bulk-*) first=slow ;;
        kernels-direct-leaves) first=leaves ;;
        kernels-direct-* | kernels-push-over) first='straight tardy slow' ;;
        kernels-abort | kernels-deadline | kernels-poison | kernels-header*) first=faults ;;
        *) first='ahead sums moves' ;;
    esac
    for part in $first $parts; do [[ " $parts " == *" $part "* ]] && echo "$part"; done | awk '!seen[$0]++'
}
mutant() {
    local began code
    began=$(now)
    ((began >= until)) && { echo "no turn  $1"; return; }
    # shellcheck disable=SC2046
    bench "$1" $(parts_of "$1") 2>/dev/null
    code=$?
    if [ $code -eq 0 ]; then
        echo "SURVIVED $1, $(($(now) - began)) s"
    else
        echo "killed   $1 ($code), $(($(now) - began)) s: $(grep -m1 -E 'WRONG|ERROR|^no ' "/tmp/mutant-$1.txt" || echo "no end after $(tail -1 "/tmp/mutant-$1.txt")")"
    fi
}
export -f now bench parts_of mutant

parts=
for group in opposite counted slow leaves faults 'straight tardy' 'ahead sums moves'; do
    # shellcheck disable=SC2086
    if bench none $group 2>/dev/null; then
        parts+=" $group"
        grep -E '^part|^SKIP|in the middle' /tmp/mutant-none.txt
    else
        tail -4 /tmp/mutant-none.txt
        echo "the bare kernels do not pass: $group"
    fi
done
[ -n "$parts" ] || exit 1
export parts jobs=${JOBS:-4}
took=$(($(now) - began))
limit=$((jobs * took / 2 + 15))
((limit > 50)) && limit=50
echo "the bare kernels take $took s; limit $limit s"
order() {
    case $1 in
        kernels-admission* | kernels-announce* | kernels-early*) echo 1 ;;
        kernels-direct-bulk* | *-leaves | *counted | kernels-count*) echo 2 ;;
        kernels-direct* | kernels-push-over) echo 3 ;;
        *) echo 4 ;;
    esac
}
for name in $(ls "$folder" | grep -vx none); do echo "$(order "$name") $name"; done | sort | cut -d' ' -f2 |
    xargs -P "$jobs" -I{} bash -c 'mutant {}' | tee /tmp/mutants.txt
echo "$(grep -c SURVIVED /tmp/mutants.txt) survived, $(grep -c 'no turn' /tmp/mutants.txt) had no turn, of $(wc -l </tmp/mutants.txt)"
