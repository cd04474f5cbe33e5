/* Throughput and latency of cuFileRead and cuFileWrite, for one library, over all cells once.
 *
 * usage: cufile_bench LIBRARY NAME FOLDER PASS [SECONDS [cold | once]]
 *   LIBRARY  path of a libcufile.so.0; or "plain" (pread, copy, wait in the driver) or "word" (the stream
 *            writes a word that is looked at), what a call costs that does nothing else
 *   FOLDER   holds cufile-bench.read and cufile-bench.write, which are made where they are not there
 * env: CELLS="read:1048576:1 write:16777216:4 ..", the only cells to be run
 * prints one CSV row a cell: name,pass,op,size,threads,GB/s,p50_us,p99_us,cpu_s_per_gib,compared
 */
#define _GNU_SOURCE
#include <cufile.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long dptr;
enum { THREADS_MAX = 64, SAMPLES = 1 << 20 };
static int (*cu_init)(unsigned), (*cu_device)(int *, int), (*cu_retain)(void **, int), (*cu_current)(void *);
static int (*cu_alloc)(dptr *, size_t), (*cu_h2d)(dptr, const void *, size_t), (*cu_d2h)(void *, dptr, size_t);
static int (*cu_stream)(CUstream *, unsigned), (*cu_sync)(CUstream), (*cu_host)(void **, size_t, unsigned);
static int (*cu_h2da)(dptr, const void *, size_t, CUstream), (*cu_d2ha)(void *, dptr, size_t, CUstream);
static int (*cu_word)(CUstream, dptr, unsigned, unsigned), (*cu_map)(dptr *, void *, unsigned);
static void *context;
static __typeof__(&cuFileDriverOpen) f_open;
static __typeof__(&cuFileHandleRegister) f_handle;
static __typeof__(&cuFileBufRegister) f_buffer;
static __typeof__(&cuFileRead) f_read;
static __typeof__(&cuFileWrite) f_write;
static int cold; /* each byte once */
static int plain; /* 1: the driver waits, 2: a word is looked at */
static int read_fd, write_fd;

static void die(const char *what, long value) {
    fprintf(stderr, "cufile_bench: %s (%ld, errno %d)\n", what, value, errno);
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
static unsigned long word_at(unsigned long place) { return place * 0x9e3779b97f4a7c15ul + 1; }

static int file(const char *folder, const char *name, size_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT, 0644);
    struct stat stat;
    if (fd < 0 || fstat(fd, &stat)) die(path, fd);
    if (stat.st_size == (off_t)size) return fd;
    unsigned long *block = malloc(4 << 20);
    for (size_t at = 0; at < size; at += 4 << 20) {
        for (size_t i = 0; i < (4 << 20) / 8; i++) block[i] = word_at(at / 8 + i);
        if (pwrite(fd, block, 4 << 20, at) != 4 << 20) die("fill", at);
    }
    free(block);
    fsync(fd);
    return fd;
}
static void start_cuda(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!cuda) die(dlerror(), 0);
#define CUDA(place, name) if (!(*(void **)&place = dlsym(cuda, name))) die(name, 0)
    CUDA(cu_init, "cuInit"); CUDA(cu_device, "cuDeviceGet"); CUDA(cu_retain, "cuDevicePrimaryCtxRetain");
    CUDA(cu_current, "cuCtxSetCurrent"); CUDA(cu_alloc, "cuMemAlloc_v2"); CUDA(cu_h2d, "cuMemcpyHtoD_v2");
    CUDA(cu_d2h, "cuMemcpyDtoH_v2"); CUDA(cu_stream, "cuStreamCreate"); CUDA(cu_sync, "cuStreamSynchronize");
    CUDA(cu_h2da, "cuMemcpyHtoDAsync_v2"); CUDA(cu_d2ha, "cuMemcpyDtoHAsync_v2");
    CUDA(cu_word, "cuStreamWriteValue32_v2");
    *(void **)&cu_host = dlsym(cuda, "cuMemHostAlloc");
    *(void **)&cu_map = dlsym(cuda, "cuMemHostGetDevicePointer_v2");
    int device;
    if (cu_init(0) || cu_device(&device, 0) || cu_retain(&context, device) || cu_current(context))
        die("no CUDA device", 0);
}

struct worker {
    int index, threads, write;
    size_t size;
    dptr buffer;
    CUfileHandle_t handle;
    size_t done;
    float *times;
    size_t count;
    ssize_t failed;
    char *pinned;
    CUstream stream;
    dptr word;
    unsigned mark;
};
static volatile int ready, go, stop, running;
static size_t read_size = (size_t)2 << 30, write_size = (size_t)512 << 20;

