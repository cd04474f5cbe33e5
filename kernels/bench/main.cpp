// The kernels on real devices, without the library around them: every type and operator against a plain
// loop on the CPU, then times. Loads the committed PTX through the driver. One process, one thread, rank r on
// device r (`one`: on device 0). Usage: kernels-bench FOLDER_OF_PTX [check] [faults] [times] [slots] [some] [mutant [PART..]] [late] [one]
#define BEELINE_HOST
#include "../beeline/types.cuh"
#include "../beeline/layout.cuh"
#include <cuda.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <unistd.h>
#include <vector>

static void ck(CUresult e, const char *what, int line) {
    if (!e) return;
    const char *text = "?";
    cuGetErrorString(e, &text);
    printf("ERROR %s line %d: %d %s\n", what, line, (int)e, text);
    fflush(stdout);
    _exit(1);
}
#define CK(x) ck((x), #x, __LINE__)
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static int wrong = 0;
// Fewer cases of the kinds that take long.
static bool brief = false;

static const u32 N = 2;
static const u64 BUFFER = 1ull << 30;
struct Rank {
    CUcontext ctx;
    CUdevice dev;
    CUstream stream, side;
    CUdeviceptr window, in, out;
    Report *report;
    u32 *abort;
} g[N];
static u64 push_at, line_at, ce_at, window_bytes;
static u32 chunk = 65536;
// As crates/beeline-sys/src/cuda/collective.rs has them for two ranks.
static const u32 LINE_SPAN = 137 * 480, LINE_BLOCK = 8 * 480, LINE_THREADS = 544, LINE_THREADS_FEW = 352, TINY_MAX = 256;
enum Way { LL, LINE, PUSH };
static const char *WAY[] = {"ll", "line", "push"};
static std::string ptx_folder;
// Whether kernels are built with the instructions that are behind marks, and whether those of packets and lines are launched
// so that they may start early.
static bool marked = true, early = true;
static const u64 EARLY_MAX = 8 << 20;

struct Kernels {
    CUmodule module[N];
    CUfunction function[3][N];
    double load_ms = 0;
    Kernels(const std::string &name, const std::string &kind) {
        FILE *f = fopen((ptx_folder + "/" + name + ".ptx").c_str(), "rb");
        if (!f) { printf("no %s\n", name.c_str()); _exit(1); }
        std::vector<char> text(1 << 20);
        text.resize(fread(text.data(), 1, text.size() - 1, f) + 1), text.back() = 0;
        fclose(f);
        // As `cargo xtask kernels` does where it makes machine code.
        std::string ptx = text.data();
        for (const char *mark : {"//sm_90 ", ".target sm_80"})
            for (size_t at = 0; marked && (at = ptx.find(mark, at)) != ptx.npos;) ptx.replace(at, strlen(mark), mark[0] == '/' ? "" : ".target sm_90");
        for (size_t at = 0; marked && (at = ptx.find(".entry bl_line_", at)) != ptx.npos; at++) {
            const char *any = ".minnctapersm 1", *limit = ".maxnreg 80";
            size_t bounds = ptx.find(any, at);
            if (bounds != ptx.npos && bounds < ptx.find('{', at)) ptx.replace(bounds, strlen(any), limit);
        }
        double t = now();
        for (u32 r = 0; r < N; r++) {
            CK(cuCtxSetCurrent(g[r].ctx));
            CK(cuModuleLoadData(&module[r], ptx.c_str()));
            for (int way : {LL, LINE, PUSH}) CK(cuModuleGetFunction(&function[way][r], module[r], ("bl_" + std::string(WAY[way]) + "_" + kind).c_str()));
        }
        load_ms = (now() - t) * 1e3;
    }
    ~Kernels() {
        for (u32 r = 0; r < N; r++) cuCtxSetCurrent(g[r].ctx), cuModuleUnload(module[r]);
    }
};

