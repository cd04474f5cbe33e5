// Runs the kernels on CPU threads, several ranks at once, without a word between calls, and compares with a
// plain loop. Built by `cargo xtask kernels --check` where a C++ compiler is found.
#define BEELINE_HOST
#define BEELINE_PUSH_BLOCKS 2
#define BEELINE_CHUNK_MIN 512
#define BEELINE_BULK_PIECE 1024
#define SPINS 64
#include "../beeline/moved.cuh"
#include "../beeline/push.cuh"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

static const u32 CHUNK = 4096, THREADS = 128, BLOCKS = 2, LINE_SPAN = 4 * LINE_GROUP, LINE_BLOCKS = 16;
enum Way { PACKETS, LINES, PUSH };
static const Way WAYS[] = {PACKETS, LINES, PUSH};
static int failures = 0;
// Where the counters of a new world stand, as if there had been that many calls, messages and chunks.
static u32 counters_at = 0;
#define CHECK(what, ...)                 \
    do {                                 \
        if (!(what)) {                   \
            failures++;                  \
            printf("WRONG " __VA_ARGS__); \
            printf("\n");                \
        }                                \
    } while (0)

struct World {
    u32 n;
    std::vector<u8 *> windows;
    std::vector<Report *> reports;
    std::vector<u32 *> aborts;
    u64 push_at, line_at;
    explicit World(u32 n) : n(n) {
        push_at = AT_LL + (u64)(n - 1) * LL_SLOTS * LL_BLOCKS_MAX * LL_REGION;
        line_at = push_at + (u64)(n - 1) * PUSH_BLOCKS * PUSH_SLOTS * CHUNK;
        u64 bytes = line_at + (u64)(n - 1) * LL_SLOTS * LL_BLOCKS_MAX * (LINE_SPAN / LINE_DATA * 128);
        for (u32 r = 0; r < n; r++) {
            windows.push_back((u8 *)aligned_alloc(4096, bytes));
            memset(windows[r], 0, bytes);
            count_on(windows[r]);
            reports.push_back((Report *)calloc(1, WAITING_AT + 8));
            aborts.push_back((u32 *)calloc(1, 64));
        }
    }
    // What as many calls leave behind; packets were short, so that none is where a longer message comes.
    static void count_on(u8 *window) {
        auto fill = [&](u64 from, u64 to) {
            for (u64 at = from; counters_at && at < to; at += 4) memcpy(window + at, &counters_at, 4);
        };
        fill(AT_CALLS, AT_CALLS + RANKS_MAX * 16);
        fill(AT_HEADERS, AT_PUSH_FLAGS + (u64)PUSH_BLOCKS * RANKS_MAX * PUSH_SLOTS * 4);
        fill(AT_LL_CALLED, AT_LL_CALLED + (u64)LL_BLOCKS_MAX * RANKS_MAX * 4);
        fill(AT_OFFERS, AT_OFFERS + (u64)PUSH_BLOCKS * RANKS_MAX * 32);
    }
    ~World() {
        for (u32 r = 0; r < n; r++) free(windows[r]), free(reports[r]), free(aborts[r]);
    }
    Comm comm(u32 rank, u64 call, u64 timeout_ms) {
        Comm c = {};
        for (u32 r = 0; r < n; r++) c.windows[r] = (u64)windows[r];
        c.report = (u64)reports[rank], c.abort = (u64)aborts[rank], c.timeout_ns = timeout_ms * 1000000;
        c.call = call, c.push_at = push_at, c.chunk = CHUNK, c.rank = rank, c.ranks = n;
        c.ll_blocks = LINE_BLOCKS, c.line_at = line_at, c.line_span = LINE_SPAN;
        c.counted = rank % 2;
        c.admits = ADMIT_THERE, c.atomics = 1;
        return c;
    }
    // Every second rank counts its blocks of packets and lines.
    void check_counted(Way way, u32 rank, u32 blocks) {
        u32 done = host_word<u32>((u64)windows[rank] + AT_DONE);
        CHECK(done == (rank % 2 && way != PUSH ? blocks : 0), "way %d rank %u: %u blocks counted of %u", way, rank, done, blocks);
    }
};

