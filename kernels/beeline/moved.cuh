// Lines of what is only moved: 124 bytes of data and 4 of flag, a thirty-second of the link. A group is four rows of four
// lines each, which a warp stores by one instruction a row: 1984 bytes, 124 units of 16. Threads whose 16 bytes of a row have no
// flag carry one unit in each row; the four others, which have 12 bytes in each, carry three units in the four rows.
//
// The flags are where those of line.cuh are, and messages are counted together: what a slot had before never looks like the
// message that is to come.
#pragma once
#include "line.cuh"

constexpr u32 MOVED_ROW = 28 * 16, MOVED_ROWS = 4, MOVED_GROUP = 124 * 16; // bytes; without those of threads with flags; with them
constexpr u32 MOVED_LINES = MOVED_ROWS * 512;                             // bytes of a group in lines

// What a block carries of `bytes`: whole units, the same on both sides.
DEVICE u32 moved_share(const Comm &c, u64 bytes, u32 *start) {
    u32 all = (u32)bytes, span = ((all + c.ll_blocks - 1) / c.ll_blocks + 15) & ~15u;
    span = span < LINE_SPAN_MIN ? LINE_SPAN_MIN : span;
    *start = span * block_index();
    return *start < all ? least(all - *start, span) : 0;
}
DEVICE u32 moved_groups(u32 share) { return (share + MOVED_GROUP - 1) / MOVED_GROUP; }
// Groups of a round, and rounds of a share.
DEVICE u32 moved_room(const Comm &c) { return c.line_span / (MOVED_ROWS * LINE_GROUP); }
DEVICE u32 moved_rounds(const Comm &c, u32 share) { return (moved_groups(share) + moved_room(c) - 1) / moved_room(c); }
// Rows of a group of which `left` bytes are there; all four, if any of them are with a flag.
DEVICE u32 moved_rows(u32 left) { return least((left + MOVED_ROW - 1) / MOVED_ROW, MOVED_ROWS); }

// A thread of a warp: where its 16 bytes of a row are, and in the data its first unit and how far it is to the next.
struct Seat {
    u32 at, data, step;
    bool last; // of a line
};
DEVICE Seat seat() {
    u32 l = thread_index() % 32, line = l / 8;
    if (l % 8 == 7) return Seat{l * 16, MOVED_ROWS * MOVED_ROW + line * 48, 16, true};
    return Seat{l * 16, (l - line) * 16, MOVED_ROW, false};
}
// A thread's units of a group, or its 16 bytes of each row.
struct Four {
    Quad v[MOVED_ROWS];
};
// Where the bytes of unit `k` are, in the data of a group of which `left` bytes are there; from `left` on: there is none.
DEVICE u32 moved_unit(const Seat &l, u32 k, u32 left) { return k == 3 && l.last ? left : l.data + k * l.step; }
// What is not aligned, or ends within a unit: code apart, so that what is does not wait where the ways meet.
OUTLINE void moved_gather(Seat l, u64 at, u32 left, Four *units) {
#pragma unroll 1
    for (u32 k = 0; k < MOVED_ROWS && moved_unit(l, k, left) < left; k++)
        units->v[k] = gather16(at + moved_unit(l, k, left), left - moved_unit(l, k, left));
}
OUTLINE void moved_scatter(Seat l, u64 at, u32 left, const Four *units) {
#pragma unroll 1
    for (u32 k = 0; k < MOVED_ROWS && moved_unit(l, k, left) < left; k++)
        scatter16(at + moved_unit(l, k, left), left - moved_unit(l, k, left), units->v[k]);
}
// Those of the group at `at`, of which `left` bytes are there.
DEVICE void moved_read(const Seat &l, u64 at, u32 left, Four &units) {
    if ((at | left) % 16 == 0) {
#pragma unroll
        for (u32 k = 0; k < MOVED_ROWS; k++)
            if (moved_unit(l, k, left) < left) units.v[k] = load<Quad>(at + moved_unit(l, k, left));
    } else {
        Four odd;
        moved_gather(l, at, left, &odd);
        units = odd;
    }
}
DEVICE void moved_write(const Seat &l, u64 at, u32 left, const Four &units) {
    if ((at | left) % 16 == 0) {
#pragma unroll
        for (u32 k = 0; k < MOVED_ROWS; k++)
            if (moved_unit(l, k, left) < left) store<Quad>(at + moved_unit(l, k, left), units.v[k]);
    } else {
        Four odd = units;
        moved_scatter(l, at, left, &odd);
    }
}
// The first `rows` rows of a group to `at`; all threads of the warp together.
DEVICE void moved_put(const Seat &l, u64 at, u32 rows, u32 flag, const Four &units) {
    const Quad *v = units.v;
    // Threads that went apart before are together again: eight of them store a line in one instruction.
    warp_barrier();
#pragma unroll
    for (u32 k = 0; k < MOVED_ROWS; k++) {
        if (k >= rows) break;
        Quad q = v[k];
        if (l.last) {
            if (k == 1) q = Quad{v[0].w, v[1].x, v[1].y, 0};
            if (k == 2) q = Quad{v[1].z, v[1].w, v[2].x, 0};
            if (k == 3) q = Quad{v[2].y, v[2].z, v[2].w, 0};
            q.w = flag;
        }
        store_line(at + k * 512 + l.at, q, l.last);
    }
}
// The same, waited for; all threads of the warp together.
DEVICE bool moved_take(const Comm &c, LlShared &s, const Seat &l, u32 source, u64 at, u32 rows, u32 flag, Four &units) {
    Quad *v = units.v;
    u64 started = 0;
    // They load a row in one instruction too; each look below begins with all of them.
    warp_barrier();
#pragma unroll 1
    for (;;) {
#pragma unroll 1
        for (u32 spin = 0; spin < SPINS; spin++) {
            // All are asked for, also those that do not come, before one is looked at.
#pragma unroll
            for (u32 k = 0; k < MOVED_ROWS; k++) v[k] = load_line(at + k * 512 + l.at, l.last);
            bool good = true;
#pragma unroll
            for (u32 k = 0; k < MOVED_ROWS; k++) good &= k >= rows || !l.last || v[k].w == flag;
            if (warp_all(good)) {
                if (l.last) {
                    v[0].w = v[1].x;
                    v[1] = Quad{v[1].y, v[1].z, v[2].x, v[2].y};
                    v[2] = Quad{v[2].z, v[3].x, v[3].y, v[3].z};
                }
                return true;
            }
            relax();
        }
        started = look_up(c, source, PHASE_DATA, s.headers[source], started);
        if (UNLIKELY(!warp_all(started != 0))) return false;
    }
}