static Comm comm(u32 r, u64 call, u64 timeout_ms = 5000) {
    Comm c = {};
    for (u32 p = 0; p < N; p++) c.windows[p] = g[p].window;
    CUdeviceptr d;
    CK(cuCtxSetCurrent(g[r].ctx));
    CK(cuMemHostGetDevicePointer(&d, g[r].report, 0)), c.report = d;
    CK(cuMemHostGetDevicePointer(&d, g[r].abort, 0)), c.abort = d;
    c.timeout_ns = timeout_ms * 1000000, c.call = call, c.push_at = push_at, c.chunk = chunk, c.rank = r, c.ranks = N, c.ll_blocks = LL_BLOCKS_MAX, c.line_at = line_at, c.line_span = LINE_SPAN, c.atomics = 1;
    return c;
}
static u32 shift_of(u64 bytes) { return bytes <= LL_BLOCKS_MAX * 2048ull ? 11 : bytes <= LL_BLOCKS_MAX * 4096ull ? 12 : 13; }
static const u64 LL_MAX = (u64)LL_BLOCKS_MAX * LL_SPAN_MAX;
static u32 push_threads = 1024;
static u64 way_max(Way way) { return way == LL ? LL_MAX : way == LINE ? 64ull << 20 : ~0ull; }

static void launch(CUfunction f, CUstream s, u32 blocks, u32 threads, void *args, bool starts_early, u32 shared = 0) {
    void *params[] = {args};
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = blocks, config.gridDimY = config.gridDimZ = 1, config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1, config.hStream = s, config.sharedMemBytes = shared;
    config.attrs = &attribute, config.numAttrs = starts_early && early;
    CK(cuLaunchKernelEx(&config, f, params, nullptr));
}
// What kernels of chunks take: nothing is registered here.
static PushMoveArgs of_chunks(const MoveArgs &a) {
    PushMoveArgs all = {};
    all.move = a;
    return all;
}
static ReduceArgs of_chunks(const ReduceArgs &a) { return a; }
// `most` is the largest part's bytes.
template <class A>
static void run(const Kernels &k, u32 r, A &a, u64 most, Way way) {
    CK(cuCtxSetCurrent(g[r].ctx));
    a.comm.admits = !early || way == PUSH || most > EARLY_MAX ? ADMIT_NEVER : way == LL && most <= TINY_MAX ? ADMIT_AT_ONCE : ADMIT_THERE;
    if (way == PUSH) {
        auto all = of_chunks(a);
        launch(k.function[PUSH][r], g[r].stream, (u32)std::min<u64>(PUSH_BLOCKS, std::max<u64>(1, (most + 15) / 16)), push_threads, &all, false);
    } else if (way == LINE) {
        launch(k.function[LINE][r], g[r].stream, (u32)std::min<u64>(LL_BLOCKS_MAX, (most + LINE_BLOCK - 1) / LINE_BLOCK), most <= (std::is_same<A, MoveArgs>::value ? 4 : 2) << 20 ? LINE_THREADS_FEW : LINE_THREADS, &a, most <= EARLY_MAX);
    } else {
        u64 span = 1ull << shift_of(most), packets = (std::min(most, span) + 7) / 8;
        launch(k.function[LL][r], g[r].stream, (u32)((most + span - 1) / span), most > span ? 352 : (u32)std::min<u64>(320, (packets + 31) / 32 * 32) + 32, &a, true);
    }
}
static void finish() {
    for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuStreamSynchronize(g[r].stream));
}
static bool reported() {
    bool any = false;
    for (u32 r = 0; r < N; r++)
        if (g[r].report->code) {
            Report &p = *g[r].report;
            printf("REPORT rank %u: code %u peer %u phase %u block %u mine %llx %llu theirs %llx %llu waited %.3f ms\n", r, p.code, p.peer, p.phase, p.block, p.mine[0], p.mine[1], p.theirs[0], p.theirs[1], p.waited_ns / 1e6);
            any = true;
        }
    return any;
}
static void reset() {
    for (u32 r = 0; r < N; r++) {
        CK(cuCtxSetCurrent(g[r].ctx));
        CK(cuMemsetD8(g[r].window, 0, window_bytes));
        memset(g[r].report, 0, sizeof(Report));
        *g[r].abort = 0;
    }
    for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuCtxSynchronize());
}

enum Kind { ALL_REDUCE, REDUCE_SCATTER, REDUCE };
static ReduceArgs reduce_args(u32 r, Kind kind, u64 in, u64 out, u64 bytes, Weigh w, u64 timeout = 5000) {
    ReduceArgs a = {};
    a.comm = comm(r, 0x100 + kind, timeout);
    a.in = in, a.out = out, a.bytes = bytes, a.stride = kind == REDUCE_SCATTER ? bytes : 0, a.word = bytes;
    u32 all = ((1u << N) - 1) & ~(1u << r), root = 1;
    a.send_mask = kind == REDUCE ? (r == root ? 0 : 1u << root) : all;
    a.recv_mask = kind == REDUCE ? (r == root ? all : 0) : all;
    a.scalar = w.scalar, a.multiply = w.multiply, a.divide = w.divide;
    return a;
}

