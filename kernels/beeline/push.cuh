// Throughput: some of a block's threads store chunks into the peers' windows, the others take what
// the peers have stored there. A chunk is behind a flag, a flag behind a fence; a ring of slots per pair
// and block bounds what is under way. Block b deals with block b of every peer only.
#pragma once
#include "access.cuh"
#include "direct.cuh"
#include "types.cuh"
#include "wait.cuh"

// The sending half works in groups that take turns: while one waits at its fence, the other fills the link.
#ifndef BEELINE_GROUPS
#define BEELINE_GROUPS 2
#endif
constexpr u32 GROUPS = BEELINE_GROUPS;
// Senders are few: what they have under way stands in the way of the takers' own accesses on the same processor.
#ifndef BEELINE_SENDERS
#define BEELINE_SENDERS 128
#endif
#ifndef BEELINE_UNROLL
#define BEELINE_UNROLL 4
#endif

struct PushShared {
    Counters counters[RANKS_MAX];
    Expected headers[RANKS_MAX];
    // A half that must give up says so before a barrier of its own, and every thread of it looks after that
    // barrier: they leave together.
    u32 senders_bad[GROUPS], takers_bad;
    u32 chunks_sent[GROUPS]; // of this call: one more than the last chunk of each group
    u32 over;                // an earlier call has failed
    u32 chosen;              // 1 + the peer of which a chunk is there; 0: give up
    u32 taken[RANKS_MAX];    // chunks of this call, of each peer
    DirectShared direct;
};

#ifndef BEELINE_CHUNK_MIN
#define BEELINE_CHUNK_MIN 65536
#endif
constexpr u32 CHUNK_MIN = BEELINE_CHUNK_MIN;
constexpr u32 TAKERS = 1, SENDERS = 2; // ids of barriers; each group of senders has one of its own, and all of them together
constexpr u32 ALL_SENDERS = SENDERS + GROUPS;

DEVICE u64 push_counters(u32 peer) { return AT_PUSH_COUNTERS + ((u64)block_index() * RANKS_MAX + peer) * 16; }
DEVICE u64 push_flag(const Comm &c, u32 source, u32 dest, u32 number) {
    u64 flags = ((u64)block_index() * RANKS_MAX + source) * PUSH_SLOTS;
    return c.windows[dest] + AT_PUSH_FLAGS + (flags + number % PUSH_SLOTS) * 4;
}
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

// False: an earlier call has failed. Its numbers have not moved on, so nothing may be said or taken by them.
DEVICE bool push_begin(const Comm &c, PushShared &s, u32 headers_to, u32 headers_from, u64 out, u64 in) {
    u32 p = thread_index(), first = block_index() == 0;
    u64 own = c.windows[c.rank];
    u32 over = p < c.ranks ? peek(own + AT_FAILED) : 0;
    if (p == 0) s.takers_bad = s.direct.straight = s.direct.came = 0, s.over = over;
    if (p < GROUPS) s.senders_bad[p] = s.chunks_sent[p] = 0;
    if (p < c.ranks) s.taken[p] = 0;
    if (p < c.ranks && p != c.rank) {
        Quad calls = load_packet(own + AT_CALLS + p * 16), q = load_packet(own + push_counters(p));
        s.counters[p] = Counters{q.x, q.y, q.z, q.w};
        s.headers[p] = Expected{in, calls.y + 1, first & headers_from >> p & 1};
        if (over == 0 && first && headers_to >> p & 1) send_header(c, p, calls.x + 1, out);
    }
    barrier(0, block_threads());
    return read(s.over) == 0;
}

