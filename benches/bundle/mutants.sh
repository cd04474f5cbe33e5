#!/usr/bin/env bash
# The kernels of collectives, each time without one of their checks, on two GPUs: mutants.sh [FOLDER] [one]
# With `one`, both ranks are on one GPU, and no kernel starts early: admission's mutants must survive then. JOBS=4 of them run
# side by side, for BUDGET=200 seconds in all; who has had no turn by then is named. PARTS='opposite slow': those parts alone.
#
# FOLDER is what `cargo xtask mutate --ptx FOLDER` wrote. The bare kernels (`none`) must pass; a part of kernels-bench that they do
# not pass is named and left out. Of each other one kernels-bench must say that it is wrong, or not end in the time limit, which
# follows from the bare ones'. The parts that were made for a check come first; some of them run alone.
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
# The parts made for it.
own_parts() {
    local own
    case $1 in
        kernels-admission* | kernels-announce* | kernels-early-wait) own=opposite ;;
        kernels-blocks-counted | kernels-count*) own=counted ;;
        kernels-direct-bulk-*) own=slow ;;
        kernels-direct-leaves) own=leaves ;;
        kernels-direct-look | kernels-push-over) own=abandoned ;;
        kernels-direct-*) own='straight tardy slow' ;;
        kernels-abort | kernels-deadline | kernels-poison | kernels-header*) own='faults tardy' ;;
        *) own='ahead sums moves' ;;
    esac
    for part in $own; do [[ " $parts " == *" $part "* ]] && echo "$part"; done
}
other_parts() {
    local own
    own=" $(own_parts "$1" | tr '\n' ' ') "
    for part in $parts; do [[ "$own" == *" $part "* ]] || echo "$part"; done
}
# $1: own, other (after those), or all. Answers by a line; 0: it survived.
mutant() {
    local began code which
    began=$(now)
    ((began >= until)) && { echo "no turn  $2 ($1 parts)"; return 2; }
    case $1 in own) which=$(own_parts "$2") ;; other) which=$(other_parts "$2") ;; *) which="$(own_parts "$2") $(other_parts "$2")" ;; esac
    # shellcheck disable=SC2086
    [ -z "${which// /}" ] || bench "$2" $which 2>/dev/null
    code=$?
    if [ $code -eq 0 ]; then
        [ "$1" = own ] || echo "SURVIVED $2 ($1 parts: $(wc -w <<<"$which")), $(($(now) - began)) s"
        return 0
    fi
    echo "killed   $2 ($code), $(($(now) - began)) s: $(grep -m1 -E 'WRONG|ERROR|^no ' "/tmp/mutant-$2.txt" || echo "no end after $(tail -1 "/tmp/mutant-$2.txt")")"
    return 1
}
export -f now bench own_parts other_parts mutant

parts=
: >/tmp/mutants.txt
for group in opposite counted slow leaves abandoned faults 'straight tardy' 'ahead sums moves'; do
    [ -z "${PARTS:-}" ] || [[ " $PARTS " == *" ${group%% *} "* ]] || continue
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
# Those whose parts need devices of their own go alone, and first; then all others side by side.
later=()
for name in $(ls "$folder" | grep -vx none); do
    case $(own_parts "$name") in
        opposite | counted | slow | leaves | abandoned)
            if line=$(mutant own "$name"); then later+=("other $name"); else tee -a /tmp/mutants.txt <<<"$line"; fi
            ;;
        *) later+=("all $name") ;;
    esac
done
printf '%s\n' "${later[@]}" | xargs -P "$jobs" -I{} bash -c 'mutant {}' | tee -a /tmp/mutants.txt
echo "$(grep -c SURVIVED /tmp/mutants.txt) survived, $(grep -c 'no turn' /tmp/mutants.txt) had no turn, of $(wc -l </tmp/mutants.txt)"
