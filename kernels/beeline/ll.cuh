// Low latency: eight bytes of data travel with their flag in one 16-byte store, so that a packet is its own
// signal. Block b of the sender writes region b of the receiver's slot, and block b of the receiver reads
// it: blocks never wait for each other.
#pragma once
#include "access.cuh"
#include "types.cuh"
#include "wait.cuh"

struct LlShared {
    Counters counters[RANKS_MAX];
    Expected headers[RANKS_MAX];
    Expected checks[RANKS_MAX]; // the same, for the last warp
    // What ll_begin found, which nobody writes after its barrier: all threads of a block decide alike. And what any
    // thread found by the end.
    u32 refused, bad;
    u32 over; // something of every peer has been taken, or never will
    u32 ready; // there is room for what is sent
    u32 announced; // the peers have been told of this block, and it is counted
    u32 warm; // of nobody's interest
};
constexpr u32 LL_READY = 2; // id of a barrier

// Not before the own announcement is counted: that of the next kernel must come behind it.
DEVICE void admit(const Comm &c, const LlShared &s, u32 when) {
    if (c.admits == when && read(s.announced)) admit_next();
}

DEVICE u64 ll_counters(const Comm &c, u32 peer) {
    return AT_LL_COUNTERS + ((u64)block_index() * RANKS_MAX + peer) * 16;
}

// The last warp of a block of packets carries none: it looks whether the peers' blocks have their room, and that of block 0
// compares headers while the others move data.
DEVICE u32 ll_workers() { return block_threads() - 32; }

// Before the kernels before this one have ended: a thread of the last warp tells its peer that this block has its room, by the
// messages that the two exchange now, `mine`. Both ranks count every message between them, so that each knows what the other's
// word will say: this much.
DEVICE u32 ll_announce(const Comm &c, u32 mine) {
    u32 p = thread_index() - ll_workers();
    if (p >= c.ranks || mine == 0 || !c.atomics) return 0;
    announce(c.windows[p] + ll_counters(c, c.rank) + 12, mine);
    return add_early(c.windows[c.rank] + AT_LL_CALLED + ((u64)block_index() * RANKS_MAX + p) * 4, mine) + mine;
}
// The last warp waits until all peers that something is taken from have said so too; false: it is too late.
DEVICE bool ll_meet(const Comm &c, LlShared &s, u32 takes, u32 called) {
    u32 p = thread_index() - ll_workers();
    if (c.admits != ADMIT_THERE || takes == 0) return false;
    bool asks = p < c.ranks && takes >> p & 1, last = false;
#pragma unroll 1
    for (;;) {
        u32 here = asks ? peek_early(c.windows[c.rank] + ll_counters(c, p) + 12) : called;
        if (warp_all((i32)(here - called) >= 0)) return true;
        // This rank gives up, or a word was lost that nothing else depends on.
        if (last) return false;
        last = warp_all(read(s.over) != 0);
        relax();
    }
}

// The beginning of a kernel that may start early: nothing of memory is touched before what was queued before has ended, but
// for `ll_meet`. The arguments are none of it. They are read once here, a word of each of their lines in the cache, where it
// costs no time: what follows finds them there.
template <class Args>
DEVICE void begin_early(const Args &a, LlShared &s, u32 takes, u32 mine) {
    if (thread_index() % 32 == 0) {
        const u32 *words = reinterpret_cast<const u32 *>(&a);
        u32 all = 0;
#pragma unroll
        for (u32 i = 0; i < sizeof a / 4; i += 16) all ^= words[i];
        set(s.warm, all);
    }
    if (thread_index() == 0) s.refused = s.bad = s.over = s.ready = s.announced = 0;
    barrier(0, block_threads());
    // Behind the barrier, so that those who move data do not wait for it (two tenths of a microsecond on an H200).
    bool there = false;
    if (thread_index() >= ll_workers()) {
        u32 called = ll_announce(a.comm, mine);
        // A warp issues in order: who stores what the addition answered has it.
        set(s.warm, called);
        warp_barrier();
        if (thread_index() == ll_workers()) set(s.announced, 1);
        there = ll_meet(a.comm, s, takes, called);
    }
    after_earlier();
    if (thread_index() == ll_workers()) {
        if (there) admit_next();
        admit(a.comm, s, ADMIT_AT_ONCE);
    }
}

