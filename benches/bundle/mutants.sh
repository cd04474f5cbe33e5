#!/usr/bin/env bash
# The kernels of collectives, each time without one of their checks, on two GPUs: mutants.sh [FOLDER] [one]
# With `one`, both ranks are on one GPU, and no kernel starts early: admission's mutants must survive then. JOBS=4 of them run
# side by side.
#
# FOLDER is what `cargo xtask mutate --ptx FOLDER` wrote. The bare kernels (`none`) must pass; of each other one
# kernels-bench must say that it is wrong, or not end in JOBS times the time of the bare ones and eight seconds more.
set -uo pipefail
cd "$(dirname "$0")"
folder=${1:-mutants}
jobs=${JOBS:-4}
export CUDA_CACHE_DISABLE=1 folder mode=${2:-} limit=40
bench() { timeout -k 2 "$limit" ./kernels-bench "$folder/$1" mutant $mode >"/tmp/mutant-$1.txt" 2>&1; }
mutant() {
    bench "$1"
    code=$?
    if [ $code -eq 0 ]; then
        echo "SURVIVED $1"
    else
        echo "killed   $1 ($code): $(grep -m1 -E 'WRONG|ERROR|no ' "/tmp/mutant-$1.txt" || echo 'did not end')"
    fi
}
export -f bench mutant
began=$SECONDS
bench none || { tail -5 /tmp/mutant-none.txt; echo "the bare kernels do not pass"; exit 1; }
echo "$(tail -1 /tmp/mutant-none.txt) in $((SECONDS - began)) s"
limit=$((jobs * (SECONDS - began) + 8))
ls "$folder" | grep -vx none | xargs -P "$jobs" -I{} bash -c 'mutant {}' | tee /tmp/mutants.txt
echo "$(grep -c SURVIVED /tmp/mutants.txt) survived of $(wc -l </tmp/mutants.txt)"