// Copies a chunk by `threads` threads, of which this is `t`. `SHARED_TO`: into another device's window.
template <bool SHARED_TO, class F>
DEVICE void copy_chunk(u64 to, u64 from, u64 bytes, u32 t, u32 threads, F change) {
    u64 whole = bytes / 16, i = t;
    constexpr int AT_ONCE = SHARED_TO ? BEELINE_UNROLL : 4;
    bool aligned = SHARED_TO ? from % 16 == 0 : to % 16 == 0;
    if (aligned) {
#pragma unroll 1
        for (; i + (AT_ONCE - 1) * (u64)threads < whole; i += AT_ONCE * (u64)threads) {
            Quad v[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                v[k] = SHARED_TO ? load<Quad>(from + (i + k * threads) * 16) : load_shared16(from + (i + k * threads) * 16);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (SHARED_TO)
                    store_shared16(to + (i + k * threads) * 16, change(v[k]));
                else
                    store(to + (i + k * threads) * 16, v[k]);
            }
        }
    }
#pragma unroll 1
    for (; i * 16 < bytes; i += threads) {
        u64 left = bytes - i * 16;
        if (SHARED_TO)
            store_shared16(to + i * 16, change(load16(from + i * 16, left)));
        else
            store16(to + i * 16, left, load_shared16(from + i * 16));
    }
}

DEVICE u32 sender_threads() { return block_threads() > 2 * BEELINE_SENDERS ? BEELINE_SENDERS : block_threads() / 2; }

// How a part is cut: into chunks that are smaller where there would be few, so that sending and taking overlap.
// The same on both sides.
DEVICE u32 chunk_of(const Comm &c, u64 bytes) {
    u32 chunk = c.chunk;
    u64 span = push_span(bytes);
    while (chunk > CHUNK_MIN && span < 4ull * chunk) chunk /= 2;
    return chunk;
}
DEVICE u32 chunks_of(u64 share, u32 chunk) { return (u32)((share + chunk - 1) / chunk); }

// One chunk of `bytes` at `from` to `peer`, by one group together, of which this is thread `t`. False: give up.
template <class F>
DEVICE bool push_chunk(const Comm &c, PushShared &s, u32 peer, u64 from, u64 bytes, u32 index, u32 group, u32 t, u32 threads, F change) {
    u64 own = c.windows[c.rank] + push_counters(peer);
    u32 number = s.counters[peer].sent + index;
    if (t == 0 && !wait_reaches(c, own + 8, number + 1 - PUSH_SLOTS, peer, PHASE_CREDIT, s.headers[peer]))
        set(s.senders_bad[group], 1);
    barrier(SENDERS + group, threads);
    if (read(s.senders_bad[group])) return false;
    copy_chunk<true>(push_slot(c, c.rank, peer, number), from, bytes, t, threads, change);
    barrier(SENDERS + group, threads);
    if (t == 0) release_flag(push_flag(c, c.rank, peer, number), number + 1);
    return true;
}

// What `await_any` answers where it does not wait.
constexpr u32 NOBODY = RANKS_MAX + 1;
// Waits for the next chunk of any of the peers `left`, in ring order; answers 1 + the peer, or 0: give up. One thread. Not `waits`:
// it looks once.
OUTLINE u32 await_any(const Comm &c, PushShared &s, u32 left, bool waits) {
    u64 started = 0;
    for (;;) {
        u32 first = c.rank;
        for (u32 spin = 0; spin < SPINS; spin++) {
#pragma unroll 1
            for (u32 step = 1; step < c.ranks; step++) {
                u32 p = (c.rank + c.ranks - step) % c.ranks, number = s.counters[p].received + s.taken[p];
                if (!(left >> p & 1)) continue;
                if ((i32)(load_flag(push_flag(c, p, c.rank, number)) - (number + 1)) >= 0) return p + 1;
                first = first == c.rank ? p : first;
            }
            if (!waits) return NOBODY;
            relax();
        }
        started = look_up(c, first, PHASE_DATA, s.headers[first], started);
        if (UNLIKELY(started == 0)) return 0;
    }
}
// Waits for chunk `index` of `peer`; one thread.
DEVICE void await_chunk(const Comm &c, PushShared &s, u32 peer, u32 index) {
    u32 number = s.counters[peer].received + index;
    if (!wait_reaches(c, push_flag(c, peer, c.rank, number), number + 1, peer, PHASE_DATA, s.headers[peer]))
        set(s.takers_bad, 1);
}
DEVICE void release_chunk(const Comm &c, PushShared &s, u32 peer, u32 index) {
    store_word(c.windows[peer] + push_counters(c.rank) + 8, s.counters[peer].received + index + 1);
}
DEVICE bool anybody_bad(PushShared &s) {
    bool bad = read(s.takers_bad) != 0;
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) bad |= read(s.senders_bad[g]) != 0;
    return bad;
}