template <class T, int OP>
static void check_type(const char *file, Weigh special = {}) {
    typedef typename T::Bits B;
    Kernels k(file, "reduce");
    u64 counts[] = {1, 3, 31, 1000, 4097, 65539, 1000003};
    int cases = 0, bad = 0;
    for (Kind kind : {ALL_REDUCE, REDUCE_SCATTER, REDUCE})
        for (u64 count : counts)
            for (Way way : {LL, LINE, PUSH})
                for (u32 off : {0u, 1u})
                    for (bool in_place : {false, true})
                        for (int weigh = 0; weigh < (OP == SUM ? 3 : 1); weigh++) {
                            Weigh w = weigh == 1 ? Weigh{0, 0, N} : weigh == 2 ? special : Weigh{};
                            if ((weigh || off) && count > 70000) continue;
                            if (weigh == 2 && !w.multiply) continue;
                            u64 parts = kind == REDUCE_SCATTER ? N : 1, bytes = count * sizeof(B);
                            if (bytes > way_max(way)) continue;
                            std::vector<std::vector<B>> in(N);
                            for (u32 r = 0; r < N; r++) {
                                in[r].resize(count * parts);
                                for (u64 i = 0; i < in[r].size(); i++) in[r][i] = T::encode((typename T::Acc)((i * 7 + r * 3 + i / 997) % 6 + (OP == PROD)));
                                CK(cuCtxSetCurrent(g[r].ctx));
                                CK(cuMemsetD8Async(g[r].out, 0xc5, bytes + 64, g[r].stream));
                                CK(cuMemcpyHtoDAsync(g[r].in + off * sizeof(B), in[r].data(), in[r].size() * sizeof(B), g[r].stream));
                            }
                            finish();
                            for (u32 r = 0; r < N; r++) {
                                u64 i = g[r].in + off * sizeof(B), o = in_place ? i + (kind == REDUCE_SCATTER ? r * bytes : 0) : g[r].out + off * sizeof(B);
                                ReduceArgs a = reduce_args(r, kind, i, o, bytes, w);
                                if (w.multiply && r) a.scalar = (u64)(typename std::make_unsigned<B>::type)T::encode((typename T::Acc)2);
                                run(k, r, a, bytes, way);
                            }
                            finish();
                            cases++;
                            if (reported()) { printf("WRONG %s kind %d count %llu way %d: gave up\n", file, kind, count, way); wrong++; reset(); continue; }
                            for (u32 r = kind == REDUCE ? 1 : 0; r < N; r++) {
                                std::vector<B> got(count);
                                u64 o = in_place ? g[r].in + off * sizeof(B) + (kind == REDUCE_SCATTER ? r * bytes : 0) : g[r].out + off * sizeof(B);
                                CK(cuCtxSetCurrent(g[r].ctx));
                                CK(cuMemcpyDtoH(got.data(), o, bytes));
                                for (u64 i = 0; i < count; i++) {
                                    u64 at = kind == REDUCE_SCATTER ? r * count + i : i;
                                    typename T::Acc acc{};
                                    for (u32 p = 0; p < N; p++) {
                                        typename T::Acc e = T::decode(in[p][at]);
                                        if (w.multiply) e = T::decode(T::encode(T::product(e, T::decode(p == 0 ? (B)w.scalar : T::encode((typename T::Acc)2)))));
                                        acc = p == 0 ? e : OP == SUM ? T::sum(acc, e) : OP == PROD ? T::product(acc, e) : OP == MIN ? T::least(acc, e) : T::greatest(acc, e);
                                    }
                                    if (w.divide) acc = T::divide(acc, w.divide);
                                    if (T::encode(acc) != got[i]) {
                                        bad++;
                                        if (bad < 4) printf("WRONG %s kind %d count %llu way %d off %u in place %d weigh %d rank %u [%llu]: %g not %g\n", file, kind, count, way, off, in_place, weigh, r, i, (double)T::decode(got[i]), (double)acc);
                                        break;
                                    }
                                }
                                if (!in_place) {
                                    u8 guard[8];
                                    CK(cuMemcpyDtoH(guard, o + bytes, 8));
                                    for (u8 b : guard) if (b != 0xc5) { bad++; if (bad < 4) printf("WRONG %s wrote beyond the end\n", file); break; }
                                }
                            }
                        }
    printf("%-10s %4d cases, %d wrong, module loaded in %.0f ms on %u devices\n", file, cases, bad, k.load_ms, N);
    fflush(stdout);
    wrong += bad;
}
template <class T>
static void check_ops(const std::string &t, u64 scalar) {
    check_type<T, SUM>((t + "-sum").c_str(), Weigh{scalar, 1, 0});
    check_type<T, PROD>((t + "-prod").c_str());
    check_type<T, MIN>((t + "-min").c_str());
    check_type<T, MAX>((t + "-max").c_str());
}

