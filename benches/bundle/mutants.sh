#!/usr/bin/env bash
# The kernels of collectives, each time without one of their checks, on two GPUs: mutants.sh [FOLDER] [one]
# With `one`, both ranks are on one GPU, and no kernel starts early.
#
# FOLDER is what `cargo xtask mutate --ptx FOLDER` wrote. The bare kernels (`none`) must pass; of each other one
# kernels-bench must say that it is wrong, or not end in twice the time of the bare ones and four seconds more.
set -uo pipefail
cd "$(dirname "$0")"
folder=${1:-mutants}
mode=${2:-}
export CUDA_CACHE_DISABLE=1
limit=30
one() { timeout -k 2 $limit ./kernels-bench "$folder/$1" mutant $mode >"/tmp/mutant-$1.txt" 2>&1; }
began=$SECONDS
one none || { tail -5 /tmp/mutant-none.txt; echo "the bare kernels do not pass"; exit 1; }
limit=$((2 * (SECONDS - began) + 4))
echo "$(tail -1 /tmp/mutant-none.txt) in $((SECONDS - began)) s"
survived=0
for place in "$folder"/*/; do
    name=$(basename "$place")
    [ "$name" = none ] && continue
    one "$name"
    code=$?
    if [ $code -eq 0 ]; then
        echo "SURVIVED $name"
        survived=$((survived + 1))
    else
        echo "killed   $name ($code): $(grep -m1 -E 'WRONG|ERROR|no ' "/tmp/mutant-$name.txt" || echo 'did not end')"
    fi
done
echo "$survived survived"
