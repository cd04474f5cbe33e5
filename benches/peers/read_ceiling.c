/* What a bare loop reaches that reads a file out of the page cache into device memory: no library, only the driver,
 * and as few instructions beside read and copy as there can be. One request at a time, by 1 to 6 threads that take
 * pieces by turns; each reads a piece into pinned memory of its own (4 MiB, by turns) and queues the copy in a
 * stream of its own, then all wait for their last copy. Helpers look for the next request without pause.
 *
 * usage: read_ceiling FOLDER [SECONDS]
 * prints how long a copy takes of what the CPU has just written and of what it has not, then one CSV row a cell:
 *   size,piece,threads,GB/s,p50_us,cpu_s_per_gib
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { THREADS_MAX = 6, EVENTS = 64, SAMPLES = 1 << 16, NOT_READY = 600 };
static const size_t whole = (size_t)2 << 30, staging = 4 << 20;
static int (*cu_copy)(unsigned long long, const void *, size_t, void *), (*cu_record)(void *, void *);
static int (*cu_reached)(void *), (*cu_current)(void *);
static void *context;
static unsigned long long device;
static struct lane { char *memory; void *stream, *events[EVENTS]; unsigned turn; } lanes[THREADS_MAX];
static int fd;
static size_t size, piece, place;
static atomic_long taken, turn;
static atomic_int busy, stop;

static void die(const char *what, int code) {
    fprintf(stderr, "read_ceiling: %s: %d, %s\n", what, code, strerror(errno));
    exit(1);
}
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}
static double cpu(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e6 + u.ru_utime.tv_usec + u.ru_stime.tv_usec;
}
/* Medium requests are waited for by looking; large ones by naps, once that has taken a while. */
static void await(void *event) {
    double since = now();
    int code;
    while ((code = cu_reached(event)) == NOT_READY) {
        struct timespec nap = {0, 20000};
        if (size > 2 << 20 && now() - since > 25) nanosleep(&nap, NULL);
        else __builtin_ia32_pause();
    }
    if (code) die("cuEventQuery", code);
}
static void part(struct lane *lane) {
    size_t at, slots = staging / piece;
    void *last = NULL;
    while ((at = piece * atomic_fetch_add(&taken, 1)) < size) {
        unsigned slot = lane->turn++ % slots;
        /* Of the copy out of this slot that was last. */
        if (lane->turn > slots) await(lane->events[slot]);
        char *into = lane->memory + slot * piece;
        if (pread(fd, into, piece, place + at) != (ssize_t)piece) die("pread", 0);
        int code = cu_copy(device + at, into, piece, lane->stream);
        if (!code) code = cu_record(last = lane->events[slot], lane->stream);
        if (code) die("copy", code);
    }
    if (last) await(last);
}
static void *helper(void *arg) {
    cu_current(context);
    prctl(PR_SET_TIMERSLACK, 1);
    for (long seen = 0;; seen++) {
        while (atomic_load(&turn) == seen)
            if (atomic_load(&stop)) return NULL;
            else __builtin_ia32_pause();
        part(arg);
        atomic_fetch_sub(&busy, 1);
    }
}
static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}
static void cell(int threads, double seconds) {
    static float times[SAMPLES];
    pthread_t ids[THREADS_MAX];
    size_t count = 0, done = 0;
    double t = 0, c = 0;
    turn = busy = stop = 0;
    for (int i = 0; i < threads; i++) lanes[i].turn = 0;
    for (int i = 1; i < threads; i++) pthread_create(&ids[i], NULL, helper, &lanes[i]);
    for (int i = -3; i < 0 || now() - t < seconds * 1e6; i++, place = (place + size) % whole) {
        double began = now();
        taken = 0;
        busy = threads - 1;
        atomic_fetch_add(&turn, 1);
        part(&lanes[0]);
        while (atomic_load(&busy)) __builtin_ia32_pause();
        if (i < 0) t = now(), c = cpu();
        else if (done += size, count < SAMPLES) times[count++] = (float)(now() - began);
    }
    t = now() - t, c = cpu() - c, stop = 1;
    for (int i = 1; i < threads; i++) pthread_join(ids[i], NULL);
    qsort(times, count, sizeof *times, by_value);
    printf("%zu,%zu,%d,%.2f,%.1f,%.3f\n", size, piece, threads, done / t / 1e3, times[count / 2],
           c / 1e6 / (done / 1073741824.0));
    fflush(stdout);
}
/* Medians of pread, of the copy after it, and of the same copy once more. */
static void fresh(size_t bytes) {
    enum { N = 61 };
    float times[3][N];
    for (int i = 0; i < N; i++) {
        char *into = lanes[0].memory + bytes * (i % (staging / bytes));
        for (int what = 0; what < 3; what++) {
            double began = now();
            int code = 0;
            if (!what) code = pread(fd, into, bytes, bytes * i) != (ssize_t)bytes;
            else code = cu_copy(device, into, bytes, lanes[0].stream) || cu_record(lanes[0].events[0], lanes[0].stream);
            if (code) die("fresh", code);
            if (what) await(lanes[0].events[0]);
            times[what][i] = (float)(now() - began);
        }
    }
    for (int what = 0; what < 3; what++) qsort(times[what], N, sizeof **times, by_value);
    printf("%zu KiB: pread %.1f us, copy of what was just read %.1f us, once more %.1f us\n", bytes >> 10,
           times[0][N / 2], times[1][N / 2], times[2][N / 2]);
}
int main(int count, char **args) {
    if (count < 2) return fprintf(stderr, "usage: read_ceiling FOLDER [SECONDS]\n"), 2;
    double seconds = count > 2 ? atof(args[2]) : 0.15;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) die("libcuda.so.1", 0);
    int (*init)(unsigned), (*get)(int *, int), (*retain)(void **, int), (*alloc)(unsigned long long *, size_t);
    int (*pin)(void *, size_t, unsigned), (*stream)(void **, unsigned, int), (*event)(void **, unsigned);