static ssize_t once(struct worker *w, off_t at) {
    if (!plain)
        return w->write ? f_write(w->handle, (void *)w->buffer, w->size, at, 0)
                        : f_read(w->handle, (void *)w->buffer, w->size, at, 0);
    ssize_t n = w->size;
    if (!w->write) n = pread(read_fd, w->pinned, w->size, at);
    if (w->write ? cu_d2ha(w->pinned, w->buffer, w->size, w->stream) : cu_h2da(w->buffer, w->pinned, n, w->stream))
        return -1;
    if (plain == 2) {
        unsigned *word = (unsigned *)(w->pinned + w->size);
        if (cu_word(w->stream, w->word, ++w->mark, 0)) return -1;
        while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != w->mark) __builtin_ia32_pause();
    } else if (cu_sync(w->stream)) return -1;
    if (w->write) n = pwrite(write_fd, w->pinned, w->size, at);
    return n;
}
static void *work(void *arg) {
    struct worker *w = arg;
    cu_current(context);
    if (plain) {
        if (!w->stream && cu_stream(&w->stream, 1)) die("stream", 0);
        if (cu_host((void **)&w->pinned, w->size + 4096, 3)) die("pinned memory", w->size);
        *(unsigned *)(w->pinned + w->size) = 0;
        if (cu_map(&w->word, w->pinned + w->size, 0)) die("map", 0);
        w->mark = 0;
    }
    size_t whole = w->write ? write_size : read_size, units = whole / w->size;
    size_t low = units * w->index / w->threads, span = units * (w->index + 1) / w->threads - low;
    if (!span) span = 1;
    for (int i = 0; i < 3 && !cold; i++) once(w, (off_t)(low * w->size));
    __sync_fetch_and_add(&running, 1);
    __sync_fetch_and_add(&ready, 1);
    while (!go) usleep(50);
    for (size_t i = 0; !stop && !(cold && i >= span); i++) {
        double a = now();
        ssize_t n = once(w, (off_t)((low + i % span) * w->size));
        double z = now();
        if (n != (ssize_t)w->size) { w->failed = n ? n : -1; break; }
        w->done += n;
        if (w->count < SAMPLES) w->times[w->count++] = (float)((z - a) * 1e6);
    }
    __sync_fetch_and_sub(&running, 1);
    return NULL;
}
static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}
/* one block of a worker once more, byte for byte: what was read is what the file was made of, what was written
 * is what the device holds */