// After both halves: counters go to memory for the next call, and block 0 compares the calls.
DEVICE void push_end(const Comm &c, PushShared &s, u32 peer, u32 sent, u32 received, bool header) {
    u64 own = c.windows[c.rank] + push_counters(peer);
    if (sent) store_word(own, s.counters[peer].sent + sent);
    if (received) store_word(own + 4, s.counters[peer].received + received);
    if (header && block_index() == 0) check_header(c, peer, s.headers[peer]);
}

// Parts that may go straight: those of peers of which this rank has something mapped, except what the slots have room for,
// which is sent before the receiver has come.
DEVICE u32 direct_candidates(const PushMoveArgs &args) {
    const Comm &c = args.move.comm;
    u32 candidates = 0;
#pragma unroll 1
    for (u32 p = 0; args.mapped && p < c.ranks; p++) {
        u64 bytes = args.move.parts[p].send_bytes, start;
        bool large = chunks_of(push_span(bytes), chunk_of(c, bytes)) > PUSH_SLOTS && push_share(bytes, &start) != 0;
        candidates |= (u32)(large && p != c.rank) << p & args.mapped;
    }
    return candidates;
}

// All senders of the block meet; false: one of their groups gave up.
DEVICE bool senders_meet(PushShared &s, u32 threads) {
    barrier(ALL_SENDERS, threads);
    bool bad = false;
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) bad |= read(s.senders_bad[g]) != 0;
    barrier(ALL_SENDERS, threads);
    return !bad;
}

DEVICE u64 push_claim(const Comm &c, u32 source, u32 dest) { return c.windows[source] + push_counters(dest) + 12; }

// Waits until one of `candidates` offers memory for its part, and claims that, if it is to be had: then its receiver does not
// leave before the part is there, or this rank says that it has stopped. Answers 1 + the peer, or 0: give up. One thread.
OUTLINE u32 direct_await(const PushMoveArgs &args, PushShared &s, u32 candidates, u64 *place) {
    const Comm &c = args.move.comm;
    u64 started = 0, offer, bytes;
    for (;;) {
        u32 first = c.rank;
        for (u32 spin = 0; spin < SPINS; spin++) {
#pragma unroll 1
            for (u32 step = 1; step < c.ranks; step++) {
                u32 p = (c.rank + step) % c.ranks, number = s.counters[p].sent;
                if (!(candidates >> p & 1)) continue;
                first = first == c.rank ? p : first;
                u64 at = direct_offer(c, p, c.rank);
                if (!direct_offered(at, number, &offer, &bytes)) continue;
                *place = 0;
                u64 entry = direct_entry(args, p, offer, bytes);
                if (entry == 0) return p + 1;
                Quad first_seen = load_packet(entry);
                store_word(push_claim(c, c.rank, p), number + 1);
                fence_order();
                // Whether the offer stands, whether anybody has given up, and the entry again: none waits for another's answer.
                bool stands = direct_offered(at, number, &offer, &bytes);
                Quad again = load_packet(entry);
                bool goes = direct_goes_on(c, p, s.headers[p], false);
                *place = stands && goes ? direct_place(offer, bytes, first_seen, again) : 0;
                if (*place) return p + 1;
                store_word(push_claim(c, c.rank, p), number);
                if (!goes) return 0;
                if (stands) return p + 1;
                // Taken back at this very moment.
            }
            relax();
        }
        started = look_up(c, first, PHASE_CREDIT, s.headers[first], started);
        if (UNLIKELY(started == 0)) return 0;
    }
}

// This block's share to the place that was claimed; false: somebody has given up meanwhile.
DEVICE bool direct_share(const PushMoveArgs &args, PushShared &s, BulkShared &b, u32 p, u64 to, u64 *used, u32 t, u32 threads) {
    const Comm &c = args.move.comm;
    u64 start, share = push_share(args.move.parts[p].send_bytes, &start), from = args.move.parts[p].send + start;
    to += start;
    auto go_on = [&] {
        bool good = direct_goes_on(c, p, s.headers[p], true);
        if (!good) set(s.senders_bad[0], 1);
        return good;
    };
    if (has_bulk() && from % 16 == 0) {
        if (t == 0) bulk_copy(b, to, from, share, used, go_on);
    } else {
#pragma unroll 1
        for (u64 at = 0; at < share; at += STORES_LOOK) {
            direct_copy(to + at, from + at, smaller(share - at, STORES_LOOK), t, threads);
            if (at + STORES_LOOK >= share) break;
            if (t == 0) go_on();
            if (!senders_meet(s, threads)) return false;
        }
    }
    return senders_meet(s, threads);
}

