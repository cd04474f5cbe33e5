// Lines: a warp stores four lines of 128 bytes at once, each with a flag in its last four bytes. Like packets, without a
// fence, but with a sixteenth of the link for flags instead of half: 120 bytes of data and 8 of flag, so that every thread has
// whole elements to reduce. What is only moved has less flag (moved.cuh), in the same places.
//
// That a line which a warp stored by one instruction is never seen in part, where the flag at its end is seen, is a
// property of NVLink and of devices from compute capability 7.0 on, on which NCCL's protocol of the same kind relies too.
// It is no promise of the memory model: lines are used only between devices that say they have native atomics over
// their link (executor/cuda/join.rs).
//
// Some warps send, the others take. A part that has no room in a block's region goes in rounds, each a message; messages
// are counted together with those of packets.
#pragma once
#include "ll.cuh"

constexpr u32 LINE_DATA = 120;
constexpr u32 LINE_GROUP = 4 * LINE_DATA; // what a warp carries at once
constexpr u32 LINE_SPAN_MIN = 8 * LINE_GROUP;
constexpr u32 LINE_SENDERS_MAX = 4; // warps
// Groups that a warp reads before it stores them, where it reduces. What arrives is taken one by one: two cost registers, and with
// them the room for a block beside another, for nothing (measured on two H200).
#ifndef BEELINE_LINES_REDUCED
#define BEELINE_LINES_REDUCED 1
#endif
constexpr u32 LINES_REDUCED = BEELINE_LINES_REDUCED;
constexpr u64 LINE_OWN_MAX = 16384; // bytes of a block's own part that those who send copy on top

// What this block carries to or from one peer: two divisions each, made where they cost no time.
struct LinePart {
    u32 start, bytes, rounds;
};
struct LineShared {
    LlShared ll;
    LinePart out[RANKS_MAX], in[RANKS_MAX]; // of what is moved
    u32 sent[LINE_SENDERS_MAX]; // groups that this warp has read are below
    // Takers that must give up say so before the barrier of a round, and all look after it: they leave together.
    u32 takers_bad[2];
};
constexpr u32 LINE_TAKERS = 1; // id of a barrier

// What a block carries of `bytes`: whole groups, the same on both sides.
DEVICE u64 line_share(const Comm &c, u64 bytes, u64 *start) {
    u64 span = (bytes + c.ll_blocks - 1) / c.ll_blocks;
    span = (span + LINE_GROUP - 1) / LINE_GROUP * LINE_GROUP;
    span = span < LINE_SPAN_MIN ? LINE_SPAN_MIN : span;
    *start = span * block_index();
    return *start < bytes ? smaller(bytes - *start, span) : 0;
}
DEVICE u32 line_groups(u64 share) { return (u32)((share + LINE_GROUP - 1) / LINE_GROUP); }
// Groups of a round, and rounds of a share.
DEVICE u32 line_room(const Comm &c) { return c.line_span / LINE_GROUP; }
DEVICE u32 line_rounds(const Comm &c, u64 share) { return (line_groups(share) + line_room(c) - 1) / line_room(c); }
DEVICE u32 least(u32 a, u32 b) { return a < b ? a : b; }
// Where lines from `source` to `dest` lie, in the memory of `dest`.
DEVICE u64 line_region(const Comm &c, u32 source, u32 dest, u32 number) {
    u64 region = c.line_span / LINE_DATA * 128;
    u64 slot = (u64)lane_of(source, dest) * LL_SLOTS + number % LL_SLOTS;
    return c.windows[dest] + c.line_at + (slot * c.ll_blocks + block_index()) * region;
}

