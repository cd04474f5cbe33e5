// The kernels on real devices, without the library around them: every type and operator against a plain
// loop on the CPU, then times. Loads the committed PTX through the driver. One process, one thread, rank r on
// device r. Usage: kernels-bench FOLDER_OF_PTX [check] [faults] [times]
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
static u64 push_at, window_bytes;
static u32 chunk = 65536;
static std::string ptx_folder;

struct Kernels {
    CUmodule module[N];
    CUfunction ll[N], push[N];
    double load_ms = 0;
    Kernels(const std::string &name, const char *ll_name, const char *push_name) {
        FILE *f = fopen((ptx_folder + "/" + name + ".ptx").c_str(), "rb");
        if (!f) { printf("no %s\n", name.c_str()); _exit(1); }
        std::vector<char> text(1 << 20);
        text.resize(fread(text.data(), 1, text.size() - 1, f) + 1), text.back() = 0;
        fclose(f);
        double t = now();
        for (u32 r = 0; r < N; r++) {
            CK(cuCtxSetCurrent(g[r].ctx));
            CK(cuModuleLoadData(&module[r], text.data()));
            CK(cuModuleGetFunction(&ll[r], module[r], ll_name));
            CK(cuModuleGetFunction(&push[r], module[r], push_name));
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
    c.timeout_ns = timeout_ms * 1000000, c.call = call, c.push_at = push_at, c.chunk = chunk, c.rank = r, c.ranks = N, c.ll_blocks = LL_BLOCKS_MAX;
    return c;
}
static u32 shift_of(u64 bytes) { return bytes <= LL_BLOCKS_MAX * 4096ull ? 12 : 13; }
static const u64 LL_MAX = (u64)LL_BLOCKS_MAX * LL_SPAN_MAX;
static u32 push_threads = 1024;

static void launch(CUfunction f, CUstream s, u32 blocks, u32 threads, void *args) {
    void *params[] = {args};
    CK(cuLaunchKernel(f, blocks, 1, 1, threads, 1, 1, 0, s, params, nullptr));
}
// `most` is the largest part's bytes.
template <class A>
static void run(const Kernels &k, u32 r, A &a, u64 most, bool push) {
    CK(cuCtxSetCurrent(g[r].ctx));
    if (push) {
        launch(k.push[r], g[r].stream, (u32)std::min<u64>(PUSH_BLOCKS, std::max<u64>(1, (most + 15) / 16)), push_threads, &a);
    } else {
        u64 span = 1ull << shift_of(most), packets = (std::min(most, span) + 7) / 8;
        launch(k.ll[r], g[r].stream, (u32)((most + span - 1) / span), (u32)std::min<u64>(512, (packets + 31) / 32 * 32) + 32, &a);
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
    Kernels k(file, "bl_ll_reduce", "bl_push_reduce");
    u64 counts[] = {1, 3, 31, 1000, 4097, 65539, 1000003};
    int cases = 0, bad = 0;
    for (Kind kind : {ALL_REDUCE, REDUCE_SCATTER, REDUCE})
        for (u64 count : counts)
            for (bool push : {false, true})
                for (u32 off : {0u, 1u})
                    for (bool in_place : {false, true})
                        for (int weigh = 0; weigh < (OP == SUM ? 3 : 1); weigh++) {
                            Weigh w = weigh == 1 ? Weigh{0, 0, N} : weigh == 2 ? special : Weigh{};
                            if ((weigh || off) && count > 70000) continue;
                            if (weigh == 2 && !w.multiply) continue;
                            u64 parts = kind == REDUCE_SCATTER ? N : 1, bytes = count * sizeof(B);
                            if (!push && bytes > LL_MAX) continue;
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
                                run(k, r, a, bytes, push);
                            }
                            finish();
                            cases++;
                            if (reported()) { printf("WRONG %s kind %d count %llu push %d: gave up\n", file, kind, count, push); wrong++; reset(); continue; }
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
                                        if (w.multiply) e = T::product(e, T::decode((B)w.scalar));
                                        acc = p == 0 ? e : OP == SUM ? T::sum(acc, e) : OP == PROD ? T::product(acc, e) : OP == MIN ? T::least(acc, e) : T::greatest(acc, e);
                                    }
                                    if (w.divide) acc = T::divide(acc, w.divide);
                                    if (T::encode(acc) != got[i]) {
                                        bad++;
                                        if (bad < 4) printf("WRONG %s kind %d count %llu push %d off %u in place %d weigh %d rank %u [%llu]: %g not %g\n", file, kind, count, push, off, in_place, weigh, r, i, (double)T::decode(got[i]), (double)acc);
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
    Kernels k("move", "bl_ll_move", "bl_push_move");
    int cases = 0, bad = 0;
    for (Move what : {ALL_GATHER, BROADCAST, ALL_TO_ALL, SEND, GATHER})
        for (u64 bytes : {1ull, 7ull, 16ull, 1000ull, 4099ull, 70001ull, 1000003ull, 20000000ull})
            for (bool push : {false, true})
                for (u32 off : {0u, 3u, 8u}) {
                    if (!push && bytes > LL_MAX) continue;
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
                        run(k, r, a, bytes, push);
                    }
                    finish();
                    cases++;
                    if (reported()) { printf("WRONG move %d bytes %llu push %d: gave up\n", what, bytes, push); wrong++; reset(); continue; }
                    for (u32 r = 0; r < N; r++) {
                        std::vector<u8> got(bytes * N);
                        CK(cuCtxSetCurrent(g[r].ctx));
                        CK(cuMemcpyDtoH(got.data(), g[r].out + 2 * off, got.size()));
                        for (u32 p = 0; p < N; p++) {
                            MoveArgs a = move_args(r, what, 0, 0, bytes), from = move_args(p, what, 0, 0, bytes);
                            if (!a.parts[p].recv_bytes) continue;
                            for (u64 i = 0; i < bytes; i++)
                                if (got[a.parts[p].recv + i] != in[p][from.parts[r].send + i]) {
                                    if (++bad < 6) printf("WRONG move %d bytes %llu push %d off %u rank %u from %u [%llu]\n", what, bytes, push, off, r, p, i);
                                    break;
                                }
                        }
                    }
                }
    printf("%-10s %4d cases, %d wrong, module loaded in %.0f ms on %u devices\n", "move", cases, bad, k.load_ms, N);
    wrong += bad;
}

static void faults() {
    Kernels k("f32-sum", "bl_ll_reduce", "bl_push_reduce");
    for (bool push : {false, true})
        for (int kind = 0; kind < 3; kind++) {
            double t = now();
            for (u32 r = 0; r < N; r++) {
                if (kind && r == 1) continue;
                u64 bytes = kind == 0 && r == 1 ? 400 : 40000;
                ReduceArgs a = reduce_args(r, ALL_REDUCE, g[r].in, g[r].out, bytes, Weigh{}, kind == 1 ? 200 : 4000);
                run(k, r, a, bytes, push);
            }
            if (kind == 2) usleep(50000), *(volatile u32 *)g[0].abort = 1, t = now();
            finish();
            t = (now() - t) * 1e3;
            printf("fault %s, %s: over after %.1f ms\n", kind == 0 ? "other call" : kind == 1 ? "never comes (deadline 200 ms)" : "abort", push ? "push" : "ll", t);
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
static void time_one(const char *name, u64 bytes, bool push, const std::function<void(u32)> &f, bool graphs = true) {
    int times = bytes > 64 << 20 ? 10 : bytes > 4 << 20 ? 60 : 400;
    loop_us(f, 5);
    double best = 1e9;
    for (int i = 0; i < 3; i++) best = std::min(best, loop_us(f, times));
    double graph = !graphs ? 0 : graph_us(f, bytes > 4 << 20 ? 4 : 20, bytes > 64 << 20 ? 3 : 10);
    printf("%-14s %-4s %11llu B  loop %9.2f us %6.1f GB/s | graph %9.2f us %6.1f GB/s\n", name, push ? "push" : "ll", bytes, best, bytes / best / 1e3, graph, bytes / graph / 1e3);
    fflush(stdout);
    if (reported()) printf("WRONG gave up\n"), wrong++, reset();
}
static void times() {
    Kernels k("f32-sum", "bl_ll_reduce", "bl_push_reduce"), h("bf16-sum", "bl_ll_reduce", "bl_push_reduce"), m("move", "bl_ll_move", "bl_push_move");
    printf("times: GB/s are bytes of one rank's message over time\n");
    std::vector<MoveArgs> ma(N);
    std::vector<ReduceArgs> ra(N);
    auto reduce = [&](const char *name, const Kernels &kk, Kind kind, u64 bytes, bool push) {
        for (u32 r = 0; r < N; r++) ra[r] = reduce_args(r, kind, g[r].in, g[r].out, bytes, Weigh{});
        time_one(name, bytes, push, [&](u32 r) { run(kk, r, ra[r], bytes, push); });
    };
    auto move = [&](const char *name, Move what, u64 bytes, bool push) {
        for (u32 r = 0; r < N; r++) ma[r] = move_args(r, what, g[r].in, g[r].out, bytes);
        time_one(name, bytes, push, [&](u32 r) { run(m, r, ma[r], bytes, push); });
    };
    for (u64 b : {8ull, 512ull, 4096ull, 8192ull, 32768ull, 131072ull, 262144ull, 524288ull, 1048576ull}) reduce("all_reduce f32", k, ALL_REDUCE, b, false);
    for (u64 b : {32768ull, 131072ull, 524288ull, 1048576ull, 2097152ull, 4194304ull, 8388608ull, 33554432ull, 134217728ull, 1073741824ull}) reduce("all_reduce f32", k, ALL_REDUCE, b, true);
    for (u64 b : {8ull, 32768ull}) reduce("all_reduce bf16", h, ALL_REDUCE, b, false);
    for (u64 b : {2097152ull, 134217728ull}) reduce("all_reduce bf16", h, ALL_REDUCE, b, true);
    for (u64 b : {8ull, 32768ull, 524288ull}) reduce("reduce_scatter", k, REDUCE_SCATTER, b, false);
    for (u64 b : {524288ull, 8388608ull, 268435456ull}) reduce("reduce_scatter", k, REDUCE_SCATTER, b, true);
    for (Move what : {ALL_GATHER, BROADCAST, SEND, ALL_TO_ALL}) {
        const char *name = what == ALL_GATHER ? "all_gather" : what == BROADCAST ? "broadcast" : what == SEND ? "sendrecv" : "alltoall";
        for (u64 b : {8ull, 32768ull, 131072ull, 524288ull}) move(name, what, b, false);
        for (u64 b : {524288ull, 2097152ull, 8388608ull, 33554432ull, 268435456ull}) move(name, what, b, true);
    }
    printf("tuning of push: least chunk and groups of senders, all_reduce f32\n");
    for (const char *variant : {"c4g2", "c8g1", "c8g2", "c8g4", "c16g2", "c16g4", "c32g2"}) {
        Kernels v(std::string("f32-sum-") + variant, "bl_ll_reduce", "bl_push_reduce");
        for (u64 b : {1048576ull, 2097152ull, 4194304ull, 8388608ull, 33554432ull, 268435456ull}) reduce(variant, v, ALL_REDUCE, b, true);
    }
    for (u64 b : {131072ull, 524288ull, 2097152ull, 8388608ull, 33554432ull, 268435456ull})
        time_one("CE exchange", b, true, [&](u32 r) { CK(cuCtxSetCurrent(g[r].ctx)); CK(cuMemcpyPeerAsync(g[1 - r].out, g[1 - r].ctx, g[r].in, g[r].ctx, b, g[r].stream)); }, false);
    for (u64 b : {2097152ull, 33554432ull, 268435456ull})
        time_one("CE one way", b, true, [&](u32 r) { if (r == 0) { CK(cuCtxSetCurrent(g[r].ctx)); CK(cuMemcpyPeerAsync(g[1].out, g[1].ctx, g[0].in, g[0].ctx, b, g[0].stream)); } }, false);
}

int main(int argc, char **argv) {
    alarm(400);
    if (argc < 2) return printf("kernels-bench FOLDER [check] [faults] [times]\n"), 2;
    ptx_folder = argv[1];
    auto wants = [&](const char *w) { for (int i = 2; i < argc; i++) if (!strcmp(argv[i], w)) return true; return argc == 2; };
    CK(cuInit(0));
    int devices = 0, version = 0;
    CK(cuDeviceGetCount(&devices));
    cuDriverGetVersion(&version);
    if (devices < (int)N) return printf("SKIP two GPUs\n"), 0;
    push_at = AT_LL + (u64)(N - 1) * LL_SLOTS * LL_BLOCKS_MAX * LL_REGION;
    window_bytes = push_at + (u64)(N - 1) * PUSH_BLOCKS * PUSH_SLOTS * chunk;
    for (u32 r = 0; r < N; r++) {
        CK(cuDeviceGet(&g[r].dev, r));
        CK(cuDevicePrimaryCtxRetain(&g[r].ctx, g[r].dev));
    }
    for (u32 r = 0; r < N; r++) {
        char name[100];
        cuDeviceGetName(name, 100, g[r].dev);
        CK(cuCtxSetCurrent(g[r].ctx));
        for (u32 p = 0; p < N; p++) if (p != r) CK(cuCtxEnablePeerAccess(g[p].ctx, 0));
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
    if (wants("times")) times();
    if (wants("faults")) faults();
    if (wants("check")) {
        check_moves();
        check_ops<F32>("f32", 0x3fc00000), check_ops<F64>("f64", 0x3ff8000000000000ull), check_ops<F16>("f16", 0x3e00), check_ops<BF16>("bf16", 0x3fc0);
        check_ops<E4M3>("e4m3", 0x3c), check_ops<E5M2>("e5m2", 0x3e), check_ops<I8>("i8", 3), check_ops<U8>("u8", 3);
        check_ops<I32>("i32", 3), check_ops<U32>("u32", 3), check_ops<I64>("i64", 3), check_ops<U64>("u64", 3);
    }
    printf("TOTAL %d wrong\n", wrong);
    return wrong != 0;
}
