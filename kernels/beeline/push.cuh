// Throughput: half of a block's threads store chunks into the peers' windows, the other half takes what
// the peers have stored there. A chunk is behind a flag, a flag behind a fence; a ring of slots per pair
// and block bounds what is under way. Block b deals with block b of every peer only.
#pragma once
#include "access.cuh"
#include "types.cuh"
#include "wait.cuh"

struct PushShared {
    Counters counters[RANKS_MAX];
    Expected headers[RANKS_MAX];
    // A half that must give up says so before a barrier of its own, and every thread of it looks after that
    // barrier: they leave together.
    u32 senders_bad, takers_bad;
    u32 chunks_sent; // of this call, by the sending half
};

constexpr u32 SENDERS = 1, TAKERS = 2; // ids of the halves' barriers

DEVICE u64 push_counters(u32 peer) { return AT_PUSH_COUNTERS + ((u64)block_index() * RANKS_MAX + peer) * 16; }
DEVICE u64 push_slot(const Comm &c, u32 source, u32 dest, u32 number) {
    u64 slot = ((u64)lane_of(source, dest) * PUSH_BLOCKS + block_index()) * PUSH_SLOTS + number % PUSH_SLOTS;
    return c.windows[dest] + c.push_at + slot * c.chunk;
}
// What one block carries of `bytes`: whole 16 bytes, the same on both sides.
DEVICE u64 push_span(u64 bytes) { return ((bytes + PUSH_BLOCKS - 1) / PUSH_BLOCKS + 15) & ~15ull; }
// The bytes of this block's part, and where it starts.
DEVICE u64 push_share(u64 bytes, u64 *start) {
    u64 span = push_span(bytes);
    *start = span * block_index();
    return *start < bytes ? smaller(bytes - *start, span) : 0;
}

DEVICE void push_begin(const Comm &c, PushShared &s, u32 headers_to, u32 headers_from, u64 out, u64 in) {
    u32 p = thread_index(), first = block_index() == 0;
    if (p == 0) s.senders_bad = s.takers_bad = s.chunks_sent = 0;
    if (p < c.ranks && p != c.rank) {
        u64 own = c.windows[c.rank];
        Quad calls = load_packet(own + AT_CALLS + p * 16), q = load_packet(own + push_counters(p));
        s.counters[p] = Counters{q.x, q.y, q.z, q.w};
        s.headers[p] = Expected{in, first && headers_from >> p & 1 ? calls.y + 1 : 0};
        if (first && headers_to >> p & 1) send_header(c, p, calls.x + 1, out);
    }
    barrier(0, block_threads());
}

DEVICE void set(u32 &word, u32 value) { *(volatile u32 *)&word = value; }
DEVICE u32 read(const u32 &word) { return *(const volatile u32 *)&word; }