template <class S, class F>
static void launch(u32 blocks, F kernel) {
    for (u32 b = 0; b < blocks; b++) { // in order, as blocks of one device that can hold a single one
        HostBlock block;
        S shared;
        memset((void *)&shared, 0x5a, sizeof shared);
        std::vector<std::thread> threads;
        for (u32 t = 0; t < THREADS; t += 32)
            threads.emplace_back([&, t] {
                host_threads = THREADS, host_block_index = b, host_block = &block;
                for (u32 l = 0; l < 32; l++) host_unready[t + l] = std::is_same<S, LlShared>::value || std::is_same<S, LineShared>::value;
                auto warp = std::make_unique<HostWarp>();
                warp->run(t, [&] { kernel(shared); });
            });
        for (auto &t : threads) t.join();
    }
}
// Blocks for `bytes`, and the kernel of a way for them.
static u32 blocks_of(Way way, u64 bytes) {
    u64 span = way == LINES ? LINE_SPAN_MIN : 2048, blocks = (bytes + span - 1) / span;
    return way == PUSH ? BLOCKS : (u32)(blocks < LINE_BLOCKS ? blocks : LINE_BLOCKS);
}
static void run(Way way, const MoveArgs &a, u64 most) {
    PushMoveArgs unregistered = {};
    unregistered.move = a;
    static BulkShared bulk; // of nobody's interest here
    if (way == PUSH) launch<PushShared>(blocks_of(way, most), [&](PushShared &s) { push_move(unregistered, s, bulk); });
    if (way == LINES) launch<LineShared>(blocks_of(way, most), [&](LineShared &s) { line_move(a, s); });
    if (way == PACKETS) launch<LlShared>(blocks_of(way, most), [&](LlShared &s) { ll_move(a, s); });
}
template <class T, int OP>
static void run(Way way, const ReduceArgs &a) {
    if (way == PUSH) launch<PushShared>(blocks_of(way, a.bytes), [&](PushShared &s) { push_reduce<T, OP>(a, s); });
    if (way == LINES) launch<LineShared>(blocks_of(way, a.bytes), [&](LineShared &s) { line_reduce<T, OP>(a, s); });
    if (way == PACKETS) launch<LlShared>(blocks_of(way, a.bytes), [&](LlShared &s) { ll_reduce<T, OP>(a, s); });
}
static void everywhere(u32 n, std::function<void(u32)> f) {
    std::vector<std::thread> ranks;
    for (u32 r = 0; r < n; r++) ranks.emplace_back([&, r] { f(r); });
    for (auto &t : ranks) t.join();
}

template <class T>
static double value(typename T::Bits b) { return (double)T::decode(b); }
template <class T>
static typename T::Bits of(double v) { return T::encode((typename T::Acc)v); }

enum Kind { ALL_REDUCE, REDUCE_SCATTER, REDUCE };

// Blocks that let the next kernel start, each once and none of chunks. A block that is done before it learns of its peers' room
// lets nothing start; that is rare.
static u64 met = 0, could_meet = 0;
static void meetings(const char *name, Way way, u32 times, u32 blocks) {
    CHECK(times <= (way == PUSH ? 0 : blocks), "%s way %d: %u blocks of %u let the next kernel start", name, way, times, blocks);
    met += times, could_meet += way == PUSH ? 0 : blocks;
}