// Sends to those of `candidates` that offer memory, by all senders of the block together; they are noted as straight.
DEVICE bool direct_send(const PushMoveArgs &args, PushShared &s, BulkShared &b, u32 candidates, u32 t, u32 threads) {
    const Comm &c = args.move.comm;
    u64 used = 0;
    if (t == 0 && has_bulk())
        for (u32 i = 0; i < BULK_STAGES; i++) bulk_prepare(at_block(&b.words[i]));
#pragma unroll 1
    while (candidates) {
        if (t == 0) {
            u64 place = 0;
            u32 chosen = direct_await(args, s, candidates, &place);
            if (chosen == 0) set(s.senders_bad[0], 1);
            set(s.direct.chosen, chosen);
            *(volatile u64 *)&s.direct.place = place;
        }
        if (!senders_meet(s, threads)) return false;
        u32 p = read(s.direct.chosen) - 1, number = s.counters[p].sent;
        u64 place = *(volatile u64 *)&s.direct.place;
        barrier(ALL_SENDERS, threads);
        candidates &= ~(1u << p);
        if (place == 0) continue;
        bool good = direct_share(args, s, b, p, place, &used, t, threads);
        if (t == 0 && good) {
            store_word(direct_way(c, c.rank, p, number), 1);
            release_flag(push_flag(c, c.rank, p, number), number + 1);
            set(s.direct.straight, s.direct.straight | 1u << p);
            if (block_index() == 0) direct_count(args);
        } else if (t == 0) {
            release_flag(push_claim(c, c.rank, p), number); // stopped
        }
        if (!good) return false;
    }
    barrier(ALL_SENDERS, threads);
    return true;
}

// After the first chunk of `peer` is there: whether it stands for the whole share, which came straight. One thread.
DEVICE void direct_took(const Comm &c, PushShared &s, u32 peer) {
    u64 way = direct_way(c, peer, c.rank, s.counters[peer].received);
    if (peek(way) == 0) return;
    store_word(way, 0);
    set(s.direct.came, s.direct.came | 1u << peer);
}