// Copies a chunk by `threads` threads, of which this is `t`. `SHARED_TO`: into another device's window.
template <bool SHARED_TO>
DEVICE void copy_chunk(u64 to, u64 from, u64 bytes, u32 t, u32 threads) {
    u64 whole = bytes / 16, i = t;
    bool aligned = SHARED_TO ? from % 16 == 0 : to % 16 == 0;
    if (aligned) {
#pragma unroll 1
        for (; i + 3 * (u64)threads < whole; i += 4 * (u64)threads) {
            Quad v[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                v[k] = SHARED_TO ? load<Quad>(from + (i + k * threads) * 16) : load_shared16(from + (i + k * threads) * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (SHARED_TO)
                    store_shared16(to + (i + k * threads) * 16, v[k]);
                else
                    store(to + (i + k * threads) * 16, v[k]);
            }
        }
    }
#pragma unroll 1
    for (; i * 16 < bytes; i += threads) {
        u64 left = bytes - i * 16;
        if (SHARED_TO)
            store_shared16(to + i * 16, load16(from + i * 16, left));
        else
            store16(to + i * 16, left, load_shared16(from + i * 16));
    }
}

// Sends chunk `chunk` of this block's share to `peer`; the sending half, together. False: give up.
DEVICE bool push_chunk(const Comm &c, PushShared &s, u32 peer, u64 from, u64 share, u32 chunk, u32 t, u32 half) {
    u64 offset = (u64)chunk * c.chunk;
    if (offset >= share) return true;
    u64 own = c.windows[c.rank] + push_counters(peer);
    u32 number = s.counters[peer].sent + chunk;
    if (t == 0 && !wait_reaches(c, own + 8, number + 1 - PUSH_SLOTS, peer, PHASE_CREDIT, s.headers[peer]))
        set(s.senders_bad, 1);
    barrier(SENDERS, half);
    if (read(s.senders_bad)) return false;
    copy_chunk<true>(push_slot(c, c.rank, peer, number), from + offset, smaller(share - offset, c.chunk), t, half);
    barrier(SENDERS, half);
    if (t == 0) release_flag(c.windows[peer] + AT_PUSH_COUNTERS + ((u64)block_index() * RANKS_MAX + c.rank) * 16 + 12, number + 1);
    return true;
}

// Waits for chunk `chunk` of `peer`; one thread.
DEVICE void await_chunk(const Comm &c, PushShared &s, u32 peer, u32 chunk) {
    u64 own = c.windows[c.rank] + push_counters(peer);
    if (!wait_reaches(c, own + 12, s.counters[peer].received + chunk + 1, peer, PHASE_DATA, s.headers[peer]))
        set(s.takers_bad, 1);
}
DEVICE void release_chunk(const Comm &c, PushShared &s, u32 peer, u32 chunk) {
    store_word(c.windows[peer] + AT_PUSH_COUNTERS + ((u64)block_index() * RANKS_MAX + c.rank) * 16 + 8,
               s.counters[peer].received + chunk + 1);
}

DEVICE u32 chunks_of(const Comm &c, u64 share) { return (u32)((share + c.chunk - 1) / c.chunk); }

// After both halves: counters go to memory for the next call, and block 0 compares the calls.
DEVICE void push_end(const Comm &c, PushShared &s, u32 peer, u32 sent, u32 received, bool header) {
    u64 own = c.windows[c.rank] + push_counters(peer);
    if (sent) store_word(own, s.counters[peer].sent + sent);
    if (received) store_word(own + 4, s.counters[peer].received + received);
    if (header && block_index() == 0) check_header(c, peer, s.headers[peer]);
}

DEVICE void push_move(const MoveArgs &a, PushShared &s) {
    const Comm &c = a.comm;
    u32 to = 0, from = 0, rounds_out = 0, rounds_in = 0;
    u64 start;
#pragma unroll 1
    for (u32 p = 0; p < c.ranks; p++) {
        if (p == c.rank) continue;
        to |= (u32)(a.parts[p].send_bytes != 0) << p;
        from |= (u32)(a.parts[p].recv_bytes != 0) << p;
        u32 out = chunks_of(c, push_share(a.parts[p].send_bytes, &start));
        u32 in = chunks_of(c, push_share(a.parts[p].recv_bytes, &start));
        rounds_out = out > rounds_out ? out : rounds_out;
        rounds_in = in > rounds_in ? in : rounds_in;
    }
    push_begin(c, s, to, from, word_to(a), word_from(a));
    u32 half = block_threads() / 2, t = thread_index() % half;
    if (thread_index() < half) {
        bool good = true;
#pragma unroll 1
        for (u32 chunk = 0; good && chunk < rounds_out; chunk++)
#pragma unroll 1
            for (u32 step = 1; good && step < c.ranks; step++) {
                u32 p = (c.rank + step) % c.ranks;
                u64 share = push_share(a.parts[p].send_bytes, &start);
                good = push_chunk(c, s, p, a.parts[p].send + start, share, chunk, t, half);
            }
    } else {
        const Part &self = a.parts[c.rank];
        u64 share = push_share(self.recv_bytes, &start);
        if (self.recv != self.send)
#pragma unroll 1
            for (u64 i = t; i * 16 < share; i += half)
                store16(self.recv + start + i * 16, share - i * 16, load16(self.send + start + i * 16, share - i * 16));
        bool good = true;
#pragma unroll 1
        for (u32 chunk = 0; good && chunk < rounds_in; chunk++)
#pragma unroll 1
            for (u32 step = 1; good && step < c.ranks; step++) {
                u32 p = (c.rank + c.ranks - step) % c.ranks;
                share = push_share(a.parts[p].recv_bytes, &start);
                u64 offset = (u64)chunk * c.chunk;
                if (offset >= share) continue;
                if (t == 0) await_chunk(c, s, p, chunk);
                barrier(TAKERS, half);
                good = !read(s.takers_bad);
                if (!good) break;
                copy_chunk<false>(a.parts[p].recv + start + offset, push_slot(c, p, c.rank, s.counters[p].received + chunk),
                                  smaller(share - offset, c.chunk), t, half);
                barrier(TAKERS, half);
                if (t == 0) release_chunk(c, s, p, chunk);
            }
    }
    barrier(0, block_threads());
    u32 p = thread_index();
    if (read(s.senders_bad) || read(s.takers_bad) || p >= c.ranks || p == c.rank) return;
    push_end(c, s, p, chunks_of(c, push_share(a.parts[p].send_bytes, &start)),
             chunks_of(c, push_share(a.parts[p].recv_bytes, &start)), from >> p & 1);
}

// Reduces `bytes` at the same place of every rank's chunk, in the order of ranks.
template <class T, int OP>
DEVICE void reduce_chunk(const ReduceArgs &a, PushShared &s, u64 own, u64 out, u32 chunk, u64 bytes, u32 t, u32 half) {
    constexpr int AT_ONCE = sizeof(typename T::Bits) == 1 ? 1 : 2;
    const Comm &c = a.comm;
    Weigh w = weigh<T>(a);
    u64 i = t;
    if (own % 16 == 0 && out % 16 == 0) {
#pragma unroll 1
        for (; (i + (AT_ONCE - 1) * (u64)half) * 16 + 16 <= bytes; i += AT_ONCE * (u64)half) {
            Unit<T, OP> lo[AT_ONCE], hi[AT_ONCE];
#pragma unroll 1
            for (u32 p = 0; p < c.ranks; p++) {
                u64 slot = push_slot(c, p, c.rank, p == c.rank ? 0 : s.counters[p].received + chunk);
                Quad v[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    v[k] = p == c.rank ? load<Quad>(own + (i + k * half) * 16) : load_shared16(slot + (i + k * half) * 16);
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (p == 0) {
                        lo[k].first(low(v[k]), w);
                        hi[k].first(high(v[k]), w);
                    } else {
                        lo[k].next(low(v[k]), w);
                        hi[k].next(high(v[k]), w);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                u64 x = lo[k].result(w), y = hi[k].result(w);
                store(out + (i + k * half) * 16, Quad{(u32)x, (u32)(x >> 32), (u32)y, (u32)(y >> 32)});
            }
        }
    }
    // What is left, and what is not aligned: eight bytes at a time.
#pragma unroll 1
    for (u64 j = 2 * i; j * 8 < bytes;) {
        u64 left = bytes - j * 8;
        Unit<T, OP> unit;
#pragma unroll 1
        for (u32 p = 0; p < c.ranks; p++) {
            u64 v;
            if (p == c.rank) {
                v = load8(own + j * 8, left);
            } else {
                Quad q = load_shared16(push_slot(c, p, c.rank, s.counters[p].received + chunk) + j / 2 * 16);
                v = j & 1 ? high(q) : low(q);
            }
            if (p == 0)
                unit.first(v, w);
            else
                unit.next(v, w);
        }
        store8(out + j * 8, left, unit.result(w));
        j = j & 1 ? j - 1 + 2 * (u64)half : j + 1;
    }
}

template <class T, int OP>
DEVICE void push_reduce(const ReduceArgs &a, PushShared &s) {
    const Comm &c = a.comm;
    u64 start, share = push_share(a.bytes, &start);
    u32 rounds = chunks_of(c, share);
    push_begin(c, s, a.send_mask, a.recv_mask, a.word, a.word);
    u32 half = block_threads() / 2, t = thread_index() % half;
    if (thread_index() < half) {
        bool good = true;
#pragma unroll 1
        for (u32 chunk = 0; good && chunk < rounds; chunk++) {
#pragma unroll 1
            for (u32 step = 1; good && step < c.ranks; step++) {
                u32 p = (c.rank + step) % c.ranks;
                if (a.send_mask >> p & 1) good = push_chunk(c, s, p, a.in + p * a.stride + start, share, chunk, t, half);
            }
            // Everybody of this half has read the chunk (the barrier of the last peer): an operation in place may
            // overwrite it.
            if (t == 0) set(s.chunks_sent, chunk + 1);
        }
    } else if (a.recv_mask || c.ranks == 1) {
#pragma unroll 1
        for (u32 chunk = 0; chunk < rounds; chunk++) {
            u64 offset = (u64)chunk * c.chunk;
            if (t < c.ranks && t != c.rank) await_chunk(c, s, t, chunk);
            if (t == 0 && a.send_mask) {
                while (read(s.chunks_sent) <= chunk && !read(s.senders_bad)) relax();
                if (read(s.senders_bad)) set(s.takers_bad, 1);
            }
            barrier(TAKERS, half);
            if (read(s.takers_bad)) break;
            reduce_chunk<T, OP>(a, s, a.in + c.rank * a.stride + start + offset, a.out + start + offset, chunk,
                                smaller(share - offset, c.chunk), t, half);
            barrier(TAKERS, half);
            if (t < c.ranks && t != c.rank) release_chunk(c, s, t, chunk);
        }
    }
    barrier(0, block_threads());
    u32 p = thread_index();
    if (read(s.senders_bad) || read(s.takers_bad) || p >= c.ranks || p == c.rank) return;
    push_end(c, s, p, a.send_mask >> p & 1 ? rounds : 0, a.recv_mask >> p & 1 ? rounds : 0, a.recv_mask >> p & 1);
}