// Reads this block's counters, waits for a free slot at each peer that gets something from this block, and
// tells the peers what the call is. `sends` is a mask of ranks for this block; `out` and `in` are words of the header to and from
// the peer of this thread, in the first warp and in the last.
//
// What was read in the last call is acknowledged here: a store to a peer at a kernel's end would keep the kernel
// until it has arrived. Nobody waits for the word longer than until our next call.
DEVICE bool ll_begin(const Comm &c, LlShared &s, u32 sends, u32 takes, u32 headers_to, u32 headers_from, u64 out, u64 in) {
    u64 own = c.windows[c.rank];
    u32 first = block_index() == 0;
    if (thread_index() >= ll_workers()) {
        u32 p = thread_index() - ll_workers();
        // The others go on without this warp until the end.
        if (first && p < c.ranks && headers_from >> p & 1) s.checks[p] = Expected{in, load_packet(own + AT_CALLS + p * 16).y + 1, 1};
        if (c.admits == ADMIT_THERE && takes == 0) {
#pragma unroll 1
            while (!warp_all(read(s.ready) | read(s.over))) relax();
            if (p == 0 && read(s.ready)) admit_next();
        }
        return true;
    }
    if (thread_index() < 32) {
        u32 p = thread_index();
        if (p < c.ranks && p != c.rank) {
            Quad calls = first ? load_packet(own + AT_CALLS + p * 16) : Quad{0, 0, 0, 0}, q = load_packet(own + ll_counters(c, p));
            s.counters[p] = Counters{q.x, q.y, q.z, 0};
            s.headers[p] = Expected{in, calls.y + 1, first & headers_from >> p};
            store_word(c.windows[p] + ll_counters(c, c.rank) + 8, q.y);
            if (first && headers_to >> p & 1) send_header(c, p, calls.x + 1, out);
            if (sends >> p & 1 && q.x - q.z >= LL_SLOTS &&
                !wait_reaches(c, own + ll_counters(c, p) + 8, q.x - (LL_SLOTS - 1), p, PHASE_CREDIT, Expected{0, 0, 0}))
                s.refused = 1;
        }
    }
    barrier(LL_READY, ll_workers());
    if (thread_index() == 0 && s.refused == 0) set(s.ready, 1);
    return s.refused == 0;
}

// What packets of the message `number` carry. Numbers wrap, and 0 is what a packet says that was never written:
// message 0 says 1, which no other message of its slot does.
static_assert(LL_SLOTS % 2 == 0, "messages 0 and 1 share a slot");
DEVICE u32 ll_flag(u32 number) { return number > 1 ? number : 1; }

// One packet from `source`, waited for.
DEVICE bool ll_take(const Comm &c, LlShared &s, u64 at, u32 source, u64 *value) {
    u32 flag = ll_flag(s.counters[source].received + 1);
    u64 started = 0;
#pragma unroll 1
    for (;;) {
#pragma unroll 1
        for (u32 spin = 0; spin < SPINS; spin++) {
            Quad v = load_packet(at);
            if (v.y == flag && v.w == flag) {
                *value = (u64)v.x | (u64)v.z << 32;
                return true;
            }
            relax();
        }
        started = look_up(c, source, PHASE_DATA, s.headers[source], started);
        if (UNLIKELY(started == 0)) return false;
    }
}
DEVICE void ll_put(u64 at, u32 flag, u64 v) { store_packet(at, Quad{(u32)v, flag, (u32)(v >> 32), flag}); }

// Where packets from `source` to `dest` lie, in the memory of `dest`.
DEVICE u64 ll_region(const Comm &c, u32 source, u32 dest, u32 number) {
    return c.windows[dest] + at_ll(c.ll_blocks, source, dest, number % LL_SLOTS, block_index());
}

