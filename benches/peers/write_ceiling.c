/* What the kernel allows a program at most that writes from memory into one file in the page cache: no GPU,
 * no library. Each way writes blocks one after the other, every block by all threads together.
 *
 * usage: write_ceiling FOLDER [SECONDS]
 * prints one CSV row a cell: way,block,threads,GB/s,cpu_s_per_gib
 *   pwrite        pwrite(2); threads write parts of the block
 *   map           the file mapped once, memcpy
 *   map-read      the same, copied by the kernel: pread(2) from a memfd into the mapping, EFAULT instead of
 *                 SIGBUS
 *   map-vm        the same by process_vm_writev(2), which pins the file's pages
 *   map-own       the same by process_vm_readv(2), which pins the source's pages
 *   map-huge      as map-own, out of huge pages
 *   map-read-huge as map-read, out of a memfd with huge pages where the system gives them
 *   map-new       mapped and unmapped for each block, memcpy
 *   populate      mapped for each block, MADV_POPULATE_WRITE, memcpy
 *   copy          memcpy into anonymous memory: what memory allows
 *   extend        pwrite to a file that is cut to nothing before each round
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
enum { THREADS_MAX = 16 };
/* Blocks of 1 MiB and 16 MiB; threads 1, 4, 8, 16, as many as there are processors at most. */
enum way { PWRITE, MAP, MAP_READ, MAP_VM, MAP_OWN, MAP_HUGE, MAP_READ_HUGE, MAP_NEW, POPULATE, COPY, EXTEND, WAYS };
static const char *names[] = {"pwrite", "map", "map-read", "map-vm", "map-own", "map-huge",
                              "map-read-huge", "map-new", "populate", "copy", "extend"};
static const size_t whole = (size_t)512 << 20;
static int fd, memory_fd, huge_fd;
static char *source, *mapped, *plain, *sources[THREADS_MAX], *huge[THREADS_MAX];
static enum way way;
static size_t block;
static int threads;
static atomic_long turn, left;
static atomic_int stop;
static size_t place;
static char *window;

static void die(const char *what) {
    fprintf(stderr, "write_ceiling: %s: %s\n", what, strerror(errno));
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
static void part(int index) {
    size_t share = block / threads, from = share * index;
    size_t at = place + from;
    ssize_t n = share;
    switch (way) {
    case PWRITE:
    case EXTEND: n = pwrite(fd, source + from, share, at); break;
    case MAP: memcpy(mapped + at, source + from, share); break;
    case MAP_READ: n = pread(memory_fd, mapped + at, share, from); break;
    case MAP_VM: {
        struct iovec local = {source + from, share}, remote = {mapped + at, share};
        n = process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
        break;
    }
    case MAP_READ_HUGE: n = pread(huge_fd, mapped + at, share, from); break;
    case MAP_OWN:
    case MAP_HUGE: {
        char **all = way == MAP_OWN ? sources : huge;
        struct iovec local = {mapped + at, share}, remote = {all[index], share};
        n = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
        break;
    }
    case POPULATE:
        if (madvise(window + from, share, MADV_POPULATE_WRITE)) die("MADV_POPULATE_WRITE");
        /* fall through */
    case MAP_NEW: memcpy(window + from, source + from, share); break;
    case COPY: memcpy(plain + at, source + from, share); break;
    default: break;
    }
    if (n != (ssize_t)share) die(names[way]);
}
static void *helper(void *arg) {
    int index = (int)(long)arg;
    for (long seen = 0;;) {
        while (atomic_load(&turn) == seen)
            if (atomic_load(&stop)) return NULL;
        seen++;
        part(index);
        atomic_fetch_sub(&left, 1);
    }
}
static double run(double seconds, double *cost) {
    pthread_t ids[THREADS_MAX];
    turn = left = stop = 0;
    for (long i = 1; i < threads; i++) pthread_create(&ids[i], NULL, helper, (void *)i);
    place = 0;
    size_t done = 0, rounds = 0;
    double t = 0, c = 0;
    /* The first round is not measured. */
    for (;;) {
        if (way == EXTEND && !place && ftruncate(fd, 0)) die("ftruncate");
        if (way == MAP_NEW || way == POPULATE) {
            window = mmap(NULL, block, PROT_READ | PROT_WRITE, MAP_SHARED, fd, place);
            if (window == MAP_FAILED) die("mmap");
        }
        left = threads - 1;
        atomic_fetch_add(&turn, 1);
        part(0);
        while (atomic_load(&left))
            ;
        if (way == MAP_NEW || way == POPULATE) munmap(window, block);
        place += block;
        if (rounds) done += block;
        if (place >= whole) {
            place = 0;
            if (!rounds++) t = now(), c = cpu();
        }
        if (rounds && now() - t > seconds) break;
    }
    t = now() - t;
    c = cpu() - c;
    stop = 1;
    for (int i = 1; i < threads; i++) pthread_join(ids[i], NULL);
    *cost = c / (done / (double)(1 << 30));
    return done / t / 1e9;
}
int main(int count, char **args) {
    if (count < 2) return fprintf(stderr, "usage: write_ceiling FOLDER [SECONDS]\n"), 2;
    double seconds = count > 2 ? atof(args[2]) : 0.1;
    char path[4096];
    snprintf(path, sizeof path, "%s/write-ceiling", args[1]);
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    memory_fd = memfd_create("source", 0);
    if (fd < 0 || memory_fd < 0 || ftruncate(memory_fd, 16 << 20)) die(path);
    source = mmap(NULL, 16 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory_fd, 0);
    plain = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (source == MAP_FAILED || plain == MAP_FAILED) die("memory");
    memset(source, 7, 16 << 20);
    huge_fd = memfd_create("huge", 0);
    if (ftruncate(huge_fd, 16 << 20)) die("memfd");
    char *all = mmap(NULL, 16 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, huge_fd, 0);
    if (all == MAP_FAILED) die("memory");
    madvise(all, 16 << 20, MADV_HUGEPAGE);
    memset(all, 7, 16 << 20);
    for (int i = 0; i < THREADS_MAX; i++) {
        size_t part = (16 << 20) / (i ? 4 : 1);
        huge[i] = mmap(NULL, part + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (huge[i] == MAP_FAILED) die("memory");
        huge[i] += -(size_t)huge[i] & ((2 << 20) - 1);
        madvise(huge[i], part, MADV_HUGEPAGE);
        memset(huge[i], 7, part);
        sources[i] = mmap(NULL, 16 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (sources[i] == MAP_FAILED) die("memory");
        memset(sources[i], 7, part);
    }
    int most = (int)sysconf(_SC_NPROCESSORS_ONLN);
    for (way = 0; way < WAYS; way++) {
        /* The same pages for each way: written once, in the page cache. */
        for (size_t at = 0; at < whole; at += 1 << 20)
            if (pwrite(fd, source, 1 << 20, at) != 1 << 20) die("fill");
        mapped = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped == MAP_FAILED) die("mmap");
        for (int size = 0; size < 2; size++)
            for (threads = 1; threads <= THREADS_MAX && threads <= most; threads *= threads < 4 ? 4 : 2) {
                block = size ? 16 << 20 : 1 << 20;
                double cost, speed = run(seconds, &cost);
                printf("%s,%zu,%d,%.2f,%.3f\n", names[way], block, threads, speed, cost);
                fflush(stdout);
            }
        munmap(mapped, whole);
    }
    unlink(path);
    return 0;
}
