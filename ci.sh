#!/usr/bin/env bash
# Everything that proves a change. CI and people run the same script.
#
#   ./ci.sh          all of it
#   ./ci.sh quick    format, lints, unit tests
#   ./ci.sh STEP..   single steps: fmt clippy test doc aarch64 fuzz kernels licences rig, and
#                    sanitize, which is not part of all: the thread sanitizer does not see system
#                    calls made without libc, and takes an address that was unmapped and mapped again
#                    for a race
#
# Needs a Rust toolchain and a C linker. cargo-nextest is used where it is installed.
#
# A test that lacks something (root, a kernel's feature, a GPU) prints SKIP. With CI set only what
# .ci/skips.txt lists may be skipped; elsewhere also what .ci/skips-elsewhere.txt lists.
set -euo pipefail
cd "$(dirname "$0")"
# Tools of tests (losetup, mkfs) live there, where an ordinary user's PATH does not lead.
export PATH="$PATH:/usr/sbin:/sbin"
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}
skips=target/ci-skips.log

note() { printf '\n== %s\n' "$*"; }

step_fmt() {
    cargo fmt --all --check
    (cd fuzz && cargo fmt --check)
}

step_clippy() {
    cargo clippy --workspace --all-targets --locked -- -D warnings
}

step_test() {
    local log=target/ci-test.log
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --workspace --locked --profile ci 2>&1 | tee "$log"
    else
        cargo test --workspace --locked --lib --bins --tests -- --nocapture --test-threads 2 2>&1 | tee "$log"
    fi
    cargo test --workspace --locked --doc
    cat "$log" >>"$skips"
}

step_doc() {
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --document-private-items
}

# Nothing assumes x86-64 outside cfg.
step_aarch64() {
    local target=aarch64-unknown-linux-gnu
    if [ -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
        cargo check --workspace --locked --target "$target"
    else
        echo "SKIP aarch64-std" | tee -a "$skips"
    fi
}

step_fuzz() {
    (cd fuzz && cargo run --quiet --locked --bin smoke -- --seconds "${FUZZ_SECONDS:-5}")
    # Packets of a peer reach the program from outside, with nothing in between: longer for those.
    if [ -n "${CI:-}" ]; then
        (cd fuzz && cargo run --quiet --locked --bin smoke -- --seconds 60 connected)
    fi
}

# The committed PTX is what the sources give (where NVRTC is), and the protocols work on CPU threads.
step_kernels() {
    cargo xtask kernels --check | tee -a "$skips"
}

step_licences() {
    cargo xtask licences
}

# The software NIC against the kernel's rdma_rxe, in a QEMU guest.
step_rig() {
    cargo xtask rig 2>&1 | tee target/ci-rig.log
    grep -a '^SKIP' target/ci-rig.log >>"$skips" || true
}

# Address and thread sanitizers over the unsafe crate and over verbs; they need a nightly toolchain.
step_sanitize() {
    cargo xtask sanitize 2>&1 | tee target/ci-sanitize.log
    grep -a '^SKIP' target/ci-sanitize.log >>"$skips" || true
}

main() {
    mkdir -p target
    : >"$skips"
    case "${1:-all}" in
    all) set -- fmt clippy test doc aarch64 fuzz kernels licences rig ;;
    quick)
        cargo fmt --all --check
        cargo clippy --workspace --all-targets --locked -- -D warnings
        cargo test --workspace --locked --lib --bins
        return
        ;;
    esac
    local step
    for step in "$@"; do
        note "$step"
        "step_$step"
    done
    note "skips"
    if [ -n "${CI:-}" ]; then
        cargo xtask skips "$skips" .ci/skips.txt
    else
        cargo xtask skips "$skips" .ci/skips.txt .ci/skips-elsewhere.txt
    fi
    note "done: $*"
}

main "$@"
