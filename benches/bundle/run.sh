#!/usr/bin/env bash
# Runs a bundle on a machine with a GPU: run.sh [tests] [bench] [peers] [verbs] (all without a word).
# Results go to $OUT, or to ./results.
set -uo pipefail
cd "$(dirname "$0")"
out=${OUT:-$PWD/results}
mkdir -p "$out"
failed=0
[ $# -gt 0 ] || set -- tests bench peers verbs
for part in "$@"; do
    case $part in
    tests)
        for test in ./test-*; do
            echo "== $test"
            "$test" --nocapture --test-threads 4 >"$out/$(basename "$test").log" 2>&1 || failed=1
            grep -E "^test .*FAILED|panicked at|^test result|SKIP" "$out/$(basename "$test").log" | sort | uniq -c
        done
        ;;
    bench)
        echo "== bench"
        ./storage --to "${DEVICE:-cuda:0}" --gib "${GIB:-8}" 2>&1 | tee "$out/bench.txt" || failed=1
        ;;
    peers)
        echo "== peers"
        python3 storage.py --out "$out" --gib "${GIB:-8}" 2>&1 | tee "$out/peers.txt" || failed=1
        ;;
    verbs)
        echo "== verbs"
        ./verbs --runs "${RUNS:-7}" 2>&1 | tee "$out/verbs.txt" || failed=1
        ;;
    *)
        echo "unknown part '$part'" >&2
        failed=2
        ;;
    esac
done
exit $failed