// Counts what was done, for the next call: thread p says how many messages went to peer p, and came from it. Thread `hears`
// has taken something of every peer, if the block does.
DEVICE void ll_end(const Comm &c, LlShared &s, bool good, u32 sends, u32 takes, u32 headers_from, u32 hears = 0, u32 sent = 1, u32 received = 1) {
    if (good && block_index() == 0 && thread_index() >= ll_workers()) {
        u32 p = thread_index() - ll_workers();
        if (p < c.ranks && p != c.rank && headers_from >> p & 1) good = check_header(c, p, s.checks[p]);
    }
    if (!good) s.bad = 1;
    if (thread_index() == hears) set(s.over, 1);
    barrier(0, block_threads());
    u32 p = thread_index();
    if (!s.bad && p < c.ranks && p != c.rank) {
        u64 own = c.windows[c.rank] + ll_counters(c, p);
        if (takes >> p & 1) store_word(own + 4, s.counters[p].received + received);
        if (sends >> p & 1) store_word(own, s.counters[p].sent + sent);
    }
    if (!c.counted || p >= 32) return;
    warp_barrier();
    if (p == 0) count_up(c.windows[c.rank] + AT_DONE);
}

// This block's share of `bytes` to or from one peer.
DEVICE u64 ll_share(const Comm &c, u64 bytes, u64 *start) {
    u32 shift = ll_shift(c, bytes);
    *start = (u64)block_index() << shift;
    return *start < bytes ? smaller(bytes - *start, 1ull << shift) : 0;
}

// Each rank's part to each other rank; nothing is computed.
DEVICE void ll_move(const MoveArgs &a, LlShared &s) {
    const Comm &c = a.comm;
    u32 sends = 0, takes = 0, to = 0, from = 0;
    u64 start;
#pragma unroll 1
    for (u32 p = 0; p < c.ranks; p++) {
        if (p == c.rank) continue;
        sends |= (u32)(ll_share(c, a.parts[p].send_bytes, &start) != 0) << p;
        takes |= (u32)(ll_share(c, a.parts[p].recv_bytes, &start) != 0) << p;
        to |= (u32)(a.parts[p].send_bytes != 0) << p;
        from |= (u32)(a.parts[p].recv_bytes != 0) << p;
    }
    u32 workers = ll_workers(), header = thread_index() - workers, peer = thread_index() < 32 ? thread_index() : header;
    u32 mine = (sends >> header % 32 & 1) + (takes >> header % 32 & 1);
    bool works = thread_index() < workers;
    u32 next = (c.rank + 1) % c.ranks;
    const Part &self = a.parts[c.rank];
    u64 own_start, own = self.recv != self.send ? ll_share(c, self.recv_bytes, &own_start) : 0;
    u64 word_out = peer < c.ranks ? a.parts[peer].send_word : 0, word_in = peer < c.ranks ? a.parts[peer].recv_word : 0;
    begin_early(a, s, takes, mine);
    // What goes first, and the own part, are read while the counters are. The own part goes by eight bytes like all others: code for
    // other sizes, read for the first time, costs a small call more than wider accesses save a large one.
    u64 share = ll_share(c, a.parts[next].send_bytes, &start), ahead = (u64)thread_index() * 8;
    u64 first = works && ahead < share ? load8(a.parts[next].send + start + ahead, share - ahead) : 0;
    u64 own_first = works && ahead < own ? load8(self.send + own_start + ahead, own - ahead) : 0;
    bool good = ll_begin(c, s, sends, takes, to, from, word_out, word_in);
#pragma unroll 1
    for (u32 step = 1; good && works && step < c.ranks; step++) {
        u32 p = (c.rank + step) % c.ranks;
        if (!(sends >> p & 1)) continue;
        u64 bytes = ll_share(c, a.parts[p].send_bytes, &start), from_at = a.parts[p].send + start;
        u32 number = s.counters[p].sent + 1, flag = ll_flag(number);
        u64 to_at = ll_region(c, c.rank, p, number);
#pragma unroll 1
        for (u64 i = thread_index(); i * 8 < bytes; i += workers)
            ll_put(to_at + i * 16, flag, step == 1 && i == thread_index() ? first : load8(from_at + i * 8, bytes - i * 8));
    }
#pragma unroll 1
    for (u64 i = thread_index(); good && works && i * 8 < own; i += workers)
        store8(self.recv + own_start + i * 8, own - i * 8, i == thread_index() ? own_first : load8(self.send + own_start + i * 8, own - i * 8));
#pragma unroll 1
    for (u32 step = 1; good && works && step < c.ranks; step++) {
        u32 p = (c.rank + c.ranks - step) % c.ranks;
        if (!(takes >> p & 1)) continue;
        u64 bytes = ll_share(c, a.parts[p].recv_bytes, &start), to_at = a.parts[p].recv + start;
        u64 from_at = ll_region(c, p, c.rank, s.counters[p].received + 1);
#pragma unroll 1
        for (u64 i = thread_index(); good && i * 8 < bytes; i += workers) {
            u64 v;
            good = ll_take(c, s, from_at + i * 16, p, &v);
            if (good) store8(to_at + i * 8, bytes - i * 8, v);
        }
    }
    // The first thread has taken its packets from every peer.
    if (good && thread_index() == 0) admit(c, s, ADMIT_HEARD);
    ll_end(c, s, good, sends, takes, from);
}