static int compared(struct worker *w) {
    size_t units = (w->write ? write_size : read_size) / w->size, low = units * w->index / w->threads;
    if (once(w, (off_t)(low * w->size)) != (ssize_t)w->size) return 0;
    unsigned long *got = malloc(w->size), *file = malloc(w->size);
    int ok = !cu_d2h(got, w->buffer, w->size);
    if (w->write) {
        ok = ok && pread(write_fd, file, w->size, (off_t)(low * w->size)) == (ssize_t)w->size;
        ok = ok && !memcmp(got, file, w->size);
    } else
        for (size_t i = 0; ok && i < w->size / 8; i++) ok = got[i] == word_at(low * w->size / 8 + i);
    free(got);
    free(file);
    return ok;
}
static void cell(const char *name, const char *pass, const char *op, size_t size, int threads,
                 CUfileHandle_t handle, dptr buffers, double seconds) {
    static struct worker workers[THREADS_MAX];
    static float *times;
    if (!times) times = mmap(NULL, sizeof(float) * SAMPLES * 17, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_t ids[THREADS_MAX];
    ready = go = stop = running = 0;
    for (int i = 0; i < threads; i++) {
        CUstream stream = workers[i].stream;
        workers[i] = (struct worker){.index = i, .threads = threads, .write = *op == 'w', .size = size,
            .buffer = buffers + (size_t)i * (16 << 20), .handle = handle,
            .times = times + (size_t)i * SAMPLES, .stream = stream};
        pthread_create(&ids[i], NULL, work, &workers[i]);
    }
    while (ready < threads) usleep(100);
    double c = cpu(), t = now();
    go = 1;
    for (double end = t + seconds; now() < end && !(cold && !running);) usleep(1000);
    stop = 1;
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    t = now() - t;
    c = cpu() - c;
    size_t done = 0, count = 0;
    static float *all;
    if (!all) all = malloc(sizeof(float) * SAMPLES * 2);
    for (int i = 0; i < threads; i++) {
        if (workers[i].failed) die("a call failed", workers[i].failed);
        done += workers[i].done;
        size_t step = workers[i].count * threads / (2 * SAMPLES) + 1;
        for (size_t k = 0; k < workers[i].count && count < 2 * SAMPLES; k += step) all[count++] = workers[i].times[k];
    }
    qsort(all, count, sizeof *all, by_value);
    int same = compared(&workers[threads - 1]);
    printf("%s,%s,%s,%zu,%d,%.3f,%.1f,%.1f,%.4f,%s\n", name, pass, op, size, threads, done / t / 1e9,
           count ? all[count / 2] : 0, count ? all[count * 99 / 100] : 0, done ? c / (done / 1073741824.0) : 0,
           same ? "yes" : "NO");
    fflush(stdout);
}
static int wanted(const char *op, size_t size, int threads) {
    const char *cells = getenv("CELLS");
    char all[4096], one[64];
    if (!cells || !*cells) return 1;
    snprintf(all, sizeof all, " %s ", cells);
    snprintf(one, sizeof one, " %s:%zu:%d ", op, size, threads);
    return strstr(all, one) != NULL;
}
int main(int argc, char **argv) {
    if (argc < 5) die("usage: cufile_bench LIBRARY NAME FOLDER PASS [SECONDS]", argc);
    double seconds = argc > 5 ? atof(argv[5]) : 0.35;
    cold = argc > 6 && !strcmp(argv[6], "cold");
    plain = !strcmp(argv[1], "plain") ? 1 : !strcmp(argv[1], "word") ? 2 : 0;
    start_cuda();
    read_fd = file(argv[3], "cufile-bench.read", read_size);
    write_fd = file(argv[3], "cufile-bench.write", write_size);
    dptr buffers;
    if (cu_alloc(&buffers, (size_t)16 * (16 << 20))) die("device memory", 0);
    CUfileHandle_t reads = NULL, writes = NULL;
    if (!plain) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
        if (!library) die(dlerror(), 0);
#define FILE_FUNCTION(place, name) if (!(*(void **)&place = dlsym(library, name))) die(name, 0)
        FILE_FUNCTION(f_open, "cuFileDriverOpen"); FILE_FUNCTION(f_handle, "cuFileHandleRegister");
        FILE_FUNCTION(f_buffer, "cuFileBufRegister"); FILE_FUNCTION(f_read, "cuFileRead");
        FILE_FUNCTION(f_write, "cuFileWrite");
        int code = f_open().err;
        if (code) die("cuFileDriverOpen", code);
        CUfileDescr_t descr;
        memset(&descr, 0, sizeof descr);
        descr.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
        descr.handle.fd = read_fd;
        if ((code = f_handle(&reads, &descr).err)) die("cuFileHandleRegister", code);
        descr.handle.fd = write_fd;
        if ((code = f_handle(&writes, &descr).err)) die("cuFileHandleRegister", code);
        for (int i = 0; i < 16; i++)
            if ((code = f_buffer((void *)(buffers + (size_t)i * (16 << 20)), 16 << 20, 0).err)) die("cuFileBufRegister", code);
    }
    if (cold) {
        static const struct { size_t size; int threads; } cells[] = {{1 << 20, 16}, {16 << 20, 1}, {16 << 20, 16}};
        for (int i = 0; i < 3; i++) {
            fsync(read_fd);
            posix_fadvise(read_fd, 0, 0, POSIX_FADV_DONTNEED);
            cell(argv[2], argv[4], "read-cold", cells[i].size, cells[i].threads, reads, buffers, seconds);
        }
        return 0;
    }
    if (argc > 6 && !strcmp(argv[6], "once")) {
        /* what is in the page cache, and clean, is written over once, by a handle that is new */
        static const struct { size_t size; int threads; } cells[] = {{1 << 20, 1}, {16 << 20, 1}, {1 << 20, 4}, {16 << 20, 4}};
        char *warm = malloc(4 << 20);
        cold = 1;
        for (int i = 0; i < 4; i++) {
            CUfileDescr_t descr;
            memset(&descr, 0, sizeof descr);
            descr.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD;
            char path[64];
            snprintf(path, sizeof path, "/proc/self/fd/%d", write_fd);
            descr.handle.fd = open(path, O_RDWR);
            if (descr.handle.fd < 0 || (!plain && f_handle(&writes, &descr).err)) die("once", i);
            for (size_t at = 0; at < write_size; at += 4 << 20) if (pread(write_fd, warm, 4 << 20, at) < 0) die("warm", at);
            fsync(write_fd);
            cell(argv[2], argv[4], "write-once", cells[i].size, cells[i].threads, writes, buffers, seconds);
        }
        return 0;
    }
    char *warm = malloc(4 << 20);
    for (size_t at = 0; at < read_size; at += 4 << 20) if (pread(read_fd, warm, 4 << 20, at) < 0) die("warm", at);
    static const size_t sizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
    static const int threads[] = {1, 4, 16};
    for (int op = 0; op < 2; op++)
        for (int s = 0; s < 4; s++)
            for (int t = 0; t < 3; t++)
                if (wanted(op ? "write" : "read", sizes[s], threads[t]))
                    cell(argv[2], argv[4], op ? "write" : "read", sizes[s], threads[t], op ? writes : reads, buffers, seconds);
    return 0;
}
