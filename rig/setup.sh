#!/bin/bash
# Everything the rig needs, from Debian's packages only. Idempotent: a second call does nothing.
#
#   rig/setup.sh
#
# Needs root (for apt) on Debian 12 or later, and the network once: about 165 MB, 40 seconds.
# The result is in rig/build, which git ignores.
set -euo pipefail
RIG=$(cd "$(dirname "$0")" && pwd)
BUILD=$RIG/build
APT=$BUILD/apt
KERNEL=$BUILD/kernel
export DEBIAN_FRONTEND=noninteractive

START=$(date +%s)
say() { echo "rig: $* (+$(($(date +%s) - START)) s)"; }

# The archives this machine uses already, so that no address is written here.
sources() { sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources; }
ARCHIVE=$(sources | head -1)
SECURITY=$(sources | tail -1)
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$KEYS" ] || KEYS=/etc/apt/trusted.gpg.d

# apt with a state of its own, so that the machine's sources stay as they are: NAME COMMAND...
own_apt() {
  local dir=$APT/$1
  shift
  "$@" -o "Dir::Etc::sourcelist=$dir/list" -o "Dir::Etc::sourceparts=$dir/parts" \
    -o "Dir::State::lists=$dir/lists" -o "Dir::Cache::archives=$dir/archives" \
    -o "Dir::Cache::pkgcache=$dir/pkg.bin" -o "Dir::Cache::srcpkgcache=$dir/src.bin" \
    -o APT::Sandbox::User=root -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3 \
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
}

# NAME LINE...: sources for own_apt
own_sources() {
  local name=$1
  shift
  mkdir -p "$APT/$name"/{parts,lists/partial,archives/partial}
  printf '%s\n' "$@" > "$APT/$name/list"
  own_apt "$name" apt-get -q update > /dev/null
}

install_qemu() {
  command -v qemu-system-x86_64 > /dev/null && return
  # Debian 12's own QEMU is too old for some devices of the rig: take the backport.
  own_sources qemu "deb [signed-by=$KEYS] $ARCHIVE bookworm main" \
    "deb [signed-by=$KEYS] $ARCHIVE bookworm-backports main" \
    "deb [signed-by=$KEYS] $SECURITY bookworm-security main"
  own_apt qemu apt-get -y -q install -t bookworm-backports --no-install-recommends \
    qemu-system-x86 > /dev/null
  say "$(qemu-system-x86_64 --version | head -1)"
}

install_tools() {
  local missing=()
  for package in busybox-static cpio kmod zstd xz-utils iproute2 gcc libc6-dev rdma-core \
    ibverbs-utils ibverbs-providers perftest libibverbs-dev; do
    dpkg -s "$package" > /dev/null 2>&1 || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  apt-get -q -o DPkg::Lock::Timeout=600 update > /dev/null
  apt-get -y -q -o DPkg::Lock::Timeout=600 install --no-install-recommends "${missing[@]}" > /dev/null
  say "installed ${missing[*]}"
}

# A stock kernel with rdma_rxe and PCI peer-to-peer DMA; the latter is off before Debian's 7.x.
unpack_kernel() {
  [ ! -e "$KERNEL/.done" ] || return 0
  own_sources kernel "deb [signed-by=$KEYS] $ARCHIVE trixie-backports main"
  local image version
  image=$(own_apt kernel apt-cache depends linux-image-amd64 |
    awk '/Depends: linux-image-[0-9]/ { print $2; exit }')
  version=${image#linux-image-}
  rm -rf "$KERNEL" && mkdir -p "$BUILD/deb" "$KERNEL"
  (cd "$BUILD/deb" && {
    own_apt kernel apt-get -q download \
      "linux-binary-$version" "linux-modules-$version" "linux-base-$version" > /dev/null 2>&1 ||
      own_apt kernel apt-get -q download "linux-image-$version" > /dev/null
  })
  for deb in "$BUILD"/deb/linux-*.deb; do dpkg -x "$deb" "$KERNEL"; done
  rm -rf "$BUILD/deb"
  # Newer packages keep modules under /usr/lib, older ones under /lib.
  [ -d "$KERNEL/usr/lib/modules" ] || { mkdir -p "$KERNEL/usr/lib" && mv "$KERNEL/lib/modules" "$KERNEL/usr/lib/"; }
  depmod -b "$KERNEL/usr" "$version"
  touch "$KERNEL/.done"
  say "kernel $version"
}

mkdir -p "$BUILD"
install_qemu
install_tools
unpack_kernel
bash "$RIG/initramfs.sh"
say "ready"