// What each collective moves: bytes from rank to peer, and where.
enum Move { ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, GATHER };
static MoveArgs move_args(u32 r, Move what, u64 in, u64 out, u64 bytes, u64 timeout = 5000) {
    MoveArgs a = {};
    a.comm = comm(r, 0x200 + what, timeout);
    for (u32 p = 0; p < N; p++) {
        u64 send = 0, recv = 0, from = in, to = out;
        if (what == ALL_GATHER) send = recv = bytes, to = out + p * bytes;
        if (what == BROADCAST) send = r == 0 ? bytes : 0, recv = p == 0 ? bytes : 0;
        if (what == ALL_TO_ALL) send = recv = bytes, from = in + p * bytes, to = out + p * bytes;
        if (what == SEND) send = p != r ? bytes : 0, recv = send;
        if (what == GATHER) send = p == 1 ? bytes : 0, recv = r == 1 ? bytes : 0, to = out + p * bytes;
        a.parts[p] = Part{from, send, to, recv, send, recv};
    }
    return a;
}
static void check_moves() {
    Kernels k("move", "move");
    int cases = 0, bad = 0;
    for (Move what : {ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, GATHER})
        for (u64 bytes : {1ull, 7ull, 16ull, 1000ull, 4099ull, 70001ull, 1000003ull, 20000000ull})
            for (Way way : {LL, LINE, PUSH})
                for (u32 off : {0u, 3u, 8u}) {
                    if (bytes > way_max(way) || (brief && off != 0 && bytes > 5000000)) continue;
                    std::vector<std::vector<u8>> in(N);
                    for (u32 r = 0; r < N; r++) {
                        in[r].resize(bytes * N);
                        for (u64 i = 0; i < in[r].size(); i++) in[r][i] = (u8)(i * 13 + i / 251 + r * 101 + off);
                        CK(cuCtxSetCurrent(g[r].ctx));
                        CK(cuMemsetD8Async(g[r].out, 0xc5, bytes * N + 64, g[r].stream));
                        CK(cuMemcpyHtoDAsync(g[r].in + off, in[r].data(), in[r].size(), g[r].stream));
                    }
                    finish();
                    for (u32 r = 0; r < N; r++) {
                        MoveArgs a = move_args(r, what, g[r].in + off, g[r].out + 2 * off, bytes);
                        run(k, r, a, bytes, way);
                    }
                    finish();
                    cases++;
                    if (reported()) { printf("WRONG move %d bytes %llu way %d: gave up\n", what, bytes, way); wrong++; reset(); continue; }
                    for (u32 r = 0; r < N; r++) {
                        std::vector<u8> got(bytes * N);
                        CK(cuCtxSetCurrent(g[r].ctx));
                        CK(cuMemcpyDtoH(got.data(), g[r].out + 2 * off, got.size()));
                        for (u32 p = 0; p < N; p++) {
                            MoveArgs a = move_args(r, what, 0, 0, bytes), from = move_args(p, what, 0, 0, bytes);
                            if (!a.parts[p].recv_bytes) continue;
                            for (u64 i = 0; i < bytes; i++)
                                if (got[a.parts[p].recv + i] != in[p][from.parts[r].send + i]) {
                                    if (++bad < 6) printf("WRONG move %d bytes %llu way %d off %u rank %u from %u [%llu]\n", what, bytes, way, off, r, p, i);
                                    break;
                                }
                        }
                    }
                }
    printf("%-10s %4d cases, %d wrong, module loaded in %.0f ms on %u devices\n", "move", cases, bad, k.load_ms, N);
    wrong += bad;
}

#include "straight.h"
#include "guards.h"