template <class T, int OP>
static void reduces(const char *name, u32 n, Way way, Kind kind, u64 count, u32 shift, bool in_place, Weigh w) {
    typedef typename T::Bits B;
    World world(n);
    const int CALLS = 5;
    u64 parts = kind == REDUCE_SCATTER ? n : 1;
    std::atomic<u32> all_blocks{0};
    u32 admissions = host_admissions;
    everywhere(n, [&](u32 rank) {
        u32 blocks = 0;
        for (int call = 0; call < CALLS; call++) {
            u64 more = call % 2 ? count : (count + 1) / 2; // sizes change from call to call
            std::vector<B> in_mem(more * parts + 64), out_mem(more + 64);
            B *in = in_mem.data() + shift, *out = in_place ? in + (kind == REDUCE_SCATTER ? rank * more : 0) : out_mem.data() + 2 * shift;
            auto input = [&](u32 r, u64 i) { return of<T>((double)((i * 7 + r * 3 + call) % 5) + (OP == PROD ? 1 : 0)); };
            for (u64 i = 0; i < more * parts; i++) in[i] = input(rank, i);
            ReduceArgs a = {};
            a.comm = world.comm(rank, 0x100 + kind, 8000);
            a.word = more;
            a.in = (u64)in, a.out = (u64)out, a.bytes = more * sizeof(B), a.stride = kind == REDUCE_SCATTER ? a.bytes : 0;
            u32 all = ((1u << n) - 1) & ~(1u << rank), root = 1;
            a.send_mask = kind == REDUCE ? (rank == root ? 0 : 1u << root) : all;
            a.recv_mask = kind == REDUCE ? (rank == root ? all : 0) : all;
            a.scalar = w.multiply ? (u64)of<T>(rank + 1) : 0, a.multiply = w.multiply, a.divide = w.divide;
            run<T, OP>(way, a);
            world.check_counted(way, rank, blocks += blocks_of(way, a.bytes));
            all_blocks += blocks_of(way, a.bytes);
            CHECK(world.reports[rank]->code == 0, "%s rank %u call %d: code %u phase %u peer %u", name, rank, call, world.reports[rank]->code, world.reports[rank]->phase, world.reports[rank]->peer);
            if (world.reports[rank]->code) return;
            if (a.recv_mask)
                for (u64 i = 0; i < more; i++) {
                    u64 at = kind == REDUCE_SCATTER ? rank * more + i : i;
                    double want = 0;
                    for (u32 r = 0; r < n; r++) {
                        double v = value<T>(input(r, at));
                        if (w.multiply) v = value<T>(of<T>(v * value<T>(of<T>(r + 1))));
                        want = r == 0 ? v : OP == SUM ? want + v : OP == PROD ? want * v : OP == MIN ? (v < want ? v : want) : (v > want ? v : want);
                    }
                    if (w.divide) want = sizeof(B) == 4 || std::is_same<typename T::Acc, float>::value || std::is_same<typename T::Acc, double>::value ? want / w.divide : (double)(long long)(want / w.divide);
                    if (of<T>(want) != out[i]) {
                        CHECK(false, "%s n %u way %d kind %d count %llu shift %u in place %d rank %u call %d [%llu]: %g, not %g", name, n, way, kind, more, shift, in_place, rank, call, i, value<T>(out[i]), want);
                        break;
                    }
                }
            for (u64 i = more; i < more + 8 && !in_place; i++) CHECK(out[i] == 0, "%s wrote beyond the end", name);
        }
    });
    meetings(name, way, host_admissions - admissions, all_blocks);
}

