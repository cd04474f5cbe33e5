// One process a GPU, through the interface of NCCL: whichever libnccl.so.2 the loader finds. Compares with plain
// loops and prints times of a loop and of a captured graph. `processes moves` has what is only moved, and large, alone;
// `processes moves times` compares nothing, `processes moves values` does nothing else. With REGISTER=1 both buffers are
// registered, and once deregistered, freed, allocated and registered anew; with REGISTER=2 as windows.
#include <cuda.h>
#include <dlfcn.h>
#include <link.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static int rank_, wrong, turns, timing;
static void ck(int e, const char *what, int line) {
    if (!e) return;
    printf("rank %d: ERROR %s line %d: %d\n", rank_, what, line, e);
    fflush(stdout);
    _exit(1);
}
#define CK(x) ck((int)(x), #x, __LINE__)
static size_t most = 256 << 20;
static bool moves_only, compares;
static CUdeviceptr in, out;
static CUstream s;
static ncclComm_t comm;

static float value(int r, size_t i) { return (float)((i * 7 + r * 3) % 1000); }
static void fill(size_t n) {
    std::vector<float> h(n);
    for (size_t i = 0; i < n; i++) h[i] = value(rank_, i);
    CK(cuMemcpyHtoD(in, h.data(), n * 4));
    CK(cuMemsetD8(out, 0xee, 2 * n * 4));
    // Both may still be under way, in a stream that ours does not wait for.
    CK(cuCtxSynchronize());
}
static void check(const char *name, size_t n, const std::function<float(size_t)> &want) {
    std::vector<float> h(n);
    CK(cuStreamSynchronize(s));
    CK(cuMemcpyDtoH(h.data(), out, n * 4));
    for (size_t i = 0; i < n; i++)
        if (h[i] != want(i)) {
            printf("rank %d: WRONG %s count %zu [%zu]: %g, not %g\n", rank_, name, n, i, h[i], want(i));
            wrong++;
            return;
        }
}
static void timed(const char *name, size_t bytes, const std::function<void()> &f) {
    if (!timing) return;
    int times = bytes > 8 << 20 ? 20 : 200;
    double loop = 1e9, graph = 1e9;
    for (int i = 0; i < 5; i++) f();
    for (int r = 0; r < 3; r++) {
        CK(cuStreamSynchronize(s));
        double t = now();
        for (int i = 0; i < times; i++) f();
        CK(cuStreamSynchronize(s));
        loop = std::min(loop, (now() - t) / times * 1e6);
    }
    if (moves_only) {
        if (rank_ == 0) printf("%-14s %10zu B  loop %9.2f us %6.1f GB/s\n", name, bytes, loop, bytes / loop / 1e3), fflush(stdout);
        return;
    }
    CUgraph g;
    CUgraphExec x;
    CK(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    for (int i = 0; i < 10; i++) f();
    CK(cuStreamEndCapture(s, &g));
    CK(cuGraphInstantiate(&x, g, 0));
    for (int r = 0; r < 3; r++) {
        CK(cuStreamSynchronize(s));
        double t = now();
        for (int i = 0; i < 10; i++) CK(cuGraphLaunch(x, s));
        CK(cuStreamSynchronize(s));
        graph = std::min(graph, (now() - t) / 100 * 1e6);
    }
    if (rank_ == 0) printf("%-14s %10zu B  loop %9.2f us %6.1f GB/s | graph %9.2f us %6.1f GB/s\n", name, bytes, loop, bytes / loop / 1e3, graph, bytes / graph / 1e3), fflush(stdout);
}
// The output anew, perhaps at the same address: nobody may write where it was.
static void *handles[2];
static void recycle() {
    const char *how = getenv("REGISTER");
    if (!how || how[0] != '1') return;
    CUdeviceptr before = out;
    CK(cuStreamSynchronize(s));
    CK(ncclCommDeregister(comm, handles[1]));
    CK(cuMemFree(out));
    CK(cuMemAlloc(&out, 2 * most));
    CK(ncclCommRegister(comm, (void *)out, 2 * most, &handles[1]));
    printf("rank %d: output again, %s\n", rank_, before == out ? "at the same address" : "elsewhere");
}
// Large parts that are only moved; every rank's are compared.
static void moves(int r) {
    float *F = (float *)in, *G = (float *)out;
    auto again = [&] { recycle(), G = (float *)out; };
    auto exchange = [&](size_t k) {
        CK(ncclGroupStart());
        CK(ncclSend(F, k, ncclFloat, 1 - r, comm, s));
        CK(ncclRecv(G, k, ncclFloat, 1 - r, comm, s));
        CK(ncclGroupEnd());
    };
    for (size_t k : {25000003ul, 33554432ul}) {
        if (!compares) break;
        if (k == 33554432ul) again();
        fill(k);
        CK(ncclAllGather(F, G, k, ncclFloat, comm, s));
        check("all_gather", 2 * k, [&](size_t i) { return value(i / k, i % k); });
        fill(k);
        CK(ncclBroadcast(F, G, k, ncclFloat, 1, comm, s));
        check("broadcast", k, [&](size_t i) { return value(1, i); });
        fill(k);
        exchange(k);
        check("sendrecv", k, [&](size_t i) { return value(1 - r, i); });
        fill(2 * k);
        CK(ncclAlltoAll(F, G, k, ncclFloat, comm, s));
        check("alltoall", 2 * k, [&](size_t i) { return value(i / k, r * k + i % k); });
    }
    const size_t M = 1 << 20;
    for (size_t b : {8 * M, 16 * M, 32 * M, 64 * M, 256 * M, 1024 * M}) timed("sendrecv", b, [&] { exchange(b / 4); });
    for (size_t b : {8 * M, 16 * M, 32 * M, 64 * M, 256 * M, 1024 * M}) timed("broadcast", b, [&] { CK(ncclBroadcast(F, G, b / 4, ncclFloat, 0, comm, s)); });
    for (size_t b : {8 * M, 16 * M, 32 * M, 64 * M, 256 * M, 1024 * M}) timed("all_gather", b, [&] { CK(ncclAllGather(F, G, b / 4, ncclFloat, comm, s)); });
    for (size_t b : {8 * M, 16 * M, 32 * M, 64 * M, 256 * M}) timed("alltoall", b, [&] { CK(ncclAlltoAll(F, G, b / 4, ncclFloat, comm, s)); });
}
static int run(int r, int n, ncclUniqueId id) {
    rank_ = r;
    alarm(110);
    CUdevice d;
    CUcontext c;
    CK(cuInit(0));
    int count = 1;
    CK(cuDeviceGetCount(&count));
    CK(cuDeviceGet(&d, r % count));
    if (r == 0 && count < n) printf("both ranks on one device: times mean nothing\n");
    CK(cuDevicePrimaryCtxRetain(&c, d));
    CK(cuCtxSetCurrent(c));
    double t = now();
    CK(ncclCommInitRank(&comm, n, id, r));
    double init = now() - t;
    if (r == 0) {
        Dl_info info;
        dladdr((void *)ncclCommInitRank, &info);
        printf("library %s, init %.3f s\n", info.dli_fname, init);
    }
    CK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    // Windows of NCCL are of memory of its own.
    const char *how = getenv("REGISTER");
    if (how && how[0] == '2') {
        CK(ncclMemAlloc((void **)&in, most));
        CK(ncclMemAlloc((void **)&out, 2 * most));
    } else {
        CK(cuMemAlloc(&in, most));
        CK(cuMemAlloc(&out, 2 * most));
    }
    auto F = (float *)in;
    auto G = (float *)out;
    if (how) {
        for (CUdeviceptr at : {in, out}) {
            size_t bytes = at == in ? most : 2 * most;
            ncclWindow_t window;
            if (how[0] == '1') CK(ncclCommRegister(comm, (void *)at, bytes, &handles[at == out]));
            if (how[0] == '2') CK(ncclCommWindowRegister(comm, (void *)at, bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
        }
    }
    if (moves_only) {
        moves(r);
        ncclResult_t state;
        CK(ncclCommGetAsyncError(comm, &state));
        CK(state);
        CK(ncclCommDestroy(comm));
        return wrong != 0;
    }
    auto values = [&](size_t k) {
        fill(k);
        CK(ncclAllReduce(F, G, k, ncclFloat, ncclSum, comm, s));
        check("all_reduce", k, [&](size_t i) { return value(0, i) + value(1, i); });
        fill(k);
        CK(ncclAllGather(F, G, k, ncclFloat, comm, s));
        check("all_gather", 2 * k, [&](size_t i) { return value(i / k, i % k); });
        if (k % 2 == 0) {
            fill(k);
            CK(ncclReduceScatter(F, G, k / 2, ncclFloat, ncclMax, comm, s));
            check("reduce_scatter", k / 2, [&](size_t i) { return std::max(value(0, i + r * k / 2), value(1, i + r * k / 2)); });
        }
        fill(k);
        CK(ncclBroadcast(F, G, k, ncclFloat, 1, comm, s));
        check("broadcast", k, [&](size_t i) { return value(1, i); });
        fill(k);
        CK(ncclGroupStart());
        CK(ncclSend(F, k, ncclFloat, 1 - r, comm, s));
        CK(ncclRecv(G, k, ncclFloat, 1 - r, comm, s));
        CK(ncclGroupEnd());
        check("sendrecv", k, [&](size_t i) { return value(1 - r, i); });
        fill(k);
        CK(ncclReduce(F, G, k, ncclFloat, ncclSum, 0, comm, s));
        if (r == 0) check("reduce", k, [&](size_t i) { return value(0, i) + value(1, i); });
        CK(cuStreamSynchronize(s));
    };
    for (int turn = 0; turn < turns; turn++)
        for (size_t k : {1ul, 3ul, 1000ul, 65537ul, 300001ul, 4000037ul}) values(k);
    const size_t K = 1024, M = K * K;
    // The first use of another type: its kernels come to the device.
    t = now();
    CK(ncclAllReduce(F, G, 16, ncclFloat16, ncclProd, comm, s));
    CK(cuStreamSynchronize(s));
    if (rank_ == 0) printf("first use of a type and operator %.3f s\n", now() - t);
    for (size_t b : {8ul, 4 * K, 32 * K, 64 * K, 128 * K, 256 * K, 512 * K, M, 2 * M, 4 * M, 8 * M, 16 * M, 32 * M, 128 * M, 256 * M}) timed("all_reduce", b, [&] { CK(ncclAllReduce(F, G, b / 4, ncclFloat, ncclSum, comm, s)); });
    for (size_t b : {8ul, 128 * K, 512 * K, 2 * M, 8 * M, 32 * M, 256 * M}) timed("all_gather", b, [&] { CK(ncclAllGather(F, G, b / 4, ncclFloat, comm, s)); });
    for (size_t b : {8ul, 128 * K, 512 * K, 2 * M, 8 * M, 32 * M, 128 * M}) timed("reduce_scatter", b, [&] { CK(ncclReduceScatter(F, G, b / 4, ncclFloat, ncclSum, comm, s)); });
    for (size_t b : {8ul, 128 * K, 512 * K, 2 * M, 8 * M, 32 * M, 256 * M}) timed("broadcast", b, [&] { CK(ncclBroadcast(F, G, b / 4, ncclFloat, 0, comm, s)); });
    for (size_t b : {8ul, 128 * K, 512 * K, 2 * M, 8 * M, 32 * M, 256 * M})
        timed("sendrecv", b, [&] {
            CK(ncclGroupStart());
            CK(ncclSend(F, b / 4, ncclFloat, 1 - r, comm, s));
            CK(ncclRecv(G, b / 4, ncclFloat, 1 - r, comm, s));
            CK(ncclGroupEnd());
        });
    ncclResult_t state;
    CK(ncclCommGetAsyncError(comm, &state));
    CK(state);
    t = now();
    CK(ncclCommDestroy(comm));
    if (r == 0) printf("destroy %.3f s, %d wrong\n", now() - t, wrong);
    return wrong != 0;
}
int main(int count, char **words) {
    // `processes TURNS`: values alone, so many times.
    moves_only = count > 1 && words[1][0] == 'm', compares = count < 3 || words[2][0] == 'v';
    turns = count > 1 && !moves_only ? atoi(words[1]) : 1, timing = count < 2 || (moves_only && (count < 3 || words[2][0] != 'v'));
    int p[2], status, bad = 0;
    if (moves_only) most = 1 << 30;
    if (pipe(p)) return 1;
    for (int r = 0; r < 2; r++)
        if (fork() == 0) {
            ncclUniqueId id;
            if (r == 0) {
                if (ncclGetUniqueId(&id)) _exit(1);
                if (write(p[1], &id, sizeof id) != sizeof id) _exit(1);
            } else if (read(p[0], &id, sizeof id) != sizeof id) {
                _exit(1);
            }
            int e = run(r, 2, id);
            fflush(stdout);
            _exit(e);
        }
    while (wait(&status) > 0) bad |= status != 0;
    printf("processes: %s\n", bad ? "FAILED" : "ok");
    return bad;
}
