// What stands between calls of collectives, in streams and in captured graphs: fills, copies, forks to other streams. Each call
// uses what the operation before it made, and is used by the next, so that one that starts too early, or lets another start
// too early, computes something else. One process, one thread, two GPUs, through the interface of NCCL.
#include <cuda.h>
#include <nccl.h>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <unistd.h>
#include <vector>

static void ck(int e, const char *what, int line) {
    if (!e) return;
    printf("ERROR %s line %d: %d, %s\n", what, line, e, ncclGetLastError(nullptr));
    fflush(stdout);
    _exit(1);
}
#define CK(x) ck((int)(x), #x, __LINE__)
static const int N = 2, TURNS = 200, REPLAYS = 40;
static const size_t MOST = 8 << 20; // bytes
static CUcontext context[N];
static CUstream stream[N], side[N];
static CUdeviceptr in[N], out[N], kept[N];
static ncclComm_t comm[N];
static int wrong = 0;

static void each(const std::function<void(int)> &f) {
    for (int r = 0; r < N; r++) CK(cuCtxSetCurrent(context[r])), f(r);
}
static void finish() {
    each([](int r) { CK(cuStreamSynchronize(stream[r])), CK(cuStreamSynchronize(side[r])); });
}
static void all_reduce(CUdeviceptr *from, CUdeviceptr *to, size_t count, CUstream *s) {
    CK(ncclGroupStart());
    each([&](int r) { CK(ncclAllReduce((void *)from[r], (void *)to[r], count, ncclInt32, ncclSum, comm[r], s[r])); });
    CK(ncclGroupEnd());
}
static void check(const char *what, size_t bytes, CUdeviceptr *at, int right) {
    each([&](int r) {
        std::vector<int> got(bytes / 4);
        CK(cuMemcpyDtoH(got.data(), at[r], bytes));
        for (size_t i = 0; i < got.size(); i++)
            if (got[i] != right) {
                printf("WRONG %s, %zu bytes, rank %d [%zu]: %d, not %d\n", what, bytes, r, i, got[i], right);
                wrong++;
                break;
            }
    });
}
// A fill, a call, a copy, a call in place, another stream's call, a copy: 8 times `value` in `kept`.
static void chain(size_t bytes, int value) {
    size_t n = bytes / 4;
    each([&](int r) { CK(cuMemsetD32Async(in[r], value, n, stream[r])); });
    all_reduce(in, out, n, stream);
    each([&](int r) { CK(cuMemcpyDtoDAsync(in[r], out[r], bytes, stream[r])), CK(cuMemsetD32Async(out[r], -1, n, stream[r])); });
    all_reduce(in, in, n, stream);
    CUevent event[N], back[N];
    each([&](int r) {
        CK(cuEventCreate(&event[r], CU_EVENT_DISABLE_TIMING)), CK(cuEventCreate(&back[r], CU_EVENT_DISABLE_TIMING));
        CK(cuEventRecord(event[r], stream[r])), CK(cuStreamWaitEvent(side[r], event[r], 0));
    });
    all_reduce(in, out, n, side);
    each([&](int r) {
        CK(cuEventRecord(back[r], side[r])), CK(cuStreamWaitEvent(stream[r], back[r], 0));
        CK(cuMemcpyDtoDAsync(kept[r], out[r], bytes, stream[r]));
        CK(cuEventDestroy(event[r])), CK(cuEventDestroy(back[r]));
    });
}
static void in_graphs(size_t bytes) {
    CUgraphExec graph[N];
    each([](int r) { CK(cuStreamBeginCapture(stream[r], CU_STREAM_CAPTURE_MODE_RELAXED)); });
    for (int i = 0; i < 3; i++) chain(bytes, 5 + i);
    each([&](int r) {
        CUgraph q;
        CK(cuStreamEndCapture(stream[r], &q)), CK(cuGraphInstantiate(&graph[r], q, 0)), CK(cuGraphDestroy(q));
    });
    for (int i = 0; i < REPLAYS; i++) {
        each([&](int r) { CK(cuMemsetD32Async(kept[r], -1, bytes / 4, stream[r])), CK(cuGraphLaunch(graph[r], stream[r])); });
        if (i % 8 == 7) finish(), check("in a graph", bytes, kept, 8 * 7);
    }
    finish();
    each([&](int r) { CK(cuGraphExecDestroy(graph[r])); });
}
// Two streams in turn, which nothing else orders: the same memory, so that only the order of calls makes the result right.
static void over_streams(size_t bytes) {
    int right = 1;
    each([&](int r) { CK(cuMemsetD32Async(in[r], 1, bytes / 4, stream[r])); });
    finish();
    for (int i = 0; i < 14; i++) {
        CUdeviceptr *from = i % 2 ? out : in, *to = i % 2 ? in : out;
        for (int twice = 0; twice < 2; twice++) {
            // The second of a stream is noted without an event.
            all_reduce(twice ? to : from, to, bytes / 4, i % 3 == 2 ? side : stream);
            right *= 2;
        }
    }
    finish();
    check("over streams", bytes, in, right);
}
// Two communicators in a stream each, which the two GPUs are given in opposite order, with a second call behind each first one:
// no kernel may keep another from running that a peer waits for. Set BEELINE_COMM_TIMEOUT, so that a failure ends.
static void opposite(size_t bytes) {
    ncclComm_t others[N];
    CK(ncclCommInitAll(others, N, nullptr));
    for (int turn = 0; turn < 20; turn++) {
        each([&](int r) {
            for (CUdeviceptr m : {in[r], out[r], kept[r]}) CK(cuMemsetD32Async(m, 1, bytes / 4, stream[r]));
        });
        finish();
        each([&](int r) {
            for (int first : {r, 1 - r})
                for (int twice = 0; twice < 2; twice++) {
                    auto at = (void *)(first ? kept[r] : out[r]);
                    CK(ncclAllReduce(at, at, bytes / 4, ncclInt32, ncclSum, first ? others[r] : comm[r], first ? side[r] : stream[r]));
                }
        });
        finish();
        check("in opposite order", bytes, out, 4), check("in opposite order, the other", bytes, kept, 4);
    }
    each([&](int r) { CK(ncclCommDestroy(others[r])); });
}
int main(int count, char **) {
    alarm(100);
    CK(cuInit(0));
    int devices = 0;
    CK(cuDeviceGetCount(&devices));
    if (devices < N) return printf("SKIP two GPUs\n"), 0;
    for (int r = 0; r < N; r++) {
        CUdevice device;
        CK(cuDeviceGet(&device, r)), CK(cuDevicePrimaryCtxRetain(&context[r], device)), CK(cuCtxSetCurrent(context[r]));
        for (CUstream *s : {&stream[r], &side[r]}) CK(cuStreamCreate(s, CU_STREAM_NON_BLOCKING));
        for (CUdeviceptr *m : {&in[r], &out[r], &kept[r]}) CK(cuMemAlloc(m, MOST));
    }
    CK(ncclCommInitAll(comm, N, nullptr));
    // `order opposite`: that alone.
    if (count > 1)
        for (size_t bytes : {4ul, 131072ul, 1048576ul}) opposite(bytes);
    for (size_t bytes : {4ul, 4096ul, 131072ul, 1048576ul, (unsigned long)MOST}) {
        if (count > 1) break;
        for (int i = 0; i < TURNS; i++) {
            chain(bytes, i);
            if (i % 50 == 49) finish(), check("in a stream", bytes, kept, 8 * i);
        }
        in_graphs(bytes);
        over_streams(bytes);
    }
    each([](int r) { CK(ncclCommDestroy(comm[r])); });
    printf("order: %d wrong\n", wrong);
    return wrong != 0;
}
