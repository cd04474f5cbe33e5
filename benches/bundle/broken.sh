#!/usr/bin/env bash
# Drivers that are broken on purpose, on a machine with a working one, as root, each in a mount namespace
# of its own: the error must name what is wrong. Prints what the command says; exits 1 where it succeeded.
set -uo pipefail
cd "$(dirname "$0")"
failed=0
file=$(mktemp -p "${TMPDIR:-/tmp}" beeline-broken.XXXXXX.safetensors)
trap 'rm -f "$file"' EXIT
python3 -c '
import json, struct, sys
header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header + bytes(1 << 20))' "$file"
fails() { # name, wanted text, command
    local name=$1 wanted=$2 out
    shift 2
    out=$(timeout 60 "$@" 2>&1)
    local code=$?
    echo "-- $name [exit $code]"
    echo "$out" | head -8
    if [ $code = 0 ] || [ $code -ge 124 ] || ! grep -qiE "$wanted" <<<"$out"; then
        echo "   WRONG: wanted a failure that says '$wanted'"
        failed=1
    fi
}
load="./beeline load $file --to cuda:0"
fails "no device visible" "CUDA_VISIBLE_DEVICES|no device" env CUDA_VISIBLE_DEVICES=-1 $load
fails "an ordinal too many" "cuda:63" ./beeline load "$file" --to cuda:63
fails "no device node" "/dev/nvidia|device node|no device" unshare -m sh -c "for n in /dev/nvidia*; do [ -c \$n ] && mount --bind /dev/null \$n; done; exec $load"
lib=$(ldconfig -p | awk '/libcuda\.so\.1 .*x86-64/ {print $NF; exit}')
[ -n "$lib" ] || lib=$(find / -xdev -name 'libcuda.so.1' 2>/dev/null | head -1)
lib=$(readlink -f "$lib")
fails "no library" "libcuda" unshare -m sh -c "mount --bind /dev/null $lib; exec $load"
if command -v gcc >/dev/null; then
    dir=$(mktemp -d)
    echo 'int cuInit(unsigned f){return 803;} int cuDriverGetVersion(int*v){*v=13000;return 0;}' >$dir/a.c
    gcc -shared -fPIC -Wl,-soname,libcuda.so.1 $dir/a.c -o $dir/libcuda.so.1
    fails "a library of another version than the module" "version|mismatch|803|no function" env LD_LIBRARY_PATH=$dir $load
    rm -r $dir
fi
fails "out of memory" "memory" python3 - "$file" <<'P'
import subprocess, sys, torch
torch.cuda.init(); free, _ = torch.cuda.mem_get_info()
held = []
step = 1 << 30
while step >= 1 << 20:
    try: held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
    except RuntimeError: step >>= 1
sys.exit(subprocess.run(["./beeline", "load", sys.argv[1], "--to", "cuda:0"]).returncode)
P
exit $failed
