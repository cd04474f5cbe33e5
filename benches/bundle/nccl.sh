#!/usr/bin/env bash
# libnccl.so.2 on a machine with two or more GPUs: nccl.sh FOLDER [tests] [client] [speed]
#
# FOLDER has what was built elsewhere, as far as it is there:
#   test-collective         the library's tests (cargo test --no-run -p beeline --test collective)
#   libnccl.so.2            cargo build --release -p beeline-nccl
#   client                  cc -DN=2 dropin/nccl/tests/program.c -l:libnccl.so.2 -l:libcuda.so.1
#   nccl-tests/             binaries of nccl-tests, linked dynamically to libnccl.so.2
#   nvidia/libnccl.so.2     NVIDIA's, to be compared with
# Prints text; logs go to $OUT, or to ./results.
set -uo pipefail
folder=$(cd "${1:?the folder}" && pwd)
shift
[ $# -gt 0 ] || set -- tests client speed
out=${OUT:-$PWD/results}
mkdir -p "$out"
gpus=${GPUS:-2}
devices=$(seq -s, -f 'cuda:%g' 0 $((gpus - 1)))
failed=0

part_tests() {
    echo "== test-collective on $devices"
    BEELINE_TEST_DEVICES=$devices "$folder/test-collective" --test-threads 1 >"$out/collective.log" 2>&1 || failed=1
    grep -E "^test .*FAILED|panicked at|^test result" "$out/collective.log"
}

part_client() {
    local path
    for path in auto staged; do
        echo "== client, path $path"
        BEELINE_COMM_PATH=$path LD_LIBRARY_PATH=$folder timeout 120 "$folder/client" 2>&1 | tee "$out/client-$path.txt"
        [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    done
}

# One binary; only the library is another. A B B A, each with its check of the data.
part_speed() {
    local test which library graph
    for test in all_reduce all_gather reduce_scatter broadcast sendrecv alltoall; do
        [ -x "$folder/nccl-tests/${test}_perf" ] || continue
        for graph in 0 20; do
            for which in nvidia ours ours nvidia; do
                library=$folder
                [ $which = ours ] || library=$folder/nvidia
                [ -e "$library/libnccl.so.2" ] || continue
                echo "== ${test} -g $gpus -G $graph with $library/libnccl.so.2"
                LD_LIBRARY_PATH=$library timeout 200 "$folder/nccl-tests/${test}_perf" -g "$gpus" -b 8 -e 128M -f 4 \
                    -c 1 -n 50 -w 10 -G $graph 2>&1 | tee -a "$out/$test-G$graph-$which.txt" | grep -vE "^#( +|$)"
                [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
            done
        done
    done
}

for part in "$@"; do
    "part_$part"
done
exit $failed
