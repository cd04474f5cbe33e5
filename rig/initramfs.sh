#!/bin/bash
# Builds rig/build/base.cpio.zst: busybox, kernel modules, RDMA tools, C programs, guest scripts.
# Does nothing when it is newer than everything that goes into it.
set -euo pipefail
RIG=$(cd "$(dirname "$0")" && pwd)
BUILD=$RIG/build
KERNEL=$BUILD/kernel/usr
OUT=$BUILD/base.cpio.zst
VERSION=$(ls "$KERNEL/lib/modules" | head -1)

if [ -e "$OUT" ] && [ -z "$(find "$RIG" -path "$BUILD" -prune -o -type f -newer "$OUT" -print -quit)" ]; then
  exit 0
fi

ROOT=$(mktemp -d "$BUILD/root.XXXXXX")
trap 'rm -rf "$ROOT"' EXIT
mkdir -p "$ROOT"/{bin,sbin,proc,sys,dev,tmp,mods,etc,run,root,var/run,usr/bin,usr/lib}
cp "$(command -v busybox)" "$ROOT/bin/busybox"
ln -s busybox "$ROOT/bin/sh"
ln -s busybox "$ROOT/bin/mount"

# Modules, decompressed, in the order in which they load: NAME MODULE...
group() {
  local name=$1 module file plain
  shift
  : > "$ROOT/mods/$name.list"
  for module in "$@"; do
    # A module that this kernel has built in, or no longer has, is none to load.
    modprobe -d "${KERNEL%/usr}" -S "$VERSION" --show-depends "$module" 2> /dev/null ||
      modprobe -d "$KERNEL" -S "$VERSION" --show-depends "$module" 2> /dev/null || true
  done | sed -n 's/^insmod \(.*\.ko[.a-z]*\).*$/\1/p' | awk '!seen[$0]++' | while read -r file; do
    plain=$(basename "$file")
    plain=${plain%.xz}
    plain=${plain%.zst}
    if [ ! -e "$ROOT/mods/$plain" ]; then
      case $file in
        *.xz) xz -dc "$file" > "$ROOT/mods/$plain" ;;
        *.zst) zstd -qdc "$file" > "$ROOT/mods/$plain" ;;
        *) cp "$file" "$ROOT/mods/$plain" ;;
      esac
    fi
    echo "$plain" >> "$ROOT/mods/$name.list"
  done
}
group net virtio_net veth dummy sch_netem
group rdma crc32_generic crc32-pclmul rdma_rxe ib_uverbs rdma_ucm
group nvme nvme
group udmabuf udmabuf
group vfio vfio-pci vfio_iommu_type1

# A program and the libraries it loads.
"$RIG/copy-program.sh" "$ROOT" /usr/bin rdma ip tc ibv_devinfo ibv_rc_pingpong ib_write_bw ib_write_lat
mkdir -p "$ROOT/etc/libibverbs.d"
cp /etc/libibverbs.d/rxe.driver "$ROOT/etc/libibverbs.d/"
PROVIDERS=usr/lib/$(uname -m)-linux-gnu/libibverbs
mkdir -p "$ROOT/$PROVIDERS"
cp -L /"$PROVIDERS"/librxe-rdmav*.so "$ROOT/$PROVIDERS/"
echo 'root:x:0:0:root:/root:/bin/sh' > "$ROOT/etc/passwd"

mkdir -p "$BUILD/bin"
for source in "$RIG"/src/*.c; do
  program=$BUILD/bin/rxe_$(basename "$source" .c)
  gcc -O1 -g -Wall -Wextra -o "$program" "$source" -libverbs
  "$RIG/copy-program.sh" "$ROOT" /usr/bin "$program"
done
cp -r "$RIG/guest/." "$ROOT/"
chmod +x "$ROOT/init"

(cd "$ROOT" && find . | cpio -o -H newc --quiet) | zstd -q -3 -f -o "$OUT.new"
mv "$OUT.new" "$OUT"