DEVICE void push_move(const PushMoveArgs &args, PushShared &s, BulkShared &b) {
    const MoveArgs &a = args.move;
    const Comm &c = a.comm;
    u32 to = 0, from = 0, rounds_out = 0;
    u64 start;
#pragma unroll 1
    for (u32 p = 0; p < c.ranks; p++) {
        if (p == c.rank) continue;
        const Part &part = a.parts[p];
        to |= (u32)(part.send_bytes != 0) << p;
        from |= (u32)(part.recv_bytes != 0) << p;
        u32 out = chunks_of(push_share(part.send_bytes, &start), chunk_of(c, part.send_bytes));
        rounds_out = out > rounds_out ? out : rounds_out;
    }
    const Part &self = a.parts[c.rank];
    u64 own_start, own_share = self.recv != self.send ? push_share(self.recv_bytes, &own_start) : 0;
    u32 own_rounds = chunks_of(own_share, c.chunk);
    if (!push_begin(c, s, to, from, word_to(a), word_from(a))) return;
    if (u32 p = thread_index(); p < c.ranks && from >> p & 1 && push_share(a.parts[p].recv_bytes, &start) != 0)
        direct_invite(args, p, s.counters[p].received);
    AsItIs change;
    u32 senders = sender_threads(), takers = block_threads() - senders;
    u32 t = thread_index() < senders ? thread_index() : thread_index() - senders;
    if (thread_index() < senders) {
        u32 threads = senders / GROUPS, group = t / threads;
        t %= threads;
        bool good = true;
        u32 candidates = direct_candidates(args), straight = 0;
        // What may have to wait until its receiver comes goes behind what need not, and then straight where it can.
#pragma unroll 1
        for (u32 turn = candidates ? 0 : 1; good && turn < 2; turn++) {
            if (turn == 1 && candidates) {
                if (!direct_send(args, s, b, candidates, thread_index(), senders)) break;
                straight = read(s.direct.straight);
            }
            u32 end = turn == 0 && rounds_out > PUSH_SLOTS ? PUSH_SLOTS : rounds_out;
#pragma unroll 1
            for (u32 i = group; good && i < end; i += GROUPS)
#pragma unroll 1
                for (u32 step = 1; good && step < c.ranks; step++) {
                    u32 p = (c.rank + step) % c.ranks, chunk = chunk_of(c, a.parts[p].send_bytes);
                    u64 share = push_share(a.parts[p].send_bytes, &start), offset = (u64)i * chunk;
                    bool ahead = candidates && !(candidates >> p & 1) && i < PUSH_SLOTS;
                    if (offset < share && !(straight >> p & 1) && (turn == 0) == ahead)
                        good = push_chunk(c, s, p, a.parts[p].send + start + offset, smaller(share - offset, chunk), i, group, t, threads, change);
                }
            // Who waits for this group to go straight with it must not wait for ever.
            if (turn == 0) good = senders_meet(s, senders);
        }
    } else {
        u32 left = 0; // peers of which chunks are to come
#pragma unroll 1
        for (u32 p = 0; p < c.ranks; p++) left |= (u32)(from >> p & 1 && push_share(a.parts[p].recv_bytes, &start) != 0) << p;
#pragma unroll 1
        for (u32 own = 0; left || own < own_rounds; own++) {
            // The own part goes along, a chunk at a time: while it is copied, the peers' chunks arrive.
            u64 at = (u64)own * c.chunk;
            if (at < own_share) {
                u64 end = smaller(own_share - at, c.chunk);
                copy_own(self.recv + own_start + at, self.send + own_start + at, end, t, takers);
            }
            if (!left) continue;
            // Whoever's is there: a peer whose whole share comes straight keeps nobody waiting, nor the own part.
            if (t == 0) {
                u32 chosen = await_any(c, s, left, own + 1 >= own_rounds);
                if (chosen && chosen != NOBODY && s.taken[chosen - 1] == 0) direct_took(c, s, chosen - 1);
                if (!chosen) set(s.takers_bad, 1);
                set(s.chosen, chosen);
            }
            barrier(TAKERS, takers);
            if (!read(s.chosen)) break;
            if (read(s.chosen) == NOBODY) {
                barrier(TAKERS, takers); // read by all before it is set again
                continue;
            }
            u32 p = read(s.chosen) - 1, i = read(s.taken[p]), chunk = chunk_of(c, a.parts[p].recv_bytes);
            u64 share = push_share(a.parts[p].recv_bytes, &start), offset = (u64)i * chunk;
            bool came = read(s.direct.came) >> p & 1;
            if (!came)
                copy_chunk<false>(a.parts[p].recv + start + offset, push_slot(c, p, c.rank, s.counters[p].received + i),
                                  smaller(share - offset, chunk), t, takers, AsItIs{});
            if (came || offset + chunk >= share) left &= ~(1u << p);
            barrier(TAKERS, takers);
            if (t == 0) {
                if (came) fence_system(); // the word that said so may be written again
                release_chunk(c, s, p, i);
                set(s.taken[p], i + 1);
            }
        }
    }
    barrier(0, block_threads());
    u32 p = thread_index();
    if (p >= c.ranks || p == c.rank) return;
    const Part &part = a.parts[p];
    u64 share_in = push_share(part.recv_bytes, &start);
    if (anybody_bad(s)) {
        u32 number = s.counters[p].received;
        if (share_in && args.offers[p]) direct_withdraw(c, p, number, push_claim(c, p, c.rank), push_flag(c, p, c.rank, number));
        return;
    }
    u32 sent = chunks_of(push_share(part.send_bytes, &start), chunk_of(c, part.send_bytes));
    u32 received = chunks_of(share_in, chunk_of(c, part.recv_bytes));
    push_end(c, s, p, s.direct.straight >> p & 1 ? 1 : sent, s.direct.came >> p & 1 ? 1 : received, from >> p & 1);
}