// A thread of a warp: where its 16 bytes of a group are, of which the last of each line's are 8 and the flag.
struct Lane {
    u32 at, data; // in the lines, and in the data
    bool last;
};
DEVICE Lane lane() {
    u32 l = thread_index() % 32;
    return Lane{l * 16, l / 8 * LINE_DATA + l % 8 * 16, l % 8 == 7};
}
struct Pair {
    u64 a, b;
};
// What is not aligned, or ends within eight bytes: code apart, so that what is does not wait where the ways meet.
OUTLINE Pair line_gather(Lane l, u64 from, u64 left) {
    Pair v = {0, 0};
    if (l.data < left) v.a = load8(from + l.data, left - l.data);
    if (!l.last && l.data + 8 < left) v.b = load8(from + l.data + 8, left - l.data - 8);
    return v;
}
OUTLINE void line_scatter(Lane l, u64 to, u64 left, Pair v) {
    if (l.data < left) store8(to + l.data, left - l.data, v.a);
    if (!l.last && l.data + 8 < left) store8(to + l.data + 8, left - l.data - 8, v.b);
}
// This thread's bytes of the groups at `from`, `from + step`.., of which `left` bytes are there from the first one on. All are asked
// for before one is used.
template <int AT_ONCE>
DEVICE void line_read(const Lane &l, u64 from, u64 left, u64 step, Pair (&v)[AT_ONCE]) {
    if ((from | left) % 8 == 0) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u64 at = k * step + l.data;
            v[k] = Pair{0, 0};
            if (at < left) v[k].a = load<u64>(from + at);
            if (!l.last && at + 8 < left) v[k].b = load<u64>(from + at + 8);
        }
    } else {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) v[k] = k * step < left ? line_gather(l, from + k * step, left - k * step) : Pair{0, 0};
    }
}
DEVICE void line_write(const Lane &l, u64 to, u64 left, Pair v) {
    if ((to | left) % 8 == 0) {
        if (l.data < left) store<u64>(to + l.data, v.a);
        if (!l.last && l.data + 8 < left) store<u64>(to + l.data + 8, v.b);
    } else {
        line_scatter(l, to, left, v);
    }
}
DEVICE u64 line_flag(u32 number) { return (u64)ll_flag(number) << 32 | ll_flag(number); }
DEVICE void line_put(const Lane &l, u64 to, u64 flag, Pair v) {
    u64 b = l.last ? flag : v.b;
    // Threads that went apart before are together again: eight of them store the line in one instruction.
    warp_barrier();
    store_line(to + l.at, Quad{(u32)v.a, (u32)(v.a >> 32), (u32)b, (u32)(b >> 32)}, l.last);
}

// Group `index` of message `number`, waited for; all threads of the warp together.
DEVICE bool line_take(const Comm &c, LlShared &s, const Lane &l, u32 source, u32 number, u32 index, Pair &v) {
    u64 flag = line_flag(number), at = line_region(c, source, c.rank, number) + (u64)index * 512 + l.at, started = 0;
    // They load it in one instruction too; each look below begins with all of them.
    warp_barrier();
#pragma unroll 1
    for (;;) {
#pragma unroll 1
        for (u32 spin = 0; spin < SPINS; spin++) {
            Quad q = load_line(at, l.last);
            v = Pair{(u64)q.x | (u64)q.y << 32, (u64)q.z | (u64)q.w << 32};
            if (warp_all(!l.last || v.b == flag)) return true;
            relax();
        }
        started = look_up(c, source, PHASE_DATA, s.headers[source], started);
        if (UNLIKELY(!warp_all(started != 0))) return false;
    }
}

// Which warps of a block send, and which take; the last one deals with headers.
DEVICE u32 line_senders() {
    u32 warps = ll_workers() / 32 / 3;
    return warps < 1 ? 1 : warps > LINE_SENDERS_MAX ? LINE_SENDERS_MAX : warps;
}
DEVICE bool line_begin(const Comm &c, LineShared &s, u32 sends, u32 takes, u32 to, u32 from, u64 out, u64 in) {
    if (thread_index() < LINE_SENDERS_MAX) s.sent[thread_index()] = 0;
    if (thread_index() < 2) s.takers_bad[thread_index()] = 0;
    bool good = ll_begin(c, s.ll, sends, takes, to, from, out, in);
    // The last warp may have found something wrong already, seen by some threads of another warp and not by all; they
    // stay together from here on.
    return warp_all(good);
}

// Whether there is room for `round` at `peer`; waits for it, a warp together. The first one has it from the beginning.
DEVICE bool line_await_room(const Comm &c, LineShared &s, u32 peer, u32 round) {
    if (round == 0) return true;
    u64 consumed = c.windows[c.rank] + ll_counters(c, peer) + 8;
    u32 number = s.ll.counters[peer].sent + 1 + round;
    bool room = true;
    if (thread_index() % 32 == 0) room = wait_reaches(c, consumed, number - LL_SLOTS, peer, PHASE_CREDIT, s.ll.headers[peer]);
    return warp_all(room);
}
// After a round that others follow: once all takers have read it, its place is free. False: give up.
DEVICE bool line_free(const Comm &c, LineShared &s, u32 takes, u32 round, bool good, u32 t, u32 takers) {
    if (!good) set(s.takers_bad[round % 2], 1);
    barrier(LINE_TAKERS, takers);
    if (read(s.takers_bad[round % 2])) return false;
    if (t < c.ranks && takes >> t & 1) store_word(c.windows[t] + ll_counters(c, c.rank) + 8, s.ll.counters[t].received + round + 1);
    return true;
}

