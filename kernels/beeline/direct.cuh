// Straight into the receiver's memory: a receiver whose buffer is registered offers it to the sender, block by block, and a
// sender that has mapped that registration stores its share there, and says so by the flag of the share's first chunk. All
// other parts go through slots. The sender alone decides, so the two cannot disagree.
#pragma once
#include "access.cuh"
#include "wait.cuh"

// Bytes that one bulk copy carries, how many there are at a time, and how many of them on their way in.
#ifndef BEELINE_BULK_PIECE
#define BEELINE_BULK_PIECE 8192
#endif
constexpr u32 BULK_PIECE = BEELINE_BULK_PIECE, BULK_STAGES = 4, BULK_AHEAD = 2;
static_assert(BULK_STAGES - BULK_AHEAD == 2, "as many may still be read when one is loaded");

struct BulkShared {
    alignas(128) u8 stages[BULK_STAGES][BULK_PIECE];
    u64 words[BULK_STAGES];
};

// How long a receiver that gives up waits for a sender that has begun to store into its memory, and how often such a sender
// looks whether anybody has given up.
constexpr u64 LEAVE_NS = 50000000;
constexpr u32 BULK_LOOK = 32;
constexpr u64 STORES_LOOK = 1 << 17;

struct DirectShared {
    u64 place;    // of the part that is sent next; 0: slots
    u32 chosen;   // 1 + the rank to which it goes; 0: give up
    u32 straight; // ranks to which the part of this block went straight
    u32 came;     // and from which it came so
};

DEVICE u64 direct_offer(const Comm &c, u32 receiver, u32 source) {
    return c.windows[source] + AT_OFFERS + ((u64)block_index() * RANKS_MAX + receiver) * 32;
}
// Says how chunk `number` came: 1: it stands for the block's whole share, which is in place already.
DEVICE u64 direct_way(const Comm &c, u32 source, u32 dest, u32 number) {
    u64 ways = ((u64)block_index() * RANKS_MAX + source) * PUSH_SLOTS;
    return c.windows[dest] + AT_PUSH_WAYS + (ways + number % PUSH_SLOTS) * 4;
}

// Tells `source` where its part may go: everything that was queued before has ended, so the memory is free from here on.
// `number`: of the part's first chunk. A sender that has nothing of ours mapped does not look.
DEVICE void direct_invite(const PushMoveArgs &a, u32 source, u32 number) {
    const Comm &c = a.move.comm;
    u64 offer = a.offers[source], bytes = a.move.parts[source].recv_bytes, at = direct_offer(c, c.rank, source);
    // Where somebody has given up, this call will too.
    if (offer && peek(c.windows[c.rank] + AT_POISON)) offer = 0;
    // What earlier kernels wrote there comes before what the sender writes.
    if (offer) fence_system();
    store_packet(at, Quad{(u32)offer, number + 1, (u32)(offer >> 32), number + 1});
    store_packet(at + 16, Quad{(u32)bytes, number + 1, (u32)(bytes >> 32), number + 1});
}

// Takes an offer back before this rank leaves a call that failed, and waits for a sender that has claimed it: until its
// part is there (`flag`), or until it says that it has stopped. It looks for that often.
OUTLINE void direct_withdraw(const Comm &c, u32 source, u32 number, u64 claim, u64 flag) {
    store_packet(direct_offer(c, c.rank, source), Quad{0, number, 0, number});
    fence_order();
    u64 started = now_ns();
    while (load_flag(claim) == number + 1 && (i32)(load_flag(flag) - (number + 1)) < 0 && now_ns() - started < LEAVE_NS) relax();
}

// Whether there is an offer for the part whose first chunk is `number`, at `at`.
DEVICE bool direct_offered(u64 at, u32 number, u64 *offer, u64 *bytes) {
    Quad v = load_packet(at), w = load_packet(at + 16);
    *offer = low(Quad{v.x, v.z, 0, 0}), *bytes = low(Quad{w.x, w.z, 0, 0});
    return v.y == number + 1 && v.w == number + 1 && w.y == number + 1 && w.w == number + 1;
}

// Whether nobody has given up; asked where a block does not wait. All ask the own window. The word of the own host is in host
// memory, of which a device reads a line once at a time, a microsecond each: with `host` one block looks there for all, and
// what it finds is in the window from then on.
DEVICE bool direct_goes_on(const Comm &c, u32 peer, const Expected &e, bool host) {
    u64 own = c.windows[c.rank];
    bool well = (peek(own + AT_FAILED) | peek(own + AT_POISON)) == 0, looks = host && block_index() == 0;
    return (well && !looks) || look_up(c, peer, PHASE_CREDIT, e, 0) != 0;
}