// Many messages one way, the receiver late: the sender has to wait for room, and takes no slot that is not free.
static void run_ahead() {
    Kernels k("move", "move");
    for (Way way : {LL, LINE, PUSH}) {
        const u32 CALLS = brief && way == PUSH ? 40 : 200;
        u64 bytes = way == LL ? 32768 : way == LINE ? 500000 : 5000000, all = CALLS * bytes;
        std::vector<u8> sent(all), got(all);
        for (u64 i = 0; i < all; i++) sent[i] = (u8)(i * 7 + i / 509 + way);
        CK(cuCtxSetCurrent(g[0].ctx));
        CK(cuMemcpyHtoD(g[0].in, sent.data(), all));
        CK(cuCtxSetCurrent(g[1].ctx));
        CK(cuMemsetD8(g[1].out, 0xc5, all));
        for (u32 r = 0; r < N; r++) {
            for (u32 i = 0; i < CALLS; i++) {
                MoveArgs a = move_args(r, BROADCAST, g[0].in + i * bytes, (r == 0 ? g[0].in : g[1].out) + i * bytes, bytes);
                run(k, r, a, bytes, way);
            }
            if (r == 0) usleep(100000);
        }
        finish();
        CK(cuCtxSetCurrent(g[1].ctx));
        CK(cuMemcpyDtoH(got.data(), g[1].out, all));
        u64 at = std::mismatch(sent.begin(), sent.end(), got.begin()).first - sent.begin();
        if (reported()) printf("WRONG run ahead, %s: gave up\n", WAY[way]), wrong++, reset();
        else if (at < all) printf("WRONG run ahead, %s: call %llu, byte %llu\n", WAY[way], at / bytes, at % bytes), wrong++;
    }
    printf("many calls one way before the receiver's first\n");
}

static void faults() {
    Kernels k("f32-sum", "reduce");
    for (Way way : {LL, LINE, PUSH})
        for (int kind = 0; kind < 3; kind++) {
            double t = now();
            for (u32 r = 0; r < N; r++) {
                if (kind && r == 1) continue;
                u64 bytes = kind == 0 && r == 1 ? 400 : 40000;
                ReduceArgs a = reduce_args(r, ALL_REDUCE, g[r].in, g[r].out, bytes, Weigh{}, kind == 1 ? 200 : 4000);
                run(k, r, a, bytes, way);
            }
            if (kind == 2) usleep(50000), *(volatile u32 *)g[0].abort = 1, t = now();
            finish();
            t = (now() - t) * 1e3;
            printf("fault %s, %s: over after %.1f ms\n", kind == 0 ? "other call" : kind == 1 ? "never comes (deadline 200 ms)" : "abort", WAY[way], t);
            for (u32 r = 0; r < (kind ? 1u : N); r++) {
                u32 c = g[r].report->code;
                bool right = kind == 0 ? c == MISMATCH || c == PEER_FAILED : c == (kind == 1 ? DEADLINE : ABORTED);
                if (!right || g[r].report->peer != 1 - r) printf("WRONG report\n"), wrong++;
            }
            reported();
            reset();
        }
}