// Each rank's part to each rank of `send_mask`; parts of `recv_mask` and the own one are reduced in the
// order of ranks.
template <class T, int OP>
DEVICE void line_reduce(const ReduceArgs &a, LineShared &s) {
    const Comm &c = a.comm;
    u64 start, share = line_share(c, a.bytes, &start);
    u32 groups = line_groups(share), room = line_room(c), rounds = line_rounds(c, share);
    u32 warp = thread_index() / 32, warps = ll_workers() / 32, senders = line_senders();
    bool works = warp < warps;
    u32 header = thread_index() - ll_workers(), mine = rounds * ((a.send_mask >> header % 32 & 1) + (a.recv_mask >> header % 32 & 1));
    begin_early(a, s.ll, a.recv_mask, mine);
    Weigh w = weigh<T>(a);
    Weighed<T, OP> weighed = {w};
    Lane l = lane();
    bool good = line_begin(c, s, a.send_mask, a.recv_mask, a.send_mask, a.recv_mask, a.word, a.word);
    if (good && a.recv_mask == 0 && rounds <= 1) admit(c, s.ll, ADMIT_HEARD);
    if (good && works && warp < senders) {
#pragma unroll 1
        for (u32 round = 0; good && round < rounds; round++) {
            u32 end = least((round + 1) * room, groups);
#pragma unroll 1
            for (u32 p = 0; good && p < c.ranks; p++)
                if (a.send_mask >> p & 1) good = line_await_room(c, s, p, round);
#pragma unroll 1
            for (u32 g = round * room + warp; good && g < end; g += senders * LINES_REDUCED) {
                u64 offset = (u64)g * LINE_GROUP;
#pragma unroll 1
                for (u32 step = 1; step < c.ranks; step++) {
                    u32 p = (c.rank + step) % c.ranks, number = s.ll.counters[p].sent + 1 + round;
                    if (!(a.send_mask >> p & 1)) continue;
                    Pair v[LINES_REDUCED];
                    line_read(l, a.in + p * a.stride + start + offset, share - offset, senders * LINE_GROUP, v);
                    u64 to = line_region(c, c.rank, p, number) + (u64)(g - round * room) * 512;
#pragma unroll
                    for (u32 k = 0; k < LINES_REDUCED; k++)
                        if (g + k * senders < end) line_put(l, to + k * senders * 512, line_flag(number), Pair{weighed(v[k].a), weighed(v[k].b)});
                }
                // All threads of the warp have read these groups: an operation in place may overwrite them.
                warp_barrier();
                if (thread_index() % 32 == 0) set(s.sent[warp], least(g + (LINES_REDUCED - 1) * senders + 1, end));
            }
        }
        // Who waits for this warp must not wait for ever.
        if (!good && thread_index() % 32 == 0) set(s.sent[warp], groups);
    } else if (good && works && (a.recv_mask || c.ranks == 1)) {
        bool waits = a.send_mask && a.stride == 0 && a.in == a.out;
        u32 taker = warp - senders, takers = warps - senders;
        u64 own = a.in + c.rank * a.stride + start, out = a.out + start;
#pragma unroll 1
        for (u32 round = 0; good && round < rounds; round++) {
            u32 last = least(groups - round * room, room);
#pragma unroll 1
            for (u32 g = taker; good && g < last; g += takers) {
                u32 group = round * room + g;
                u64 offset = (u64)group * LINE_GROUP;
                Unit<T, OP> lo, hi;
                Pair mine[1];
                line_read(l, own + offset, share - offset, 0, mine);
#pragma unroll 1
                for (u32 p = 0; good && p < c.ranks; p++) {
                    Pair v;
                    if (p != c.rank) good = line_take(c, s.ll, l, p, s.ll.counters[p].received + 1 + round, g, v);
                    u64 x = p == c.rank ? weighed(mine[0].a) : v.a, y = p == c.rank ? weighed(mine[0].b) : v.b;
                    if (p == 0)
                        lo.first(x), hi.first(y);
                    else
                        lo.next(x), hi.next(y);
                }
                // One from every peer.
                if (good && g == 0 && round == 0) admit(c, s.ll, ADMIT_HEARD);
                if (!good) break;
                while (waits && read(s.sent[g % senders]) <= group) relax();
                line_write(l, out + offset, share - offset, Pair{lo.result(w), hi.result(w)});
            }
            if (round + 1 < rounds) good = line_free(c, s, a.recv_mask, round, good, thread_index() - senders * 32, takers * 32);
        }
    }
    ll_end(c, s.ll, good, a.send_mask, a.recv_mask, a.recv_mask, a.recv_mask ? senders * 32 : 0, rounds, rounds);
}