// The own part where it is small: as `copy_own`, with everything that this thread has of four rounds read before it is written.
DEVICE void moved_own(u64 to, u64 from, u32 bytes, u32 t, u32 threads) {
    if ((to | from | bytes) % 16 != 0) return copy_own(to, from, bytes, t, threads);
#pragma unroll 1
    for (u32 i = t * 16; i < bytes; i += threads * 64) {
        Quad v[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (i + k * threads * 16 < bytes) v[k] = load<Quad>(from + i + k * threads * 16);
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            if (i + k * threads * 16 < bytes) store(to + i + k * threads * 16, v[k]);
    }
}

// What a block does in one call: masks of ranks, for this block and for the call; its groups and rounds at most.
struct Moved {
    u32 sends, takes, to, from, groups_out, rounds_in;
};
DEVICE Moved moved_plan(const MoveArgs &a, LineShared &s, u32 *announced) {
    const Comm &c = a.comm;
    Moved m = {0, 0, 0, 0, 0, 0};
#pragma unroll 1
    for (u32 p = 0; p < c.ranks; p++) {
        u32 out_at, in_at;
        u32 out = moved_share(c, a.parts[p].send_bytes, &out_at), in = moved_share(c, a.parts[p].recv_bytes, &in_at);
        u32 rounds_out = moved_rounds(c, out), rounds_in = moved_rounds(c, in);
        if (thread_index() == p) s.out[p] = LinePart{out_at, out, rounds_out}, s.in[p] = LinePart{in_at, in, rounds_in};
        if (p == c.rank) continue;
        if (thread_index() - ll_workers() == p) *announced = rounds_out + rounds_in;
        m.sends |= (u32)(out != 0) << p;
        m.takes |= (u32)(in != 0) << p;
        m.to |= (u32)(a.parts[p].send_bytes != 0) << p;
        m.from |= (u32)(a.parts[p].recv_bytes != 0) << p;
        m.groups_out = moved_groups(out) > m.groups_out ? moved_groups(out) : m.groups_out;
        m.rounds_in = rounds_in > m.rounds_in ? rounds_in : m.rounds_in;
    }
    return m;
}

// What a warp sends: every `senders`th group, to all.
DEVICE bool moved_send(const MoveArgs &a, LineShared &s, const Seat &l, const Moved &m, u32 warp, u32 senders) {
    const Comm &c = a.comm;
    u32 room = moved_room(c);
    bool good = true;
#pragma unroll 1
    for (u32 round = 0; good && round * room < m.groups_out; round++) {
        u32 end = least((round + 1) * room, m.groups_out);
#pragma unroll 1
        for (u32 p = 0; good && p < c.ranks; p++)
            if (m.sends >> p & 1 && round < s.out[p].rounds) good = line_await_room(c, s, p, round);
#pragma unroll 1
        for (u32 g = round * room + warp; good && g < end; g += senders)
#pragma unroll 1
            for (u32 step = 1; step < c.ranks; step++) {
                u32 p = (c.rank + step) % c.ranks, at = g * MOVED_GROUP;
                if (!(m.sends >> p & 1) || at >= s.out[p].bytes) continue;
                Four units;
                u32 left = s.out[p].bytes - at, number = s.ll.counters[p].sent + 1 + round;
                moved_read(l, a.parts[p].send + s.out[p].start + at, left, units);
                u64 region = line_region(c, c.rank, p, number);
                moved_put(l, region + (u64)(g - round * room) * MOVED_LINES, moved_rows(left), ll_flag(number), units);
            }
    }
    return good;
}
// What a warp takes: every `takers`th group, of all.
DEVICE bool moved_receive(const MoveArgs &a, LineShared &s, const Seat &l, const Moved &m, u32 taker, u32 takers) {
    const Comm &c = a.comm;
    u32 room = moved_room(c), heard = 0;
    bool good = true;
#pragma unroll 1
    for (u32 round = 0; good && round < m.rounds_in; round++) {
        u32 going = 0;
#pragma unroll 1
        for (u32 step = 1; good && step < c.ranks; step++) {
            u32 p = (c.rank + c.ranks - step) % c.ranks;
            if (!(m.takes >> p & 1) || round >= s.in[p].rounds) continue;
            going |= 1u << p;
            u32 share = s.in[p].bytes, number = s.ll.counters[p].received + 1 + round;
            u64 out = a.parts[p].recv + s.in[p].start, region = line_region(c, p, c.rank, number);
#pragma unroll 1
            for (u32 g = taker; good && g < room; g += takers) {
                u32 at = (round * room + g) * MOVED_GROUP;
                if (at >= share) break;
                Four units;
                good = moved_take(c, s.ll, l, p, region + (u64)g * MOVED_LINES, moved_rows(share - at), ll_flag(number), units);
                if (good && g == 0 && round == 0 && (heard |= 1u << p) == m.takes) admit(c, s.ll, ADMIT_HEARD);
                if (good) moved_write(l, out + at, share - at, units);
            }
        }
        if (round + 1 < m.rounds_in) good = line_free(c, s, going, round, good, taker * 32 + thread_index() % 32, takers * 32);
    }
    return good;
}

DEVICE void line_move(const MoveArgs &a, LineShared &s) {
    const Comm &c = a.comm;
    u32 announced = 0;
    Moved m = moved_plan(a, s, &announced);
    u32 warp = thread_index() / 32, warps = ll_workers() / 32, senders = line_senders();
    const Part &self = a.parts[c.rank];
    bool copies = self.recv != self.send;
    // Who takes nothing sends with most warps, some copying the own part; who sends nothing takes with all.
    if (m.takes == 0) senders = copies ? warps - (warps + 2) / 3 : warps;
    if (m.sends == 0) senders = 0;
    u32 peer = thread_index() < 32 ? thread_index() : thread_index() - ll_workers();
    u64 word_out = peer < c.ranks ? a.parts[peer].send_word : 0, word_in = peer < c.ranks ? a.parts[peer].recv_word : 0;
    begin_early(a, s.ll, m.takes, announced);
    Seat l = seat();
    bool good = line_begin(c, s, m.sends, m.takes, m.to, m.from, word_out, word_in);
    if (good && m.takes == 0 && m.groups_out <= moved_room(c)) admit(c, s.ll, ADMIT_HEARD);
    const LinePart &own = s.in[c.rank];
    // The own part is copied by those who take, if they have to wait for nothing, or if it is much; else by those who send.
    bool by_takers = senders == 0 || m.rounds_in == 0 || own.bytes > LINE_OWN_MAX, works = good && warp < warps;
    u32 t = thread_index(), threads = warps * 32, split = senders * 32;
    if (works && warp < senders) {
        good = moved_send(a, s, l, m, warp, senders);
        if (good && copies && !by_takers) moved_own(self.recv + own.start, self.send + own.start, own.bytes, t, split);
    } else if (works) {
        if (copies && by_takers) copy_own(self.recv + own.start, self.send + own.start, own.bytes, t - split, threads - split);
        good = moved_receive(a, s, l, m, warp - senders, warps - senders);
    }
    u32 p = thread_index() < c.ranks ? thread_index() : 0;
    ll_end(c, s.ll, good, m.sends, m.takes, m.from, m.takes ? split : 0, s.out[p].rounds, s.in[p].rounds);
}
