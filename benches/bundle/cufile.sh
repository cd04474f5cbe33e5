#!/usr/bin/env bash
# Runs the drop-in libcufile on a machine with a GPU: conformance, real clients, and a benchmark beside
# NVIDIA's library and kvikio. Each part has a time limit and none stops the others. Prints text.
#
# usage: cufile.sh [conformance] [clients] [ceiling] [bench]        (all of them without a word)
# env: WHEELS=folder of wheels (../.whl)   FOLDER=where files are made (/tmp/beeline-cufile, ~3 GiB)
#      NVIDIA_LIB=path of NVIDIA's libcufile.so.0 (looked for)   PASSES=3   SECONDS_CELL=0.3
#      WAITS="event word" for passes with other ways of waiting, PARALLEL="2 4" with other numbers of threads a
#      request
set -uo pipefail
cd "$(dirname "$0")"
here=$PWD
wheels=${WHEELS:-$here/../.whl}
folder=${FOLDER:-/tmp/beeline-cufile}
out=${OUT:-$here/results}
mkdir -p "$folder" "$out" "$here/lib"
cp -f libcufile.so.0 lib/libcufile.so.0
ln -sf libcufile.so.0 lib/libcufile.so
ours=$here/lib/libcufile.so.0
began=$SECONDS
[ $# -gt 0 ] || set -- conformance clients ceiling bench
note() { printf '\n== [%3d s] %s\n' $((SECONDS - began)) "$*"; }
note "$(cat COMMIT) on $(uname -r), $(nproc) CPUs, $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
note "$folder is $(stat -f -c %T "$folder"), /dev/shm is $(stat -f -c %T /dev/shm)"

# The programs are built here where there is a compiler, for this machine's C library.
for p in conformance cufile_bench write_ceiling read_ceiling fork_exit; do
    if command -v cc >/dev/null; then
        cc -std=gnu11 -O2 -w -I. $p.c -o $p.here -ldl -lpthread 2>&1 | head -3
    fi
    [ -x $p.here ] || cp $p $p.here
done

# What the kernel allows a writer of one file, without a GPU and without a library; what a bare loop of reads and
# copies reaches.
ceiling() {
    note "ceiling of reads, $folder: size,piece,threads,GB/s,p50 us,CPU-s/GiB"
    timeout -k 5 25 ./read_ceiling.here "$folder"
    for where in "$folder" /dev/shm; do
        note "ceiling of writes, $where: way,block,threads,GB/s,CPU-s/GiB"
        timeout -k 5 25 ./write_ceiling.here "$where" 0.1
    done
}

conformance() {
    note "conformance over the real driver, files on $folder"
    timeout -k 5 100 ./conformance.here "$ours" "$folder" 2>&1 | grep -v "ERROR: stream-ordered" | tail -40
    note "again, on tmpfs, with a pool of 64 MiB, waiting by words"
    mkdir -p /dev/shm/beeline-cufile
    BEELINE_POOL_BYTES=64M BEELINE_CUFILE_WAIT=word timeout -k 5 100 \
        ./conformance.here "$ours" /dev/shm/beeline-cufile 2>&1 | grep -v "ERROR: stream-ordered" | tail -40
    rm -rf /dev/shm/beeline-cufile
    note "where all streams of the device share one hardware queue"
    for group in connections batches threads rewrites; do
        CUDA_DEVICE_MAX_CONNECTIONS=1 BEELINE_STALL_SECONDS=5 timeout -k 5 30 \
            ./conformance.here "$ours" "$folder" $group 2>&1 | tail -12
    done
    note "the group of forks alone, and a child that calls exit(0) without this library"
    timeout -k 5 30 ./conformance.here "$ours" "$folder" forks 2>&1 | tail -30
    timeout -k 5 60 ./fork_exit.here
}

clients() {
    local site=/tmp/beeline-clients
    mkdir -p $site
    note "clients: install wheels from $wheels"
    for wheel in "$wheels"/*.whl; do
        python3 -m zipfile -e "$wheel" $site 2>&1 | tail -1
    done
    for zip in "$wheels/nixl-gds.zip" "$here/nixl-gds.zip"; do
        [ -f "$zip" ] && python3 -m zipfile -e "$zip" $site
    done
    printf '{ // settings of this run\n "properties": { "allow_compat_mode": true }, "logging": { "level": "WARN" } }\n' >$site/cufile.json
    export CUFILE_ENV_PATH_JSON=$site/cufile.json PYTHONPATH=$site
    export LD_LIBRARY_PATH=$site/.nixl_cu13.mesonpy.libs:$site/nixl_cu13.libs:$site/libkvikio/lib64:$site/librmm/lib64:$site/rapids_logger/lib64:$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    local nv
    nv=$(python3 -c 'import nvidia,os;print(list(nvidia.__path__)[0])' 2>/dev/null)
    for lib in "$nv"/cu13/lib "$nv"/cuda_runtime/lib; do
        [ -d "$lib" ] && LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$lib
    done
    note "torch.cuda.gds on NVIDIA's library, for comparison"
    timeout -k 5 40 python3 cufile_clients.py torch "$folder" 2>&1 | tail -3
    for part in torch kvikio bindings nixl fastsafetensors; do
        note "$part"
        # fastsafetensors looks for the device node before it opens anything.
        local made=
        if [ $part = fastsafetensors ] && [ ! -e /dev/nvidia-fs0 ]; then
            touch /dev/nvidia-fs0 2>/dev/null && made=1
        fi
        KVIKIO_COMPAT_MODE=OFF NIXL_PLUGIN_DIR=$site/nixl_cu13.libs/nixl NIXL_LOG_LEVEL=INFO LD_PRELOAD=$ours BEELINE_LOG=warn \
            timeout -k 5 60 python3 cufile_clients.py $part "$folder" >"$out/$part.log" 2>&1
        local rc=$?
        grep -c '^ok' "$out/$part.log" | sed "s/^/ok lines: /"
        grep -v '^ok' "$out/$part.log" | tail -14
        echo "exit code $rc"
        [ -n "$made" ] && rm -f /dev/nvidia-fs0
    done
}

bench() {
    local rows=$out/rows.csv nvidia=${NVIDIA_LIB:-} seconds=${SECONDS_CELL:-0.3}
    : >"$rows"
    if [ -z "$nvidia" ]; then
        nvidia=$(find / -xdev \( -name 'libcufile.so.0' -o -name 'libcufile.so.1.*' \) -not -path "$here/*" 2>/dev/null | head -1)
    fi
    note "bench: NVIDIA's library is ${nvidia:-not found}"
    # It refuses every file without a udev entry for the file system.
    local device
    device=$(stat -c '%Hd:%Ld' "$folder")
    if [ ! -e "/run/udev/data/b$device" ] && mkdir -p /run/udev/data 2>/dev/null; then
        printf 'E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=%s\n' "$(stat -f -c %T "$folder" | sed 's#ext2/ext3#ext4#')" >"/run/udev/data/b$device"
    fi
    printf '{ "logging": { "level": "ERROR" }, "properties": { "allow_compat_mode": true } }\n' >"$folder/cufile.json"
    export CUFILE_ENV_PATH_JSON=$folder/cufile.json CUFILE_LOGFILE_PATH=$out/nvidia.log
    pass() { # library name pass [env..]
        local library=$1 name=$2 number=$3
        shift 3
        env "$@" timeout -k 5 60 ./cufile_bench.here "$library" "$name" "$folder" "$number" "$seconds" >>"$rows" 2>"$out/bench.err" || {
            echo "pass $name $number failed: $(tail -1 "$out/bench.err")"
        }
    }
    for number in $(seq 1 "${PASSES:-3}"); do
        [ -n "$nvidia" ] && pass "$nvidia" nvidia "$number" A=1
        pass "$ours" beeline "$number" A=1
        for wait in ${WAITS:-}; do
            pass "$ours" "beeline-$wait" "$number" "BEELINE_CUFILE_WAIT=$wait"
        done
        for most in ${PARALLEL:-}; do
            printf '{ "execution": { "max_request_parallelism": %s } }\n' "$most" >"$folder/parallel-$most.json"
            pass "$ours" "beeline-p$most" "$number" "CUFILE_ENV_PATH_JSON=$folder/parallel-$most.json"
        done
    done
    [ -n "$nvidia" ] && pass "$nvidia" nvidia last A=1
    pass plain plain-driver 1 A=1
    note "bench: cold, and each byte of a cached file written over once"
    for pair in "${nvidia:-none} nvidia" "$ours beeline"; do
        set -- $pair
        [ "$1" = none ] || timeout -k 5 30 ./cufile_bench.here "$1" "$2" "$folder" 1 4 cold >>"$rows" 2>>"$out/bench.err"
        for number in 1 2 3; do
            [ "$1" = none ] || timeout -k 5 30 ./cufile_bench.here "$1" "$2" "$folder" $number 4 once >>"$rows" 2>>"$out/bench.err"
        done
    done
    note "bench: kvikio's POSIX path"
    if [ -d /tmp/beeline-clients/kvikio ]; then
        local site=/tmp/beeline-clients
        KVIKIO_COMPAT_MODE=ON PYTHONPATH=$site LD_LIBRARY_PATH=$site/libkvikio/lib64:$site/librmm/lib64:$site/rapids_logger/lib64:${LD_LIBRARY_PATH:-} \
            timeout -k 5 60 python3 cufile_clients.py kvikio-bench "$folder" "$seconds" kvikio-posix >>"$rows" 2>"$out/kvikio-bench.err" || tail -3 "$out/kvikio-bench.err"
    fi
    note "tables"
    python3 cufile_table.py "$rows" nvidia beeline ${WAITS:+$(printf 'beeline-%s ' $WAITS)} ${PARALLEL:+$(printf 'beeline-p%s ' $PARALLEL)} plain-driver kvikio-posix
    python3 cufile_table.py "$rows" kvikio-posix beeline | tail -28
    note "rows"
    cat "$rows"
}

for part in "$@"; do $part; done
rm -rf "$folder"
note done
