#!/usr/bin/env bash
# Real clients of NCCL over libnccl.so.2 on a machine with two GPUs: nccl_clients.sh FOLDER [PART..]
#
# FOLDER has libnccl.so.2 (cargo build --release -p beeline-nccl) and may be the one this script is in. PyTorch brings an
# NCCL of its own, found by an RPATH; LD_PRELOAD puts ours first in the scope of every library, and each part prints
# where calls really go. Parts: torch training faults torchrun cupy ctypes jax (all without a word, within BUDGET=150
# seconds; what hangs is killed and named, and the rest goes on). Prints text; logs go to $OUT.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "${1:-$here}" && pwd)
[ $# -gt 0 ] && shift
export OUT=${OUT:-$folder/results} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$OUT"
echo "commit $(cat "$folder/COMMIT" 2>/dev/null || git -C "$here" rev-parse HEAD 2>/dev/null)"
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2>&1 | head -4
timeout -k 5 $((${BUDGET:-150} + 10)) "${PYTHON:-python3}" "$here/nccl_clients.py" "$folder" "$@" 2>&1 | tee "$OUT/clients.txt"
exit "${PIPESTATUS[0]}"