// Each rank's part to each rank of `send_mask`; parts of `recv_mask` and the own one are reduced in the
// order of ranks.
template <class T, int OP>
DEVICE void ll_reduce(const ReduceArgs &a, LlShared &s) {
    const Comm &c = a.comm;
    u64 start, bytes = ll_share(c, a.bytes, &start);
    u32 header = thread_index() - ll_workers(), mine = (a.send_mask >> header % 32 & 1) + (a.recv_mask >> header % 32 & 1);
    begin_early(a, s, a.recv_mask, mine);
    Weigh w = weigh<T>(a);
    Weighed<T, OP> weighed = {w};
    bool reduces = a.recv_mask != 0 || c.ranks == 1;
    u32 workers = ll_workers(), next = (c.rank + 1) % c.ranks;
    bool works = thread_index() < workers;
    // What goes first is read while the counters are.
    u64 ahead = (u64)thread_index() * 8;
    u64 first = works && ahead < bytes ? load8(a.in + next * a.stride + start + ahead, bytes - ahead) : 0;
    bool good = ll_begin(c, s, a.send_mask, a.recv_mask, a.send_mask, a.recv_mask, a.word, a.word);
#pragma unroll 1
    for (u32 step = 1; good && works && step < c.ranks; step++) {
        u32 p = (c.rank + step) % c.ranks;
        if (!(a.send_mask >> p & 1)) continue;
        u64 from_at = a.in + p * a.stride + start;
        u32 number = s.counters[p].sent + 1, flag = ll_flag(number);
        u64 to_at = ll_region(c, c.rank, p, number);
#pragma unroll 1
        for (u64 i = thread_index(); i * 8 < bytes; i += workers)
            ll_put(to_at + i * 16, flag, weighed(step == 1 && i == thread_index() ? first : load8(from_at + i * 8, bytes - i * 8)));
    }
    u64 own = a.in + c.rank * a.stride + start;
#pragma unroll 1
    for (u64 i = thread_index(); good && works && reduces && i * 8 < bytes; i += workers) {
        Unit<T, OP> unit;
        u64 mine = weighed(load8(own + i * 8, bytes - i * 8));
#pragma unroll 1
        for (u32 p = 0; good && p < c.ranks; p++) {
            u64 v = mine;
            if (p != c.rank)
                good = ll_take(c, s, ll_region(c, p, c.rank, s.counters[p].received + 1) + i * 16, p, &v);
            if (p == 0)
                unit.first(v);
            else
                unit.next(v);
        }
        if (good) store8(a.out + start + i * 8, bytes - i * 8, unit.result(w));
    }
    if (good && thread_index() == 0) admit(c, s, ADMIT_HEARD);
    ll_end(c, s, good, a.send_mask, a.recv_mask, a.recv_mask);
}