#define CUDA(place, name) if (!(*(void **)&place = dlsym(cuda, name))) die(name, 0)
    CUDA(init, "cuInit"); CUDA(get, "cuDeviceGet"); CUDA(retain, "cuDevicePrimaryCtxRetain");
    CUDA(cu_current, "cuCtxSetCurrent"); CUDA(alloc, "cuMemAlloc_v2"); CUDA(pin, "cuMemHostRegister_v2");
    CUDA(stream, "cuStreamCreateWithPriority"); CUDA(event, "cuEventCreate");
    CUDA(cu_copy, "cuMemcpyHtoDAsync_v2"); CUDA(cu_record, "cuEventRecord"); CUDA(cu_reached, "cuEventQuery");
    int number;
    if (init(0) || get(&number, 0) || retain(&context, number) || cu_current(context)) die("no CUDA device", 0);
    if (alloc(&device, 16 << 20)) die("device memory", 0);
    char path[4096];
    snprintf(path, sizeof path, "%s/read-ceiling", args[1]);
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    char *block = malloc(staging);
    memset(block, 7, staging);
    for (size_t at = 0; at < whole; at += staging)
        if (pwrite(fd, block, staging, at) != (ssize_t)staging) die(path, 0);
    unlink(path);
    for (int i = 0; i < THREADS_MAX; i++) {
        struct lane *lane = &lanes[i];
        lane->memory = mmap(NULL, staging, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (lane->memory == MAP_FAILED) die("memory", 0);
        madvise(lane->memory, staging, MADV_HUGEPAGE);
        if (pin(lane->memory, staging, 3) || stream(&lane->stream, 1, -10)) die("lane", i);
        for (int e = 0; e < EVENTS; e++) if (event(&lane->events[e], 2)) die("event", e);
    }
    prctl(PR_SET_TIMERSLACK, 1);
    for (size_t bytes = 128 << 10; bytes <= 2 << 20; bytes *= 2) fresh(bytes);
    int most = (int)sysconf(_SC_NPROCESSORS_ONLN);
    static const size_t cells[][2] = {{1 << 20, 128 << 10}, {1 << 20, 256 << 10}, {1 << 20, 512 << 10}, {16 << 20, 1 << 20}};
    for (int i = 0; i < 4; i++)
        for (int threads = 1; threads <= THREADS_MAX && threads <= most; threads++) {
            size = cells[i][0], piece = cells[i][1];
            cell(threads, seconds);
        }
    return 0;
}
