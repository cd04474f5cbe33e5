#!/bin/bash
# Boots the guest, runs rig/guest/tests/TEST.sh in it, and answers with its exit status.
#
#   rig/run.sh TEST [PROGRAM...]
#
# Programs are copied to /usr/bin of the guest. In the environment:
#   RIG_ARGS      words the test gets as its arguments
#   RIG_TIMEOUT   seconds until the guest is given up (default 300)
#   RIG_CPUS, RIG_MEMORY  of the guest (default 2, 2048 MiB)
# The kernel's messages go to rig/build/TEST.kernel.log. Status 111: the guest gave no answer.
set -euo pipefail
RIG=$(cd "$(dirname "$0")" && pwd)
BUILD=$RIG/build
TEST=$1
shift

if ! command -v qemu-system-x86_64 > /dev/null || [ ! -e "$BUILD/kernel/.done" ]; then
  echo "SKIP qemu"
  exit 77
fi
bash "$RIG/initramfs.sh"
VMLINUZ=$(find "$BUILD/kernel" -name 'vmlinuz*' | head -1)

WORK=$(mktemp -d "$BUILD/run.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$WORK/root/etc"
[ $# -eq 0 ] || bash "$RIG/copy-program.sh" "$WORK/root" /usr/bin "$@"
echo "${RIG_ARGS:-}" > "$WORK/root/etc/rig-args"
# A second archive behind the first; the kernel unpacks both. It must start on a multiple of four.
cp "$BUILD/base.cpio.zst" "$WORK/initrd"
truncate -s %512 "$WORK/initrd"
(cd "$WORK/root" && find . | cpio -o -H newc --quiet) >> "$WORK/initrd"

# The memory test has a drive whose controller offers memory of its own to other devices.
DEVICES=()
if [ "$TEST" = memory ]; then
  truncate -s 16M "$WORK/drive.img"
  DEVICES=(-drive "file=$WORK/drive.img,if=none,id=drive,format=raw"
    -device nvme,drive=drive,serial=RIG-NVME,cmb_size_mb=64)
fi

START=$(date +%s)
STATUS=0
# Software emulation: where /dev/kvm exists, a stock kernel may not run under it (nested, filtered).
timeout "${RIG_TIMEOUT:-300}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -machine q35 \
  -m "${RIG_MEMORY:-2048}" -smp "${RIG_CPUS:-2}" -nodefaults -no-user-config -display none \
  -monitor none -no-reboot -device isa-debug-exit,iobase=0xf4,iosize=4 \
  -serial "file:$BUILD/$TEST.kernel.log" -serial stdio "${DEVICES[@]}" \
  -kernel "$VMLINUZ" -initrd "$WORK/initrd" \
  -append "console=ttyS0 quiet panic=-1 no_timer_check rig_test=$TEST" < /dev/null || STATUS=$?
# isa-debug-exit: the guest writes status + 16, QEMU exits with that times two plus one.
if [ "$STATUS" -ge 33 ] && [ $((STATUS % 2)) = 1 ]; then
  STATUS=$(((STATUS - 33) / 2))
else
  echo "rig: no answer from the guest (QEMU status $STATUS); its last messages:" >&2
  tail -15 "$BUILD/$TEST.kernel.log" >&2 || true
  STATUS=111
fi
echo "rig: $TEST: status $STATUS after $(($(date +%s) - START)) s"
exit "$STATUS"