// Counts a part, and tells the host. One thread of one block.
DEVICE void direct_count(const PushMoveArgs &a) {
    u64 own = a.move.comm.windows[a.move.comm.rank] + AT_STRAIGHT;
    u32 count = peek(own) + 1;
    store_word(own, count), store_word(a.straight, count);
}

// Where the table has the entry of which `peer` offers a place for a part of `bytes`, or 0: none, or another length.
DEVICE u64 direct_entry(const PushMoveArgs &a, u32 peer, u64 offer, u64 bytes) {
    u32 entry = (u32)(offer >> OFFER_ENTRY);
    if (entry == 0 || entry > DIRECT_ENTRIES || bytes != a.move.parts[peer].send_bytes) return 0;
    return a.table + ((u64)peer * DIRECT_ENTRIES + entry - 1) * 16;
}
// The address that is offered, or 0: not mapped, another generation, out of bounds. The entry was read twice, one after the other:
// its host takes the generation away before it changes the address, and sets the new one last, and none comes twice.
DEVICE u64 direct_place(u64 offer, u64 bytes, Quad v, Quad again) {
    u64 address = low(v), word = high(v), length = word & ((1ull << ENTRY_GENERATION) - 1);
    u64 generation = offer >> OFFER_GENERATION & ((1u << GENERATION_BITS) - 1), offset = (offer & ((1ull << OFFER_GENERATION) - 1)) * 16;
    bool same = address == low(again) && word == high(again);
    if (word == 0 || !same || word >> ENTRY_GENERATION != generation) return 0;
    return offset <= length && bytes <= length - offset ? address + offset : 0;
}

// The caller's memory to memory of another device, of which `to` is aligned to 16 bytes; nothing beyond the end is written.
DEVICE void direct_copy(u64 to, u64 from, u64 bytes, u32 t, u32 threads) {
    u64 whole = bytes / 16, i = t;
    if (from % 16 == 0) {
        constexpr int AT_ONCE = 4;
#pragma unroll 1
        for (; i + (AT_ONCE - 1) * (u64)threads < whole; i += AT_ONCE * (u64)threads) {
            Quad v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) v[k] = load<Quad>(from + (i + k * threads) * 16);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) store_shared16(to + (i + k * threads) * 16, v[k]);
        }
    }
#pragma unroll 1
    for (; i < whole; i += threads) store_shared16(to + i * 16, load16(from + i * 16, 16));
    for (i = whole * 16 + t; i < bytes; i += threads) store<u8>(to + i, load<u8>(from + i));
}

// The same by one thread, through the block's memory: `to` and `from` are aligned to 16 bytes. `used`: copies that this
// thread has made in this kernel. `go_on` is asked now and then; false: it said no, and nothing is under way any more.
template <class F>
DEVICE bool bulk_copy(BulkShared &b, u64 to, u64 from, u64 bytes, u64 *used, F go_on) {
    u64 whole = bytes & ~15ull, pieces = (whole + BULK_PIECE - 1) / BULK_PIECE, loads = 0;
    bool good = true;
    auto load_next = [&] {
        u32 stage = (*used + loads) % BULK_STAGES;
        bulk_load(at_block(b.stages[stage]), from + loads * BULK_PIECE, (u32)smaller(whole - loads * BULK_PIECE, BULK_PIECE), at_block(&b.words[stage]));
        loads++;
    };
    while (loads < BULK_AHEAD && loads < pieces) load_next();
#pragma unroll 1
    for (u64 k = 0; k < loads; k++) {
        u32 stage = (*used + k) % BULK_STAGES, parity = (*used + k) / BULK_STAGES & 1;
        // The machine's own affair: it waits for nobody's word.
        while (!bulk_loaded(at_block(&b.words[stage]), parity)) relax();
        good = good && (k % BULK_LOOK != BULK_LOOK - 1 || go_on());
        if (!good) continue;
        bulk_store(to + k * BULK_PIECE, at_block(b.stages[stage]), (u32)smaller(whole - k * BULK_PIECE, BULK_PIECE));
        if (loads == pieces) continue;
        bulk_read_all_but_2();
        load_next();
    }
    bulk_stored();
    *used += loads;
    for (u64 i = whole; good && i < bytes; i++) store<u8>(to + i, load<u8>(from + i));
    return good;
}
