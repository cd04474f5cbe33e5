// Waiting: every loop on somebody else's word ends by its deadline, by an abort, or by a failure of the
// communicator, and says whose fault it was.
#pragma once
#include "layout.cuh"

// Looks at the word before the clock and the host are asked.
#ifndef SPINS
#define SPINS 2048
#endif

// The header that is to come from a peer: its second word, its number (a counter that wraps: 0 is one like any
// other), and whether it is this block's matter at all.
struct Expected {
    u64 word;
    u32 number, mine;
};

// The header that `e` expects from `peer`: 1 it says what ours says, 0 not there (yet), -1 it
// says something else.
DEVICE int compare_header(const Comm &c, u32 peer, const Expected &e, u64 *theirs) {
    if (!e.mine) return 0;
    u32 number = e.number;
    u64 at = c.windows[c.rank] + AT_HEADERS + ((u64)peer * HEADERS + number % HEADERS) * 32;
    Quad a = load_packet(at), b = load_packet(at + 16);
    if (a.y != number || a.w != number || b.y != number || b.w != number) return 0;
    theirs[0] = (u64)a.x | (u64)a.z << 32;
    theirs[1] = (u64)b.x | (u64)b.z << 32;
    return theirs[0] == c.call && theirs[1] == e.word ? 1 : -1;
}

OUTLINE void fail(const Comm &c, u32 code, u32 peer, u32 phase, u64 waited, u64 word, const u64 *theirs) {
    u64 own = c.windows[c.rank];
    if (swap_if_zero(own + AT_FAILED, code) != 0) return;
    store_word(c.report + 4, peer);
    store_wide(c.report + 8, c.call);
    store_wide(c.report + 16, word);
    store_wide(c.report + 24, theirs[0]);
    store_wide(c.report + 32, theirs[1]);
    store_wide(c.report + 40, waited);
    store_word(c.report + 48, block_index());
    store_word(c.report + 52, phase);
    release_flag(c.report, code);
    for (u32 p = 0; p < c.ranks; p++)
        if (p != c.rank && c.windows[p]) store_word(c.windows[p] + AT_POISON, c.rank + 1);
}

// The slow look of a waiting thread, which began to wait at `started` (0: at this first look). Answers when it
// began, or 0: give up.
OUTLINE u64 look_up(const Comm &c, u32 peer, u32 phase, const Expected &e, u64 started) {
    u64 own = c.windows[c.rank], theirs[2] = {0, 0}, now = now_ns();
    if (started == 0) started = now;
    u64 waited = now - started;
    if (peek(own + AT_FAILED) != 0) return 0;
    // The host sees what a kernel cannot: whether the peer's process is still there.
    u64 calls = peek(own + AT_CALLS + peer * 16) + peek(own + AT_CALLS + peer * 16 + 4);
    store_wide(c.report + WAITING_AT, calls << 32 | (peer + 1));
    u32 poison = peek(own + AT_POISON);
    if (compare_header(c, peer, e, theirs) < 0)
        fail(c, MISMATCH, peer, phase, waited, e.word, theirs);
    else if (peek(c.abort) != 0)
        fail(c, ABORTED, peer, phase, waited, e.word, theirs);
    else if (poison != 0)
        fail(c, PEER_FAILED, poison - 1, phase, waited, e.word, theirs);
    else if (waited >= c.timeout_ns)
        fail(c, DEADLINE, peer, phase, waited, e.word, theirs);
    else
        return started;
    return 0;
}

// Waits until `word`, a counter that wraps, has come to `value`.
OUTLINE bool wait_reaches(const Comm &c, u64 word, u32 value, u32 peer, u32 phase, const Expected &e) {
    u64 started = 0;
    for (;;) {
#pragma unroll 1
        for (u32 spin = 0; spin < SPINS; spin++) {
            if ((i32)(load_flag(word) - value) >= 0) return true;
            relax();
        }
        started = look_up(c, peer, phase, e, started);
        if (UNLIKELY(started == 0)) return false;
    }
}

// Block 0 tells a peer what call this is, the `number`th between the two. Calls are counted by that block
// alone; `check_header` counts the other way.
DEVICE void send_header(const Comm &c, u32 peer, u32 number, u64 word) {
    u64 at = c.windows[peer] + AT_HEADERS + ((u64)c.rank * HEADERS + number % HEADERS) * 32;
    store_packet(at, Quad{(u32)c.call, number, (u32)(c.call >> 32), number});
    store_packet(at + 16, Quad{(u32)word, number, (u32)(word >> 32), number});
    store_word(c.windows[c.rank] + AT_CALLS + peer * 16, number);
}

// After the data of `peer` is in: its header must be there (data went after it) and say the same.
OUTLINE bool check_header(const Comm &c, u32 peer, const Expected &e) {
    u64 started = 0, theirs[2];
    for (;;) {
#pragma unroll 1
        for (u32 spin = 0; spin < SPINS; spin++) {
            int same = compare_header(c, peer, e, theirs);
            if (same > 0) {
                store_word(c.windows[c.rank] + AT_CALLS + peer * 16 + 4, e.number);
                return true;
            }
            if (same < 0) break;
            relax();
        }
        started = look_up(c, peer, PHASE_HEADER, e, started);
        if (started == 0) return false;
    }
}
