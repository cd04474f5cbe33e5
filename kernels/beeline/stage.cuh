// A request whose bytes go through pinned host memory, its slot. A request that fits into the slot is copied at once.
// A longer one is cut into chunks: chunk c goes through cell c % STAGE_CELLS of the slot, by the block of that number,
// which waits for its turn at the cell before each chunk and says when it is done. A block waits for the host alone, so
// blocks need not run at the same time, and no other stream is needed to get them to their end.
// crates/beeline-sys/src/cuda/stage.rs has the same layout in Rust.
#pragma once
#include "access.cuh"

// Looks at a word before the clock is asked.
#ifndef SPINS
#define SPINS 256
#endif

constexpr u32 STAGE_CELLS = 8; // and blocks

// Offsets in the control block of a request, in pinned host memory.
constexpr u64 STAGE_FAILED = 16;  // u32: the pass in which a block gave up waiting
constexpr u64 STAGE_LINES = 128;  // a line for each block: looks of several blocks at one line of host memory come one after
constexpr u64 STAGE_LINE = 128;   // the other, a microsecond each
// Offsets in a line; what is not of a cell stands in all.
constexpr u64 STAGE_ADDRESS = 0;  // u64: of the first byte in the device
constexpr u64 STAGE_FIRST = 8;    // u64: where it lies in the slot, below the length of a cell
constexpr u64 STAGE_LAST = 16;    // u64: where the bytes end, counted likewise
constexpr u64 STAGE_RING = 24;    // u64: not 0: chunk by chunk
constexpr u64 STAGE_TURN = 32;    // u64: 1 + the chunk that the device may deal with, and above its bytes
constexpr u64 STAGE_LIMIT = 40;   // u64: how many chunks there are; the host may lower it
constexpr u64 STAGE_DONE = 64;    // u32: 1 + the chunk that the device is done with

static_assert(STAGE_FIRST == STAGE_ADDRESS + 8 && STAGE_LAST % 16 == 0 && STAGE_RING == STAGE_LAST + 8, "two loads of 16 bytes");
static_assert(STAGE_ADDRESS % 16 == 0 && STAGE_LINES % 16 == 0 && STAGE_LINE % 16 == 0, "aligned");

struct StageArgs {
    u64 control, slot;
    u64 timeout_ns; // of each wait
    u32 cell;       // bytes of one, a power of two
    u32 pass;       // number of the request among those of its control block
    u32 out;        // not 0: from the device to the slot
    u32 unused;
};
struct StageShared {
    u64 address, first, last, ring, turn;
};

// `bytes` from anywhere to anywhere, 16 at a time where `to` is aligned to that; quick where both sides agree modulo 16.
// Plain accesses. Where all is copied at once, the stream's wait before the kernel and the stream's write behind it order
// them. Chunk by chunk, what the host wrote was acquired by a thread of this block, and the others met it at a barrier after
// that; what is written goes out before the release of thread 0, which meets the others at a barrier before.
DEVICE void stage_copy(u64 to, u64 from, u64 bytes, u64 i, u64 step) {
    u64 head = smaller((16 - to % 16) % 16, bytes), whole = (bytes - head) / 16, tail = head + whole * 16;
    if (i < head) store<u8>(to + i, load<u8>(from + i));
    if (i < bytes - tail) store<u8>(to + tail + i, load<u8>(from + tail + i));
    to += head, from += head;
    if (from % 16 == 0) {
#pragma unroll 1
        for (; i + 3 * step < whole; i += 4 * step) {
            Quad v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = load<Quad>(from + (i + k * step) * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) store(to + (i + k * step) * 16, v[k]);
        }
    }
#pragma unroll 1
    for (; i < whole; i += step) store(to + i * 16, load16(from + i * 16, 16));
}

// Waits until it is the device's turn with chunk `c`; answers the chunk's word, or 0: no more.
OUTLINE u64 stage_turn(const StageArgs &a, u64 line, u64 c) {
    u64 started = 0;
    for (;;) {
        for (u32 spin = 0; spin < SPINS; spin++) {
            // Both under way at once.
            u64 limit = peek_wide(line + STAGE_LIMIT), word = load_flag_wide(line + STAGE_TURN);
            if (c >= limit) return 0;
            if ((u32)word == (u32)(c + 1)) return word;
            relax();
        }
        u64 now = now_ns();
        if (started == 0) started = now;
        if (now - started >= a.timeout_ns) {
            store_word(a.control + STAGE_FAILED, a.pass);
            return 0;
        }
    }
}

DEVICE void stage(const StageArgs &a, StageShared &s) {
    u32 t = thread_index(), threads = block_threads(), block = block_index();
    const u64 line = a.control + STAGE_LINES + block * STAGE_LINE;
    if (t == 0) {
        // Written before the host opened the gate that the stream has waited at. All at once: a look at host memory takes
        // microseconds, and one behind another would be most of what a small request costs. So would a fence at the end:
        // the stream itself says that the kernel has ended, behind its own.
        Quad a0 = load_shared16(line + STAGE_ADDRESS), a1 = load_shared16(line + STAGE_LAST);
        s.address = low(a0), s.first = high(a0), s.last = low(a1), s.ring = high(a1);
    }
    barrier(0, threads);
    u64 address = s.address, first = s.first, last = s.last;
    if (s.ring == 0) {
        u64 slot = a.slot + first;
        stage_copy(a.out ? slot : address, a.out ? address : slot, last - first, (u64)block * threads + t, (u64)STAGE_CELLS * threads);
    } else {
        for (u64 c = block;; c += STAGE_CELLS) {
            if (t == 0) s.turn = stage_turn(a, line, c);
            barrier(0, threads);
            u64 turn = s.turn;
            if (turn == 0) break;
            u64 start = c == 0 ? first : c * a.cell;
            u64 slot = a.slot + (u64)block * a.cell + start % a.cell, device = address + (start - first);
            stage_copy(a.out ? slot : device, a.out ? device : slot, turn >> 32, t, threads);
            barrier(0, threads);
            if (t == 0) release_flag(line + STAGE_DONE, (u32)(c + 1));
        }
    }
}