// Reduces `bytes` at the same place of every rank's chunk, in the order of ranks.
template <class T, int OP>
DEVICE void reduce_chunk(const ReduceArgs &a, PushShared &s, u64 own, u64 out, u32 chunk, u64 bytes, u32 t, u32 half) {
    constexpr int AT_ONCE = sizeof(typename T::Bits) == 1 ? 1 : 2;
    const Comm &c = a.comm;
    Weigh w = weigh<T>(a);
    Weighed<T, OP> weighed = {w};
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
                    v[k] = p == c.rank ? weighed(load<Quad>(own + (i + k * half) * 16)) : load_shared16(slot + (i + k * half) * 16);
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    if (p == 0) {
                        lo[k].first(low(v[k]));
                        hi[k].first(high(v[k]));
                    } else {
                        lo[k].next(low(v[k]));
                        hi[k].next(high(v[k]));
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
                v = weighed(load8(own + j * 8, left));
            } else {
                Quad q = load_shared16(push_slot(c, p, c.rank, s.counters[p].received + chunk) + j / 2 * 16);
                v = j & 1 ? high(q) : low(q);
            }
            if (p == 0)
                unit.first(v);
            else
                unit.next(v);
        }
        store8(out + j * 8, left, unit.result(w));
        j = j & 1 ? j - 1 + 2 * (u64)half : j + 1;
    }
}

template <class T, int OP>
DEVICE void push_reduce(const ReduceArgs &a, PushShared &s) {
    const Comm &c = a.comm;
    u64 start, share = push_share(a.bytes, &start);
    u32 chunk = chunk_of(c, a.bytes), rounds = chunks_of(share, chunk);
    if (!push_begin(c, s, a.send_mask, a.recv_mask, a.word, a.word)) return;
    Weighed<T, OP> change = {weigh<T>(a)};
    u32 senders = sender_threads(), takers = block_threads() - senders;
    u32 t = thread_index() < senders ? thread_index() : thread_index() - senders;
    if (thread_index() < senders) {
        u32 threads = senders / GROUPS, group = t / threads;
        t %= threads;
        bool good = true;
#pragma unroll 1
        for (u32 i = group; good && i < rounds; i += GROUPS) {
            u64 offset = (u64)i * chunk;
#pragma unroll 1
            for (u32 step = 1; good && step < c.ranks; step++) {
                u32 p = (c.rank + step) % c.ranks;
                if (a.send_mask >> p & 1)
                    good = push_chunk(c, s, p, a.in + p * a.stride + start + offset, smaller(share - offset, chunk), i, group, t, threads, change);
            }
            // The whole group has read the chunk (the barrier of the last peer): an operation in place may
            // overwrite it.
            if (t == 0) set(s.chunks_sent[group], i + 1);
        }
    } else if (a.recv_mask || c.ranks == 1) {
#pragma unroll 1
        for (u32 i = 0; i < rounds; i++) {
            u64 offset = (u64)i * chunk;
            if (t < c.ranks && t != c.rank) await_chunk(c, s, t, i);
            if (t == 0 && a.send_mask && a.stride == 0 && a.in == a.out) {
                while (read(s.chunks_sent[i % GROUPS]) <= i && !read(s.senders_bad[i % GROUPS])) relax();
                if (read(s.senders_bad[i % GROUPS])) set(s.takers_bad, 1);
            }
            barrier(TAKERS, takers);
            if (read(s.takers_bad)) break;
            reduce_chunk<T, OP>(a, s, a.in + c.rank * a.stride + start + offset, a.out + start + offset, i,
                                smaller(share - offset, chunk), t, takers);
            barrier(TAKERS, takers);
            if (t < c.ranks && t != c.rank) release_chunk(c, s, t, i);
        }
    }
    barrier(0, block_threads());
    u32 p = thread_index();
    if (anybody_bad(s) || p >= c.ranks || p == c.rank) return;
    push_end(c, s, p, a.send_mask >> p & 1 ? rounds : 0, a.recv_mask >> p & 1 ? rounds : 0, a.recv_mask >> p & 1);
}
