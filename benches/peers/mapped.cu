// The bare loop beside Beeline's mapped route: one thread maps a file, registers its page cache read-only
// ahead of the copies, and lets the copy engine read it.  mapped FILE CHUNK_MIB DEPTH RUNS
// Prints a JSON object a run.   nvcc -O3 mapped.cu -o mapped
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>

static void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

static double wall() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double cpu() {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

struct Chunk {
    size_t at, len;
    cudaEvent_t copied;
};

static void once(const char *path, size_t size, size_t chunk, size_t depth, char *device, cudaStream_t stream) {
    int fd = open(path, O_RDONLY);
    char *map = (char *)mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (fd < 0 || map == MAP_FAILED) {
        perror(path);
        exit(1);
    }
    std::deque<Chunk> ahead;
    auto retire = [&] {
        Chunk first = ahead.front();
        ahead.pop_front();
        must(cudaEventSynchronize(first.copied), "wait");
        must(cudaEventDestroy(first.copied), "event");
        must(cudaHostUnregister(map + first.at), "unregister");
    };
    for (size_t at = 0; at < size; at += chunk) {
        if (ahead.size() >= depth) retire();
        Chunk next{at, size - at < chunk ? size - at : chunk, nullptr};
        must(cudaHostRegister(map + at, next.len, cudaHostRegisterReadOnly), "register");
        must(cudaMemcpyAsync(device + at, map + at, next.len, cudaMemcpyHostToDevice, stream), "copy");
        must(cudaEventCreateWithFlags(&next.copied, cudaEventDisableTiming | cudaEventBlockingSync), "event");
        must(cudaEventRecord(next.copied, stream), "record");
        ahead.push_back(next);
    }
    while (!ahead.empty()) retire();
    munmap(map, size);
    close(fd);
}

int main(int argc, char **argv) {
    struct stat info;
    if (argc != 5 || stat(argv[1], &info)) {
        fprintf(stderr, "usage: mapped FILE CHUNK_MIB DEPTH RUNS\n");
        return 2;
    }
    size_t size = info.st_size, chunk = strtoul(argv[2], nullptr, 10) << 20, depth = strtoul(argv[3], nullptr, 10);
    char *device;
    cudaStream_t stream;
    must(cudaMalloc(&device, size), "alloc");
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    for (int run = atoi(argv[4]); run > 0; run--) {
        double start = wall(), used = cpu();
        once(argv[1], size, chunk, depth, device, stream);
        double seconds = wall() - start;
        printf("{\"bytes\":%zu,\"seconds\":%.6f,\"cpu_seconds\":%.6f,\"note\":\"%s MiB, depth %s\"}\n", size, seconds,
               cpu() - used, argv[2], argv[3]);
    }
    return 0;
}
