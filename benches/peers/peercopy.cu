// The plain copy loop beside `beeline doctor --probe`: every ordered pair of GPUs through the driver API,
// moved by the source's and by the destination's engine.  peercopy [MIB]
//   nvcc -O3 peercopy.cu -lcuda -o peercopy
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void must(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    const char *name = "?";
    cuGetErrorName(result, &name);
    fprintf(stderr, "%s: %s\n", what, name);
    exit(1);
}

struct Side {
    CUcontext context;
    CUdeviceptr memory;
    CUstream stream;
};

static double gb_per_s(Side &actor, const Side &from, const Side &to, size_t bytes) {
    must(cuCtxSetCurrent(actor.context), "context");
    const int copies = 40;
    std::vector<double> speeds;
    for (int run = 0; run < 5; run++) {
        auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < copies; i++) must(cuMemcpyDtoDAsync(to.memory, from.memory, bytes, actor.stream), "copy");
        must(cuStreamSynchronize(actor.stream), "wait");
        double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        speeds.push_back(copies * double(bytes) / seconds / 1e9);
    }
    std::sort(speeds.begin(), speeds.end());
    return speeds[2];
}

int main(int argc, char **argv) {
    size_t bytes = (argc > 1 ? strtoul(argv[1], nullptr, 10) : 256) << 20;
    int count = 0;
    must(cuInit(0), "init");
    must(cuDeviceGetCount(&count), "count");
    std::vector<Side> sides(count);
    for (int i = 0; i < count; i++) {
        must(cuDevicePrimaryCtxRetain(&sides[i].context, i), "retain");
        must(cuCtxSetCurrent(sides[i].context), "context");
        must(cuMemAlloc(&sides[i].memory, bytes), "alloc");
        must(cuMemsetD8(sides[i].memory, 7, bytes), "fill");
        must(cuStreamCreate(&sides[i].stream, CU_STREAM_NON_BLOCKING), "stream");
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) {
            if (i == j) continue;
            must(cuCtxSetCurrent(sides[i].context), "context");
            must(cuCtxEnablePeerAccess(sides[j].context, 0), "peer access");
        }
    for (int from = 0; from < count; from++)
        for (int to = 0; to < count; to++)
            for (int pushed = 1; from != to && pushed >= 0; pushed--) {
                int by = pushed ? from : to;
                printf("plain loop: cuda:%d -> cuda:%d by cuda:%d %8.1f GB/s\n", from, to, by,
                       gb_per_s(sides[by], sides[from], sides[to], bytes));
            }
    return 0;
}
