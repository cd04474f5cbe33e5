/* Throughput of stream-ordered reads and writes, for one library: requests queued one behind the other in one or
 * several streams, one thread that queues and waits.
 *
 * usage: cufile_streams LIBRARY NAME FOLDER [SECONDS]
 * prints one CSV row a cell: name,op,size,streams,GB/s,us per request,cpu_s_per_gib,compared
 */
#define _GNU_SOURCE
#include <cufile.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long dptr;
enum { STREAMS_MAX = 40, DEPTH = 4 };
static int (*cu_init)(unsigned), (*cu_device)(int *, int), (*cu_retain)(void **, int), (*cu_current)(void *);
static int (*cu_alloc)(dptr *, size_t), (*cu_d2h)(void *, dptr, size_t), (*cu_h2d)(dptr, const void *, size_t);
static int (*cu_stream)(CUstream *, unsigned), (*cu_sync)(CUstream);
static __typeof__(&cuFileDriverOpen) f_open;
static __typeof__(&cuFileHandleRegister) f_handle;
static __typeof__(&cuFileBufRegister) f_buffer;
static __typeof__(&cuFileReadAsync) f_read;
static __typeof__(&cuFileWriteAsync) f_write;
static __typeof__(&cuFileStreamRegister) f_stream;

static void die(const char *what, long value) {
    fprintf(stderr, "cufile_streams: %s (%ld, errno %d)\n", what, value, errno);
    exit(1);
}
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
static double cpu(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}
static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) die(name, 0);
    return found;
}

typedef struct { size_t size; off_t file, place; ssize_t moved; } late_t;

int main(int argc, char **argv) {
    if (argc < 4) die("usage: cufile_streams LIBRARY NAME FOLDER [SECONDS]", argc);
    double seconds = argc > 4 ? atof(argv[4]) : 0.3;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context;
    if (!cuda) die(dlerror(), 0);
#define CUDA(place, name) *(void **)&place = symbol(cuda, name)
    CUDA(cu_init, "cuInit"); CUDA(cu_device, "cuDeviceGet"); CUDA(cu_retain, "cuDevicePrimaryCtxRetain");
    CUDA(cu_current, "cuCtxSetCurrent"); CUDA(cu_alloc, "cuMemAlloc_v2"); CUDA(cu_d2h, "cuMemcpyDtoH_v2");
    CUDA(cu_h2d, "cuMemcpyHtoD_v2"); CUDA(cu_stream, "cuStreamCreate"); CUDA(cu_sync, "cuStreamSynchronize");
    int device;
    if (cu_init(0) || cu_device(&device, 0) || cu_retain(&context, device) || cu_current(context)) die("no device", 0);
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    if (!library) die(dlerror(), 0);
#define CUFILE(place, name) *(void **)&place = symbol(library, #name)
    CUFILE(f_open, cuFileDriverOpen); CUFILE(f_handle, cuFileHandleRegister); CUFILE(f_buffer, cuFileBufRegister);
    CUFILE(f_read, cuFileReadAsync); CUFILE(f_write, cuFileWriteAsync); CUFILE(f_stream, cuFileStreamRegister);
    if (f_open().err) die("open", 0);
    const size_t whole = 256 << 20;
    char path[4096];
    snprintf(path, sizeof path, "%s/cufile-streams", argv[3]);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    unsigned *host = malloc(whole), *back = malloc(whole);
    for (size_t i = 0; i < whole / 4; i++) host[i] = (unsigned)(i * 2654435761u);
    if (fd < 0 || write(fd, host, whole) != (ssize_t)whole) die(path, fd);
    CUfileDescr_t descr;
    memset(&descr, 0, sizeof descr);
    descr.type = 1;
    descr.handle.fd = fd;
    CUfileHandle_t handle;
    int code = f_handle(&handle, &descr).err;
    if (code) die("register", code);
    dptr d;
    if (cu_alloc(&d, whole) || f_buffer((void *)d, whole, 0).err) die("device memory", 0);
    CUstream streams[STREAMS_MAX];
    for (int i = 0; i < STREAMS_MAX; i++)
        if (cu_stream(&streams[i], 1)) die("stream", i);
    static const struct { size_t size; int streams, write; } cells[] = {
        {4096, 1, 0}, {65536, 1, 0}, {1 << 20, 1, 0}, {4 << 20, 1, 0}, {16 << 20, 1, 0},
        {65536, 8, 0}, {1 << 20, 8, 0}, {16 << 20, 2, 0}, {1 << 20, 16, 0},
        {2 << 20, 8, 0}, {4 << 20, 8, 0}, {2 << 20, 40, 0}, {4 << 20, 40, 0},
        {4096, 1, 1}, {1 << 20, 1, 1}, {16 << 20, 1, 1}, {1 << 20, 8, 1}, {4 << 20, 8, 1}, {2 << 20, 40, 1},
    };
    for (size_t c = 0; c < sizeof cells / sizeof *cells; c++) {
        size_t size = cells[c].size;
        int count = cells[c].streams, write = cells[c].write, bad = 0;
        static late_t late[STREAMS_MAX][DEPTH];
        cu_h2d(d, host, whole);
        if (!write) {
            memset(back, 0, whole);
            cu_h2d(d, back, whole);
        }
        cu_sync(NULL);
        unsigned long rounds = 0;
        double begin = now(), spent = cpu(), end;
        size_t reach = size * DEPTH * count;
        do {
            for (int k = 0; k < DEPTH; k++)
                for (int i = 0; i < count; i++) {
                    off_t at = (off_t)(((size_t)i * DEPTH + k) * size % (whole - size + 1)) & ~4095l;
                    late[i][k] = (late_t){size, at, at, 0};
                    late_t *l = &late[i][k];
                    int e = (write ? f_write : f_read)(handle, (void *)d, &l->size, &l->file, &l->place, &l->moved, streams[i]).err;
                    if (e) die("queue", e);
                }
            for (int i = 0; i < count; i++)
                if (cu_sync(streams[i])) die("sync", i);
            for (int i = 0; i < count; i++)
                for (int k = 0; k < DEPTH; k++) bad += late[i][k].moved != (ssize_t)size;
            rounds++;
            end = now();
        } while (end - begin < seconds);
        spent = cpu() - spent;
        size_t compare = reach < whole ? reach : whole;
        if (write) {
            if (pread(fd, back, compare, 0) != (ssize_t)compare) bad++;
        } else {
            cu_d2h(back, d, compare);
        }
        bad += memcmp(back, host, compare) != 0;
        double bytes = (double)rounds * DEPTH * count * size;
        printf("%s,%s,%zu,%d,%.2f GB/s,%.1f us,%.3f cpu-s/GiB,%s\n", argv[2], write ? "write" : "read", size, count,
               bytes / (end - begin) * 1e-9, (end - begin) * 1e6 / (rounds * DEPTH * count), spent / (bytes / (1 << 30)),
               bad ? "WRONG" : "same");
        fflush(stdout);
    }
    unlink(path);
    return 0;
}