// Every rank sends `bytes` + its own number + the peer's to each peer of a ring or to all.
// Rank 0 sends to rank 1, which is late for every call, and both to themselves, where `slow` is set, so that the others run ahead as far as they may.
static void moves(u32 n, Way way, u64 bytes, u32 shift, bool ring, bool slow = false) {
    World world(n);
    auto size = [&](u32 from, u32 to) -> u64 { if (slow) return to < 2 && from <= to && from < 2 ? bytes : 0; return ring ? ((from + 1) % n == to ? bytes + from : 0) : bytes + from * 3 + to; };
    std::atomic<u32> all_blocks{0};
    u32 admissions = host_admissions;
    everywhere(n, [&](u32 rank) {
        u32 blocks = 0;
        for (int call = 0; call < 6; call++) {
            std::vector<std::vector<u8>> out(n), in(n);
            MoveArgs a = {};
            a.comm = world.comm(rank, 7, 8000);
            u64 most = 1;
            if (slow && rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            for (u32 p = 0; p < n; p++) {
                u64 s = size(rank, p), r = size(p, rank);
                out[p].resize(s + 32), in[p].resize(r + 32, 0xee);
                for (u64 i = 0; i < s; i++) out[p][shift + i] = (u8)(i * 11 + i / 253 + rank * 5 + p * 3 + call);
                a.parts[p] = Part{(u64)out[p].data() + shift, s, (u64)in[p].data() + (shift + 5) % 16, r, s, r};
                most = s > most ? s : most, most = r > most ? r : most;
            }
            run(way, a, most);
            world.check_counted(way, rank, blocks += blocks_of(way, most));
            all_blocks += blocks_of(way, most);
            CHECK(world.reports[rank]->code == 0, "move rank %u call %d: code %u phase %u", rank, call, world.reports[rank]->code, world.reports[rank]->phase);
            if (world.reports[rank]->code) return;
            for (u32 p = 0; p < n; p++) {
                u64 r = size(p, rank);
                for (u64 i = 0; i < r; i++)
                    if (in[p][(shift + 5) % 16 + i] != (u8)(i * 11 + i / 253 + p * 5 + rank * 3 + call)) {
                        CHECK(false, "move n %u way %d bytes %llu shift %u ring %d rank %u from %u call %d byte %llu", n, way, bytes, shift, ring, rank, p, call, i);
                        break;
                    }
                CHECK(in[p][(shift + 5) % 16 + r] == 0xee, "move wrote beyond the end");
            }
        }
    });
    meetings(ring ? "ring" : "moves", way, host_admissions - admissions, all_blocks);
}

#include "direct.h"

// Every block lets the next kernel start as soon as it may.
static void admissions(Way way, u32 when, bool one_way) {
    World world(2);
    std::vector<float> x(4096), y(4096);
    u32 before = host_admissions;
    everywhere(2, [&](u32 rank) {
        ReduceArgs a = {};
        a.comm = world.comm(rank, 5, 5000);
        a.comm.admits = when;
        a.in = (u64)x.data(), a.out = (u64)(rank ? y.data() + 2048 : y.data()), a.bytes = 8192;
        a.send_mask = one_way && rank == 1 ? 0 : 2u >> rank, a.recv_mask = one_way && rank == 0 ? 0 : 2u >> rank;
        run<F32, SUM>(way, a);
    });
    u32 times = host_admissions - before, blocks = 2 * blocks_of(way, 8192);
    bool may = when != ADMIT_NEVER && way != PUSH;
    CHECK(when == ADMIT_THERE ? times == 0 || may : (times != 0) == may, "way %d, when %u: admitted %u", way, when, times);
    CHECK(when != ADMIT_THERE || times <= blocks, "way %d: %u blocks of %u let the next kernel start", way, times, blocks);
}

static void troubles(Way way, int kind, u32 when) { // 0 another call, 1 never comes, 2 abort, 3 another rank failed
    World world(2);
    std::vector<float> x(4096), y(4096);
    everywhere(2, [&](u32 rank) {
        if (kind >= 1 && rank == 1) {
            if (kind == 2) {
                std::this_thread::sleep_for(std::chrono::milliseconds(30));
                host_word<u32>((u64)world.aborts[0]).store(1);
            } else if (kind == 3) {
                host_word<u32>((u64)world.windows[0] + AT_POISON).store(2);
            }
            return;
        }
        ReduceArgs a = {};
        u64 count = kind == 0 && rank == 1 ? 100 : 3000;
        a.comm = world.comm(rank, 5, kind == 1 ? 50 : 5000);
        a.word = count;
        a.in = (u64)x.data(), a.out = (u64)y.data(), a.bytes = count * 4, a.send_mask = a.recv_mask = 2u >> rank;
        // A block that gives up is done, too.
        a.comm.counted = 1;
        // And one that waits for a rank that never comes lets no other start.
        a.comm.admits = when;
        u32 before = host_admissions;
        run<F32, SUM>(way, a);
        CHECK(kind == 0 || host_admissions == before, "trouble %d way %d: the next kernel was let start", kind, way);
        u32 done = host_word<u32>((u64)world.windows[rank] + AT_DONE);
        CHECK(done == (way == PUSH ? 0 : blocks_of(way, a.bytes)), "trouble %d way %d: %u blocks counted", kind, way, done);
    });
    for (u32 r = 0; r < (kind == 0 ? 2u : 1u); r++) {
        Report &rep = *world.reports[r];
        bool right = kind == 0 ? rep.code == MISMATCH || rep.code == PEER_FAILED : rep.code == (kind == 1 ? (u32)DEADLINE : kind == 2 ? (u32)ABORTED : (u32)PEER_FAILED);
        CHECK(right && rep.peer == 1 - r && rep.mine[0] == 5, "trouble %d way %d rank %u: code %u peer %u", kind, way, r, rep.code, rep.peer);
        if (rep.code == MISMATCH) CHECK(rep.theirs[1] == (r == 0 ? 100 : 3000), "trouble %d: theirs %llu", kind, rep.theirs[1]);
    }
}

// A call behind one that failed takes nothing, whatever is there by then: it cannot know whether that is for this call.
static void after_failure() {
    World world(2);
    std::vector<u8> out(900, 1), in(900, 0xee);
    for (int call = 0; call < 2; call++)
        for (u32 rank : {0u, 1u}) {
            MoveArgs a = {};
            a.comm = world.comm(rank, rank == 1 && call == 0 ? 8 : 7, 2000);
            if (rank == 0)
                a.parts[1] = Part{(u64)out.data(), out.size(), 0, 0, 900, 0};
            else
                a.parts[0] = Part{0, 0, (u64)in.data(), in.size(), 0, 900};
            std::fill(in.begin(), in.end(), 0xee);
            run(PUSH, a, out.size());
        }
    CHECK(world.reports[1]->code == MISMATCH, "after a failure: code %u", world.reports[1]->code);
    CHECK(std::count(in.begin(), in.end(), 0xee) == 900, "after a failure: chunks were taken");
}

#include "stage.h"

int main() {
    stages();
    for (u32 n : {2u, 3u})
        for (Way way : WAYS) {
            for (bool ring : {false, true})
                for (u64 bytes : {1ull, 7ull, 64ull, 5000ull, 70001ull})
                    if (way != PACKETS || bytes < 70000) moves(n, way, bytes, bytes % 3, ring);
            for (Kind kind : {ALL_REDUCE, REDUCE_SCATTER, REDUCE})
                for (u64 count : {1ull, 3ull, 1000ull, 20011ull}) {
                    if (way != PACKETS || count < 20000) {
                        reduces<F32, SUM>("f32 sum", n, way, kind, count, 0, false, Weigh{});
                        reduces<F32, SUM>("f32 sum", n, way, kind, count, 1, true, Weigh{});
                        reduces<E4M3, SUM>("e4m3 sum", n, way, kind, count, 3, kind != REDUCE, Weigh{});
                    }
                }
            reduces<BF16, SUM>("bf16 avg", n, way, ALL_REDUCE, 501, 0, false, Weigh{0, 0, n});
            reduces<F16, SUM>("f16 pre-mul", n, way, ALL_REDUCE, 501, 1, true, Weigh{0x3800, 1, 0});
            reduces<F64, PROD>("f64 prod", n, way, ALL_REDUCE, 501, 0, true, Weigh{});
            reduces<I8, MIN>("i8 min", n, way, ALL_REDUCE, 501, 5, true, Weigh{});
            reduces<U64, MAX>("u64 max", n, way, ALL_REDUCE, 501, 0, true, Weigh{});
            reduces<E5M2, PROD>("e5m2 prod", n, way, ALL_REDUCE, 501, 1, true, Weigh{});
            reduces<I32, SUM>("i32 sum", n, way, ALL_REDUCE, 501, 1, true, Weigh{});
        }
    for (Way way : WAYS)
        for (int kind : {0, 1, 2, 3})
            for (u32 when : {ADMIT_HEARD, ADMIT_THERE}) troubles(way, kind, when);
    for (Way way : WAYS)
        for (u32 when : {ADMIT_NEVER, ADMIT_AT_ONCE, ADMIT_HEARD, ADMIT_THERE})
            for (bool one_way : {false, true}) admissions(way, when, one_way);
    after_failure();
    straight(2, 70001, 1);
    straight(3, 40000, 0);
    straight(8, 40000, 0);
    straight_troubles();
    straight_late();
    straight_changes();
    for (u32 start : {0xfffffffdu, 0xffffffffu}) { // by stores
        counters_at = start, host_has_bulk = false;
        straight(2, 40000, 0);
        straight_late();
    }
    straight_troubles();
    host_has_bulk = true;
    for (u32 start : {0xfffffffdu, 0xffffffffu}) // counters wrap on the way
        for (Way way : WAYS) {
            counters_at = start;
            moves(3, way, 5000, 1, false);
            moves(2, way, 9000, 0, false, true);
            reduces<F32, SUM>("wrapping", 2, way, ALL_REDUCE, 5000, 0, true, Weigh{});
            reduces<F32, SUM>("wrapping", 3, way, REDUCE, 2000, 0, false, Weigh{});
            for (int kind : {0, 1}) troubles(way, kind, ADMIT_THERE);
        }
    counters_at = 0;
    host_fault = 1; // packets torn for long
    for (Way way : WAYS) {
        moves(2, way, 3000, 0, false, true);
        moves(2, way, way == LINES ? 90000 : 9000, 0, false, true);
        reduces<F32, SUM>("torn", 2, way, ALL_REDUCE, 1000, 0, true, Weigh{});
    }
    host_fault = 0;
    // FP8 against the definition, every pair of neighbours and their middle.
    for (int v = 0; v < 256; v++) {
        CHECK(E4M3::decode((u8)v) != E4M3::decode((u8)v) || E4M3::encode(E4M3::decode((u8)v)) == v, "e4m3 %d", v);
        if ((v & 0x7f) != 0x7c) CHECK(E5M2::decode((u8)v) != E5M2::decode((u8)v) || E5M2::encode(E5M2::decode((u8)v)) == v, "e5m2 %d", v);
        if ((v & 0x7f) < 0x7e) {
            float a = E4M3::decode((u8)v), b = E4M3::decode((u8)(v + 1));
            u8 even = v & 1 ? (u8)(v + 1) : (u8)v;
            CHECK(E4M3::encode((a + b) / 2) == even, "e4m3 middle of %d", v);
        }
        if ((v & 0x7f) < 0x7b) {
            float a = E5M2::decode((u8)v), b = E5M2::decode((u8)(v + 1));
            CHECK(E5M2::encode((a + b) / 2) == (v & 1 ? (u8)(v + 1) : (u8)v), "e5m2 middle of %d", v);
        }
    }
    CHECK(E4M3::decode(0x7e) == 448 && E5M2::decode(0x7b) == 57344 && E4M3::decode(1) == 0.001953125f, "fp8 values");
    CHECK(E4M3::encode(1e9f) == 0x7e && E5M2::encode(-1e9f) == 0xfb, "fp8 saturates");
    CHECK(met * 4 > could_meet * 3, "%llu blocks of %llu let the next kernel start", met, could_meet);
    CHECK(host_too_early == 0, "%u accesses before the kernel before had ended", host_too_early.load());
    printf("%d wrong\n", failures);
    return failures != 0;
}