static double loop_us(const std::function<void(u32)> &f, int times) {
    finish();
    double t = now();
    for (int i = 0; i < times; i++)
        for (u32 r = 0; r < N; r++) f(r);
    finish();
    return (now() - t) / times * 1e6;
}
static double graph_us(const std::function<void(u32)> &f, int per, int replays) {
    CUgraphExec x[N];
    for (u32 r = 0; r < N; r++) {
        CK(cuCtxSetCurrent(g[r].ctx));
        CUgraph q;
        CK(cuStreamBeginCapture(g[r].stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        for (int i = 0; i < per; i++) f(r);
        CK(cuStreamEndCapture(g[r].stream, &q));
        CK(cuGraphInstantiate(&x[r], q, 0));
        cuGraphDestroy(q);
    }
    double best = 1e9;
    for (int round = 0; round < 3; round++) {
        finish();
        double t = now();
        for (int i = 0; i < replays; i++)
            for (u32 r = 0; r < N; r++) CK(cuCtxSetCurrent(g[r].ctx)), CK(cuGraphLaunch(x[r], g[r].stream));
        finish();
        best = std::min(best, (now() - t) / replays / per * 1e6);
    }
    for (u32 r = 0; r < N; r++) cuGraphExecDestroy(x[r]);
    return best;
}
static void time_one(const char *name, u64 bytes, Way way, const std::function<void(u32)> &f, bool graphs = true) {
    int times = bytes > 64 << 20 ? 10 : bytes > 4 << 20 ? 60 : 400;
    loop_us(f, 5);
    double best = 1e9;
    for (int i = 0; i < 3; i++) best = std::min(best, loop_us(f, times));
    double graph = !graphs ? 0 : graph_us(f, bytes > 4 << 20 ? 4 : 20, bytes > 64 << 20 ? 3 : 10);
    printf("%-14s %-4s %11llu B  loop %9.2f us %6.1f GB/s | graph %9.2f us %6.1f GB/s\n", name, WAY[way], bytes, best, bytes / best / 1e3, graph, bytes / graph / 1e3);
    fflush(stdout);
    if (reported()) printf("WRONG gave up\n"), wrong++, reset();
}
// The copy engine through slots in the windows: pieces behind gates, into the peer's slot, and from the own slot out.
static void through_slots() {
    printf("copy engine through slots, both ways (gates are stream memory operations)\n");
    const u64 AREA = 24 << 20;
    CUstream send[N][2], take[N];
    for (u32 r = 0; r < N; r++) {
        CK(cuCtxSetCurrent(g[r].ctx));
        for (auto *x : {&send[r][0], &send[r][1], &take[r]}) CK(cuStreamCreate(x, CU_STREAM_NON_BLOCKING));
    }
    for (u64 piece : {1ull << 20, 2ull << 20, 4ull << 20, 8ull << 20})
        for (u32 streams : {1u, 2u})
            for (u64 bytes : {16ull << 20, 32ull << 20, 128ull << 20, 1ull << 30}) {
                if (bytes / piece > 256 || bytes / piece < 4) continue;
                reset();
                u32 slots = (u32)(AREA / piece), count = 0;
                double queued = 0;
                auto once = [&](u32 r) {
                    CK(cuCtxSetCurrent(g[r].ctx));
                    u32 p = 1 - r, n = (u32)(bytes / piece);
                    double t = now();
                    for (u32 i = 0; i < n; i++) {
                        u32 number = count + i, slot = number % slots;
                        CUstream s = send[r][i % streams];
                        // Words: flags of what came at 0, of what was taken at 4096.
                        if (number >= slots) CK(cuStreamWaitValue32(s, g[r].window + AT_LL + 4096 + slot * 64, number - slots + 1, CU_STREAM_WAIT_VALUE_GEQ));
                        CK(cuMemcpyPeerAsync(g[p].window + ce_at + slot * piece, g[p].ctx, g[r].in + i * piece, g[r].ctx, piece, s));
                        CK(cuStreamWriteValue32(s, g[p].window + AT_LL + slot * 64, number + 1, 0));
                        CK(cuStreamWaitValue32(take[r], g[r].window + AT_LL + slot * 64, number + 1, CU_STREAM_WAIT_VALUE_GEQ));
                        CK(cuMemcpyDtoDAsync(g[r].out + i * piece, g[r].window + ce_at + slot * piece, piece, take[r]));
                        CK(cuStreamWriteValue32(take[r], g[p].window + AT_LL + 4096 + slot * 64, number + 1, 0));
                    }
                    queued += now() - t;
                };
                auto all = [&] {
                    for (u32 r = 0; r < N; r++) once(r);
                    count += (u32)(bytes / piece);
                };
                auto end = [&] { for (u32 r = 0; r < N; r++) for (CUstream x : {send[r][0], send[r][1], take[r]}) CK(cuStreamSynchronize(x)); };
                all(), end();
                int times = bytes >> 27 ? 4 : 16;
                queued = 0;
                double t = now();
                for (int i = 0; i < times; i++) all();
                end();
                t = (now() - t) / times * 1e6;
                printf("piece %5llu KiB, %u streams %11llu B  %9.2f us %6.1f GB/s | queueing %.1f us a rank\n", piece >> 10, streams, bytes, t, bytes / t / 1e3, queued / times / N * 1e6);
                fflush(stdout);
            }
    reset();
}
static void times() {
    Kernels k("f32-sum", "reduce"), h("bf16-sum", "reduce"), m("move", "move");
    printf("times: GB/s are bytes of one rank's message over time\n");
    std::vector<MoveArgs> ma(N);
    std::vector<ReduceArgs> ra(N);
    auto reduce = [&](const char *name, const Kernels &kk, Kind kind, u64 bytes, Way way) {
        for (u32 r = 0; r < N; r++) ra[r] = reduce_args(r, kind, g[r].in, g[r].out, bytes, Weigh{});
        time_one(name, bytes, way, [&](u32 r) { run(kk, r, ra[r], bytes, way); });
    };
    auto move = [&](const char *name, Move what, u64 bytes, Way way) {
        for (u32 r = 0; r < N; r++) ma[r] = move_args(r, what, g[r].in, g[r].out, bytes);
        time_one(name, bytes, way, [&](u32 r) { run(m, r, ma[r], bytes, way); });
    };
    const u64 K = 1024, M = K * K;
    for (u64 b : {8 + 0 * K, 4 * K, 32 * K, 64 * K, 128 * K, 256 * K, 512 * K, M}) reduce("all_reduce f32", k, ALL_REDUCE, b, LL);
    for (u64 b : {8 + 0 * K, 4 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K, 512 * K, M, 2 * M, 4 * M, 8 * M, 16 * M, 32 * M, 64 * M}) reduce("all_reduce f32", k, ALL_REDUCE, b, LINE);
    for (u64 b : {512 * K, 2 * M, 8 * M, 16 * M, 32 * M, 64 * M, 128 * M, 1024 * M}) reduce("all_reduce f32", k, ALL_REDUCE, b, PUSH);
    for (u64 b : {512 * K, 8 * M}) reduce("all_reduce bf16", h, ALL_REDUCE, b, LINE);
    reduce("all_reduce bf16", h, ALL_REDUCE, 128 * M, PUSH);
    for (u64 b : {512 * K, 2 * M, 8 * M}) reduce("reduce_scatter", k, REDUCE_SCATTER, b, LINE);
    for (u64 b : {8 * M, 256 * M}) reduce("reduce_scatter", k, REDUCE_SCATTER, b, PUSH);
    for (Move what : {ALL_GATHER, BROADCAST, SEND, ALL_TO_ALL}) {
        const char *name = what == ALL_GATHER ? "all_gather" : what == BROADCAST ? "broadcast" : what == SEND ? "sendrecv" : "alltoall";
        for (u64 b : {8 + 0 * K, 32 * K, 128 * K}) move(name, what, b, LL);
        for (u64 b : {32 * K, 128 * K, 512 * K, 2 * M, 8 * M, 16 * M, 32 * M, 64 * M}) move(name, what, b, LINE);
        for (u64 b : {8 * M, 16 * M, 32 * M, 64 * M, 256 * M}) move(name, what, b, PUSH);
    }
    for (u64 b : {128 * K, 512 * K, 2 * M, 8 * M, 32 * M, 256 * M, 1024 * M})
        time_one("CE exchange", b, PUSH, [&](u32 r) { CK(cuCtxSetCurrent(g[r].ctx)); CK(cuMemcpyPeerAsync(g[1 - r].out, g[1 - r].ctx, g[r].in, g[r].ctx, b, g[r].stream)); }, false);
    for (u64 b : {2 * M, 32 * M, 256 * M})
        time_one("CE one way", b, PUSH, [&](u32 r) { if (r == 0) { CK(cuCtxSetCurrent(g[r].ctx)); CK(cuMemcpyPeerAsync(g[1].out, g[1].ctx, g[0].in, g[0].ctx, b, g[0].stream)); } }, false);
    for (u64 b : {8 * M, 256 * M})
        time_one("CE own", b, PUSH, [&](u32 r) { CK(cuCtxSetCurrent(g[r].ctx)); CK(cuMemcpyDtoDAsync(g[r].out, g[r].in, b, g[r].stream)); }, false);
}

int main(int argc, char **argv) {
    alarm(400);
    if (argc < 2) return printf("kernels-bench FOLDER [check] [faults] [times] [slots] [some] [mutant] [late] [one]\n"), 2;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    ptx_folder = argv[1];
    auto wants = [&](const char *w) { for (int i = 2; i < argc; i++) if (!strcmp(argv[i], w)) return true; return argc == 2; };
    CK(cuInit(0));
    int devices = 0, version = 0;
    CK(cuDeviceGetCount(&devices));
    cuDriverGetVersion(&version);
    // `one`: both ranks on the first device, for what is right and wrong only. Block b waits for block b of the other, and
    // blocks come in order, so each pair finds room whatever else waits for some.
    bool one = false;
    for (int i = 2; i < argc; i++) one |= !strcmp(argv[i], "one");
    if (devices < (one ? 1 : (int)N)) return printf("SKIP two GPUs\n"), 0;
    push_at = AT_LL + (u64)(N - 1) * LL_SLOTS * LL_BLOCKS_MAX * LL_REGION;
    line_at = push_at + (u64)(N - 1) * PUSH_BLOCKS * PUSH_SLOTS * chunk;
    ce_at = line_at + (u64)(N - 1) * LL_SLOTS * LL_BLOCKS_MAX * (LINE_SPAN / 120 * 128);
    window_bytes = ce_at + (24 << 20);
    for (u32 r = 0; r < N; r++) {
        CK(cuDeviceGet(&g[r].dev, one ? 0 : r));
        CK(cuDevicePrimaryCtxRetain(&g[r].ctx, g[r].dev));
    }
    for (u32 r = 0; r < N; r++) {
        char name[100];
        cuDeviceGetName(name, 100, g[r].dev);
        CK(cuCtxSetCurrent(g[r].ctx));
        for (u32 p = 0; p < N; p++) if (p != r && !one) CK(cuCtxEnablePeerAccess(g[p].ctx, 0));
        CK(cuStreamCreate(&g[r].stream, CU_STREAM_NON_BLOCKING));
        CK(cuStreamCreate(&g[r].side, CU_STREAM_NON_BLOCKING));
        CK(cuMemAlloc(&g[r].window, window_bytes));
        CK(cuMemAlloc(&g[r].in, BUFFER + 4096));
        CK(cuMemAlloc(&g[r].out, BUFFER + 4096));
        CK(cuMemHostAlloc((void **)&g[r].report, sizeof(Report), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        CK(cuMemHostAlloc((void **)&g[r].abort, 64, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        printf("rank %u: %s, driver %d, window %.1f MiB\n", r, name, version, window_bytes / 1048576.0);
    }
    reset();
    // `late`: nothing starts early, as on devices before compute capability 9.0.
    int major = 0;
    CK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, g[0].dev));
    for (int i = 2; i < argc; i++) marked &= strcmp(argv[i], "late") != 0;
    marked &= major >= 9, early = marked && !one;
    if (wants("slots")) through_slots();
    if (wants("times")) times();
    if (wants("faults")) faults();
    if (wants("mutant")) {
        // What notices a protocol that lost a piece; the first that does ends it. All of them, or those that are named, as they are named.
        const std::pair<const char *, std::function<void()>> parts[] = {
            {"opposite", opposite}, {"counted", counted}, {"slow", slow}, {"leaves", leaves}, {"abandoned", abandoned}, {"faults", faults}, {"ahead", run_ahead}, {"straight", check_straight}, {"tardy", check_late},
            {"sums", [] { check_type<F32, SUM>("f32-sum", Weigh{0x3fc00000, 1, 0}); }}, {"moves", check_moves}};
        brief = true;
        std::vector<std::string> names;
        for (int i = 2; i < argc; i++)
            for (auto &part : parts) if (!strcmp(argv[i], part.first)) names.push_back(part.first);
        if (names.empty()) for (auto &part : parts) names.push_back(part.first);
        for (auto &name : names)
            for (auto &part : parts) {
                if (wrong || name != part.first) continue;
                double t = now();
                part.second();
                printf("part %s %s in %.1f s\n", part.first, wrong ? "WRONG" : "right", now() - t);
            }
    }
    if (wants("some")) check_moves(), check_straight(), check_late(), check_type<F32, SUM>("f32-sum", Weigh{0x3fc00000, 1, 0}), check_type<E5M2, MAX>("e5m2-max"), check_type<F64, PROD>("f64-prod");
    if (wants("check")) {
        check_moves();
        check_straight();
        check_late();
        check_ops<F32>("f32", 0x3fc00000), check_ops<F64>("f64", 0x3ff8000000000000ull), check_ops<F16>("f16", 0x3e00), check_ops<BF16>("bf16", 0x3fc0);
        check_ops<E4M3>("e4m3", 0x3c), check_ops<E5M2>("e5m2", 0x3e), check_ops<I8>("i8", 3), check_ops<U8>("u8", 3);
        check_ops<I32>("i32", 3), check_ops<U32>("u32", 3), check_ops<I64>("i64", 3), check_ops<U64>("u64", 3);
    }
    printf("TOTAL %d wrong\n", wrong);
    return wrong != 0;
}
