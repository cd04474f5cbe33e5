/* What the library answers, call by call. Runs over any libcuda.so.1: the real driver's, or the simulated
 * one of the tests. Prints a line for each failure and a last line "N checks, M failed"; exits 1 on any.
 *
 * usage: conformance LIBCUFILE FOLDER [GROUP]     the library, and a folder for files (a real file system)
 */
#define _GNU_SOURCE
#include <cufile.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned char u8;
typedef unsigned long long dptr;

static int checks, failures;
static const char *group = "", *folder;

static void check(int ok, const char *format, ...) {
    checks++;
    if (ok) return;
    failures++;
    va_list args;
    va_start(args, format);
    printf("FAIL %s: ", group);
    vprintf(format, args);
    printf("\n");
    va_end(args);
    fflush(stdout);
}
static void die(const char *what) {
    printf("cannot go on: %s\n", what);
    exit(2);
}

/* ---- the functions, by name ---- */
#define FUNCTIONS(X) \
    X(cuFileDriverOpen) X(cuFileDriverClose) X(cuFileDriverClose_v2) X(cuFileUseCount) X(cuFileGetVersion) \
    X(cuFileDriverGetProperties) X(cuFileDriverSetPollMode) X(cuFileDriverSetMaxDirectIOSize) \
    X(cuFileDriverSetMaxCacheSize) X(cuFileDriverSetMaxPinnedMemSize) X(cuFileDriverSetP2PFlags) \
    X(cuFileDriverGetP2PFlags) X(cuFileGetBARSizeInKB) X(cuFileExportPCIeTopology) X(cuFileHandleRegister) \
    X(cuFileHandleDeregister) X(cuFileBufRegister) X(cuFileBufDeregister) X(cuFileRead) X(cuFileWrite) \
    X(cuFileReadv) X(cuFileWritev) X(cuFileBatchIOSetUp) X(cuFileBatchIOSubmit) X(cuFileBatchIOGetStatus) \
    X(cuFileBatchIOCancel) X(cuFileBatchIODestroy) X(cuFileReadAsync) X(cuFileWriteAsync) \
    X(cuFileStreamRegister) X(cuFileStreamDeregister) X(cuFileGetParameterSizeT) X(cuFileGetParameterBool) \
    X(cuFileGetParameterString) X(cuFileSetParameterSizeT) X(cuFileSetParameterBool) \
    X(cuFileSetParameterString) X(cuFileGetParameterMinMaxValue) X(cuFileSetParameterPosixPoolSlabArray) \
    X(cuFileGetParameterPosixPoolSlabArray) X(cuFileSetParameterGpuBounceBufferSlabArray) \
    X(cuFileGetParameterGpuBounceBufferSlabArray) X(cuFileSetStatsLevel) X(cuFileGetStatsLevel) \
    X(cuFileStatsStart) X(cuFileStatsStop) X(cuFileStatsReset) X(cuFileGetStatsL1) X(cuFileGetStatsL2) \
    X(cuFileGetStatsL3)
#define DECLARE(name) static __typeof__(&name) p_##name;
FUNCTIONS(DECLARE)

/* ---- the CUDA driver ---- */
static int (*cu_init)(unsigned), (*cu_device)(int *, int), (*cu_retain)(void **, int), (*cu_current)(void *);
static int (*cu_alloc)(dptr *, size_t), (*cu_free)(dptr);
static int (*cu_d2h)(void *, dptr, size_t), (*cu_get_current)(void **);
static int (*cu_set_only)(dptr, u8, size_t), (*cu_h2d_only)(dptr, const void *, size_t);
static int (*cu_stream)(CUstream *, unsigned), (*cu_sync)(CUstream), (*cu_wait)(CUstream, dptr, unsigned, unsigned);
static int (*cu_register)(void *, size_t, unsigned), (*cu_unregister)(void *), (*cu_map)(dptr *, void *, unsigned);
static int (*cu_destroy)(CUstream), stream_ids;
static int (*cu_begin)(CUstream, int), (*cu_end)(CUstream, void **);
static int64_t (*test_counter)(const char *);
static void *context;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) die(name);
    return found;
}
static void start_cuda(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!cuda) die(dlerror());
#define CUDA(place, name) *(void **)&place = symbol(cuda, name)
    CUDA(cu_init, "cuInit"); CUDA(cu_device, "cuDeviceGet"); CUDA(cu_retain, "cuDevicePrimaryCtxRetain");
    CUDA(cu_current, "cuCtxSetCurrent"); CUDA(cu_get_current, "cuCtxGetCurrent");
    CUDA(cu_alloc, "cuMemAlloc_v2"); CUDA(cu_free, "cuMemFree_v2"); CUDA(cu_h2d_only, "cuMemcpyHtoD_v2");
    CUDA(cu_d2h, "cuMemcpyDtoH_v2"); CUDA(cu_set_only, "cuMemsetD8_v2"); CUDA(cu_stream, "cuStreamCreate");
    CUDA(cu_sync, "cuStreamSynchronize"); CUDA(cu_wait, "cuStreamWaitValue32_v2");
    CUDA(cu_register, "cuMemHostRegister_v2"); CUDA(cu_unregister, "cuMemHostUnregister");
    CUDA(cu_map, "cuMemHostGetDevicePointer_v2");
    CUDA(cu_destroy, "cuStreamDestroy_v2");
    stream_ids = dlsym(cuda, "cuStreamGetId") != NULL;
    *(void **)&cu_begin = dlsym(cuda, "cuStreamBeginCapture_v2");
    *(void **)&cu_end = dlsym(cuda, "cuStreamEndCapture");
    *(void **)&test_counter = dlsym(cuda, "beeline_test_cuda_counter");
    int device;
    if (cu_init(0) || cu_device(&device, 0) || cu_retain(&context, device) || cu_current(context))
        die("no CUDA device");
}

/* Both may answer before the device has done it, and cuFile's calls are not ordered after the default
 * stream: wait. */
static int cu_set(dptr to, u8 value, size_t size) { return cu_set_only(to, value, size) || cu_sync(NULL); }
static int cu_h2d(dptr to, const void *from, size_t size) { return cu_h2d_only(to, from, size) || cu_sync(NULL); }

/* ---- data: a byte by its place and a seed ---- */
static u8 byte_at(uint64_t place, unsigned seed) {
    uint64_t x = (place + seed * 7919u) * 0x9e3779b97f4a7c15ull;
    return (u8)(x >> 47) ^ (u8)(x >> 23);
}
static u8 *pattern(size_t size, uint64_t place, unsigned seed) {
    u8 *bytes = malloc(size + 1);
    for (size_t i = 0; i < size; i++) bytes[i] = byte_at(place + i, seed);
    return bytes;
}
static char *file_of(const char *name, size_t size, unsigned seed) {
    char *path;
    if (asprintf(&path, "%s/%s", folder, name) < 0) die("memory");
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    u8 *bytes = pattern(size, 0, seed);
    if (fd < 0 || write(fd, bytes, size) != (ssize_t)size) die(path);
    free(bytes);
    close(fd);
    return path;
}
static dptr device(size_t size) {
    dptr ptr = 0;
    if (cu_alloc(&ptr, size) || cu_set(ptr, 0xa5, size)) die("device memory");
    return ptr;
}
/* [0, total) of a device: file bytes from `place` on in [at, at + size), 0xa5 elsewhere */
static int same(dptr ptr, size_t total, size_t at, size_t size, uint64_t place, unsigned seed) {
    u8 *bytes = malloc(total);
    int ok = !cu_d2h(bytes, ptr, total);
    for (size_t i = 0; ok && i < total; i++)
        ok = bytes[i] == (i >= at && i < at + size ? byte_at(place + i - at, seed) : 0xa5);
    free(bytes);
    return ok;
}
static int file_same(const char *path, off_t at, size_t size, uint64_t place, unsigned seed) {
    u8 *bytes = malloc(size + 1);
    int fd = open(path, O_RDONLY), ok = pread(fd, bytes, size, at) == (ssize_t)size;
    for (size_t i = 0; ok && i < size; i++) ok = bytes[i] == byte_at(place + i, seed);
    close(fd);
    free(bytes);
    return ok;
}
static int code_of_fd(CUfileHandle_t *handle, int fd, int type) {
    CUfileDescr_t descr;
    memset(&descr, 0, sizeof descr);
    descr.type = type;
    descr.handle.fd = fd;
    return p_cuFileHandleRegister(handle, &descr).err;
}
static CUfileHandle_t handle_of(const char *path, int flags) {
    CUfileHandle_t handle = NULL;
    int fd = open(path, flags), code = code_of_fd(&handle, fd, 1);
    check(code == 0, "register %s with flags %#x: %d", path, flags, code);
    return handle;
}
#define CODE(call, expected) do { int c_ = (call).err; check(c_ == (expected), "%s: %d, not %d", #call, c_, expected); } while (0)
#define BYTES(call, expected) do { ssize_t r_ = (call); check(r_ == (ssize_t)(expected), "%s: %zd (errno %d), not %zd", #call, r_, errno, (ssize_t)(expected)); } while (0)

/* ---- groups ---- */
static void opening(void) {
    char *path = file_of("open", 1 << 20, 1);
    int version = 0;
    check(p_cuFileUseCount() == 0, "closed at first");
    CODE(p_cuFileGetVersion(&version), 0);
    check(version >= 1150 && version < 3000, "version %d", version);
    CODE(p_cuFileGetVersion(NULL), 5022);
    CODE(p_cuFileDriverClose_v2(), 5001);
    dptr d = device(65536);
    CODE(p_cuFileBufDeregister((void *)d), 5024);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    check(p_cuFileUseCount() == 1, "opened by a registration: %ld", p_cuFileUseCount());
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    CODE(p_cuFileBufRegister((void *)d, 65536, 0), 0);
    CODE(p_cuFileDriverOpen(), 0);
    check(p_cuFileUseCount() == 2, "counted");
    CODE(p_cuFileDriverClose(), 0);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    CODE(p_cuFileDriverClose_v2(), 0);
    check(p_cuFileUseCount() == 0, "closed");
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), -5027);
    CODE(p_cuFileBufDeregister((void *)d), 5024);
    p_cuFileHandleDeregister(h);
    CODE(p_cuFileDriverClose_v2(), 5001);
    for (int i = 0; i < 20; i++) {
        CODE(p_cuFileDriverOpen(), 0);
        CODE(p_cuFileDriverClose_v2(), 0);
    }
    h = handle_of(path, O_RDONLY);
    BYTES(p_cuFileRead(h, (void *)d, 65536, 100, 0), 65536);
    check(same(d, 65536, 0, 65536, 100, 1), "data after opening again");
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
}

static void handles(void) {
    char *path = file_of("handles", 1 << 20, 1), *other = file_of("other", 1 << 20, 2);
    dptr d = device(65536);
    int pipes[2], sockets[2];
    if (pipe(pipes) || socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) die("pipes");
    CODE(p_cuFileDriverOpen(), 0);
    struct { const char *what; int fd, code; ssize_t read; } cases[] = {
        {"O_RDONLY", open(path, O_RDONLY), 0, 4096},
        {"O_RDWR", open(path, O_RDWR), 0, 4096},
        {"O_RDWR|O_DIRECT", open(path, O_RDWR | O_DIRECT), 0, 4096},
        {"O_RDWR|O_SYNC", open(path, O_RDWR | O_SYNC), 0, 4096},
        {"O_WRONLY", open(path, O_WRONLY), 0, -5019},
        {"O_RDWR|O_APPEND", open(path, O_RDWR | O_APPEND), 5019, 0},
        {"O_PATH", open(path, O_PATH), 5019, 0},
        {"a folder", open(folder, O_RDONLY | O_DIRECTORY), 5018, 0},
        {"a pipe", pipes[0], 5018, 0},
        {"a socket", sockets[0], 5018, 0},
        {"a closed descriptor", 999, 5022, 0},
        {"-1", -1, 5022, 0},
        {"/dev/null", open("/dev/null", O_RDWR), 5018, 0},
        {"/proc/self/maps", open("/proc/self/maps", O_RDONLY), 5018, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].fd < 0 && strcmp(cases[i].what, "-1")) continue; /* O_DIRECT on a tmpfs */
        CUfileHandle_t h = NULL;
        int code = code_of_fd(&h, cases[i].fd, 1);
        check(code == cases[i].code, "%s: %d, not %d", cases[i].what, code, cases[i].code);
        if (code) continue;
        ssize_t n = p_cuFileRead(h, (void *)d, 4096, 0, 0);
        check(n == cases[i].read, "%s: read %zd", cases[i].what, n);
        p_cuFileHandleDeregister(h);
    }
    int memory = memfd_create("x", 0);
    if (ftruncate(memory, 8192)) die("memfd");
    CUfileHandle_t h = NULL, again = NULL;
    check(code_of_fd(&h, memory, 1) == 0, "a memfd");
    BYTES(p_cuFileRead(h, (void *)d, 65536, 0, 0), 8192);
    int fd = open(path, O_RDWR);
    check(code_of_fd(&h, fd, 1) == 0 && code_of_fd(&again, fd, 1) == 5028 && !again, "twice");
    check(code_of_fd(&again, open(path, O_RDWR), 1) == 0, "the same file, another descriptor");
    for (int type = 0; type < 10; type += type == 0 ? 2 : type == 2 ? 1 : 6)
        check(code_of_fd(&again, fd, type) == 5008, "type %d", type);
    CODE(p_cuFileHandleRegister(&h, NULL), 5022);
    CUfileDescr_t descr;
    memset(&descr, 0, sizeof descr);
    descr.type = 1;
    descr.handle.fd = fd;
    CODE(p_cuFileHandleRegister(NULL, &descr), 5022);
    void *bad[] = {NULL, (void *)0x1234, (void *)3, (void *)d, calloc(1, 4096)};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        errno = 0;
        BYTES(p_cuFileRead(bad[i], (void *)d, 4096, 0, 0), -5027);
        check(errno == EINVAL, "errno %d", errno);
        BYTES(p_cuFileWrite(bad[i], (void *)d, 0, 0, 0), -5027);
        p_cuFileHandleDeregister(bad[i]);
    }
    /* the caller's number may be closed, or mean another file: the handle stays what it was */
    close(fd);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    check(dup2(open(other, O_RDWR), fd) == fd, "dup2");
    cu_set(d, 0xa5, 65536);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 512, 0), 4096);
    check(same(d, 65536, 0, 4096, 512, 1), "the file that was registered");
    CUfileHandle_t fresh = NULL;
    check(code_of_fd(&fresh, fd, 1) == 0, "the number stands for another file now");
    p_cuFileHandleDeregister(h);
    p_cuFileHandleDeregister(h);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), -5027);
    check(fcntl(fd, F_GETFD) >= 0, "the caller's descriptor stays open");
    lseek(fd, 7, SEEK_SET);
    BYTES(p_cuFileRead(fresh, (void *)d, 50, 0, 0), 50);
    check(lseek(fd, 0, SEEK_CUR) == 7, "the file position stays");
    unlink(other);
    BYTES(p_cuFileRead(fresh, (void *)d, 4096, 0, 0), 4096);
    if (ftruncate(fd, 100)) die("ftruncate");
    BYTES(p_cuFileRead(fresh, (void *)d, 4096, 0, 0), 100);
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
}

static void buffers(void) {
    const size_t M = 1 << 20;
    char *path = file_of("buffers", 4 * M, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    dptr d = device(4 * M), e = device(M);
    CODE(p_cuFileBufRegister((void *)d, 4 * M, 0), 0);
    CODE(p_cuFileBufRegister((void *)d, 4 * M, 0), 5023);
    CODE(p_cuFileBufRegister((void *)d, M, 0), 5023);
    CODE(p_cuFileBufRegister((void *)(d + M), M, 0), 0);
    BYTES(p_cuFileRead(h, (void *)d, M, 0, 4096), M);
    BYTES(p_cuFileRead(h, (void *)(d + M), 4096, 4096, 0), 4096);
    BYTES(p_cuFileRead(h, (void *)d, 4 * M, 0, 4096), -5017);
    BYTES(p_cuFileRead(h, (void *)d, SIZE_MAX, 0, 0), -5014);
    CODE(p_cuFileBufDeregister((void *)e), 5024);
    CODE(p_cuFileBufDeregister((void *)(d + 1)), 5024);
    CODE(p_cuFileBufDeregister(NULL), 5022);
    CODE(p_cuFileBufDeregister((void *)(d + M)), 0);
    CODE(p_cuFileBufDeregister((void *)d), 0);
    CODE(p_cuFileBufDeregister((void *)d), 5024);
    CODE(p_cuFileBufRegister((void *)(e + 1), 1000, 0), 0);
    BYTES(p_cuFileRead(h, (void *)(e + 1), 500, 3, 7), 500);
    check(same(e, M, 8, 500, 3, 1), "an odd buffer, and nothing beside it");
    CODE(p_cuFileBufRegister((void *)e, 0, 0), 5022);
    CODE(p_cuFileBufRegister((void *)e, 64 * M, 0), 5014);
    CODE(p_cuFileBufRegister((void *)e, SIZE_MAX, 0), 5014);
    CODE(p_cuFileBufRegister(NULL, M, 0), 5022);
    /* host memory, by whatever allocator */
    u8 *host = malloc(M), *pinned = aligned_alloc(4096, M), *expect = pattern(65536, 5, 1);
    CODE(p_cuFileBufRegister(host, M, 0), 0);
    BYTES(p_cuFileRead(h, host, 65536, 5, 3), 65536);
    check(!memcmp(host + 3, expect, 65536), "host memory");
    CODE(p_cuFileBufDeregister(host), 0);
    check(cu_register(pinned, M, 0) == 0, "pin");
    BYTES(p_cuFileRead(h, pinned, 65536, 5, 4096), 65536);
    check(!memcmp(pinned + 4096, expect, 65536), "pinned memory");
    BYTES(p_cuFileWrite(h, pinned, 4097, 65537, 4096 + 10), 4097);
    check(file_same(path, 65537, 4097, 15, 1), "written from pinned memory");
    cu_unregister(pinned);
    /* neither registered nor anybody's: an error of the system, no crash */
    errno = 0;
    BYTES(p_cuFileRead(h, (void *)0x10000, 4096, 0, 0), -1);
    check(errno == EFAULT, "errno %d", errno);
    BYTES(p_cuFileRead(h, NULL, 4096, 0, 0), -5022);
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
    cu_free(e);
}

/* every size, file offset and buffer offset; what lies beside stays as it is */
static void matrix(void) {
    static const size_t sizes[] = {0, 1, 511, 512, 4095, 4096, 4097, 65537, 131073, 1 << 20, (3 << 20) + 3};
    static const off_t files[] = {0, 1, 511, 4096, 1048577}, places[] = {0, 1, 4096};
    const size_t whole = 6 << 20, room = (3 << 20) + 3 + 16384;
    for (int way = 0; way < 4; way++) {
        int direct = way & 1 ? O_DIRECT : 0, registered = way & 2;
        char *path = file_of("matrix", whole, 1);
        int fd = open(path, O_RDWR | direct);
        if (fd < 0) continue;
        CUfileHandle_t h = NULL;
        check(code_of_fd(&h, fd, 1) == 0, "register");
        dptr d = device(room);
        if (registered) CODE(p_cuFileBufRegister((void *)d, room, 0), 0);
        u8 *shadow = pattern(whole, 0, 1), *now = malloc(whole);
        unsigned seed = 1;
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (size_t f = 0; f < 5; f++)
                for (size_t p = 0; p < 3; p++) {
                    size_t size = sizes[s], total = places[p] + size + 4096;
                    off_t at = files[f], to = places[p];
                    cu_set(d, 0xa5, total);
                    BYTES(p_cuFileRead(h, (void *)d, size, at, to), size);
                    u8 *got = malloc(total);
                    cu_d2h(got, d, total);
                    int ok = !memcmp(got + to, shadow + at, size);
                    for (size_t i = 0; ok && i < total; i++)
                        if ((off_t)i < to || i >= to + size) ok = got[i] == 0xa5;
                    check(ok, "read %zu bytes at %ld to %ld, way %d", size, (long)at, (long)to, way);
                    free(got);
                    u8 *bytes = pattern(size, at, ++seed);
                    if (size) cu_h2d(d + to, bytes, size);
                    BYTES(p_cuFileWrite(h, (void *)d, size, at, to), size);
                    memcpy(shadow + at, bytes, size);
                    free(bytes);
                }
        int plain = open(path, O_RDONLY);
        check(pread(plain, now, whole, 0) == (ssize_t)whole && !memcmp(now, shadow, whole), "way %d", way);
        struct stat stat;
        check(!fstat(plain, &stat) && stat.st_size == (off_t)whole, "size %ld", (long)stat.st_size);
        close(plain);
        p_cuFileHandleDeregister(h);
        close(fd);
        cu_free(d);
        free(shadow);
        free(now);
        CODE(p_cuFileDriverClose_v2(), 0);
    }
}

static void edges(void) {
    const size_t B = 65536;
    for (int way = 0; way < 4; way++) {
        int direct = way & 1 ? O_DIRECT : 0, registered = way & 2, outside = registered ? -5017 : -5014;
        char *path = file_of("edges", 10000, 1), *empty = file_of("empty", 0, 1), *big = file_of("big", 4 << 20, 1);
        int fd = open(path, O_RDWR | direct);
        if (fd < 0) continue;
        close(fd);
        CUfileHandle_t h = handle_of(path, O_RDWR | direct), z = handle_of(empty, O_RDWR | direct);
        CUfileHandle_t b = handle_of(big, O_RDWR | direct);
        dptr d = device(B);
        if (registered) CODE(p_cuFileBufRegister((void *)d, B, 0), 0);
        struct { size_t size; off_t at, to; ssize_t expect; } reads[] = {
            {4096, 8192, 0, 1808}, {65536, 0, 0, 10000}, {65535, 1, 1, 9999}, {2, 9999, 0, 1},
            {4096, 10000, 0, 0}, {4096, 12288, 0, 0}, {100, 20001, 3, 0}, {100, (off_t)1 << 40, 0, 0},
            {0, 5, 5, 0},
        };
        for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
            cu_set(d, 0xa5, B);
            BYTES(p_cuFileRead(h, (void *)d, reads[i].size, reads[i].at, reads[i].to), reads[i].expect);
            check(same(d, B, reads[i].to, reads[i].expect, reads[i].at, 1), "edge %zu, way %d", i, way);
        }
        BYTES(p_cuFileRead(z, (void *)d, 4096, 0, 0), 0);
        BYTES(p_cuFileRead(h, (void *)d, 4096, -1, 0), -5022);
        BYTES(p_cuFileRead(h, (void *)d, 4096, -4096, 0), -5022);
        BYTES(p_cuFileRead(h, (void *)d, 4096, 0, -1), -5022);
        BYTES(p_cuFileRead(h, (void *)d, 4096, 0x7ffffffffffff000, 0), -5022);
        BYTES(p_cuFileRead(b, (void *)d, B + 1, 0, 0), outside);
        BYTES(p_cuFileRead(b, (void *)d, B, 0, 1), outside);
        BYTES(p_cuFileRead(b, (void *)d, 4 << 20, 0, 0), outside);
        BYTES(p_cuFileRead(b, (void *)d, 4096, 0, 1 << 30), outside);
        BYTES(p_cuFileRead(h, (void *)d, SIZE_MAX, 0, 0), -5014);
        BYTES(p_cuFileRead(h, (void *)d, (size_t)1 << 62, 0, 0), outside);
        BYTES(p_cuFileWrite(h, NULL, 4096, 0, 0), -5022);
        BYTES(p_cuFileWrite(h, (void *)d, 4096, -1, 0), -5022);
        BYTES(p_cuFileWrite(b, (void *)d, B + 1, 0, 0), outside);
        BYTES(p_cuFileWrite(h, (void *)d, 4096, 0, -1), -5022);
        /* growing, with holes */
        struct { size_t size, n; off_t at, from; } writes[] = {
            {4096, 4096, 4096, 0}, {10000, 5000, 9000, 3}, {0, 1, 0, 0}, {4096, 4096, 65536, 4096},
            {100, 777, 70001, 5}, {4096, 0, 65536, 0},
        };
        for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
            char *grown = file_of("grown", writes[i].size, 1);
            u8 *bytes = pattern(B, 0, 7);
            cu_h2d(d, bytes, B);
            free(bytes);
            CUfileHandle_t w = handle_of(grown, O_RDWR | direct);
            BYTES(p_cuFileWrite(w, (void *)d, writes[i].n, writes[i].at, writes[i].from), writes[i].n);
            struct stat stat;
            size_t end = writes[i].n ? writes[i].at + writes[i].n : 0;
            size_t expect = end > writes[i].size ? end : writes[i].size;
            size_t old = (size_t)writes[i].at < writes[i].size ? (size_t)writes[i].at : writes[i].size;
            check(!lstat(grown, &stat) && stat.st_size == (off_t)expect, "size %ld", (long)stat.st_size);
            check(file_same(grown, writes[i].at, writes[i].n, writes[i].from, 7), "written %zu", i);
            check(file_same(grown, 0, old, 0, 1), "kept %zu", i);
            p_cuFileHandleDeregister(w);
        }
        CUfileHandle_t ro = handle_of(path, O_RDONLY | direct), wo = handle_of(path, O_WRONLY | direct);
        BYTES(p_cuFileWrite(ro, (void *)d, 4096, 0, 0), -5019);
        BYTES(p_cuFileWrite(ro, (void *)d, 0, 0, 0), -5019);
        BYTES(p_cuFileRead(wo, (void *)d, 0, 0, 0), -5019);
        BYTES(p_cuFileWrite(wo, (void *)d, 100, 1, 0), 100);
        /* a full file takes what it can, then says why it takes no more */
        struct rlimit old, low;
        getrlimit(RLIMIT_FSIZE, &old);
        low = old;
        low.rlim_cur = 32768;
        signal(SIGXFSZ, SIG_IGN);
        CUfileHandle_t lim = handle_of(file_of("limit", 4096, 1), O_RDWR | direct);
        setrlimit(RLIMIT_FSIZE, &low);
        BYTES(p_cuFileWrite(lim, (void *)d, B, 0, 0), 32768);
        errno = 0;
        BYTES(p_cuFileWrite(lim, (void *)d, 4096, 40960, 0), -1);
        check(errno == EFBIG, "errno %d", errno);
        setrlimit(RLIMIT_FSIZE, &old);
        cu_free(d);
        CODE(p_cuFileDriverClose_v2(), 0);
    }
}

static void vectors(void) {
    char *path = file_of("vectors", 1 << 20, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    dptr d = device(65536);
    CUfileIOVec_t iov[3] = {{(void *)d, 1000}, {(void *)(d + 2000), 3000}, {(void *)(d + 9000), 5}};
    BYTES(p_cuFileReadv(h, iov, 3, 77, 0), 4005);
    u8 got[65536];
    cu_d2h(got, d, sizeof got);
    u8 *bytes = pattern(4005, 77, 1);
    check(!memcmp(got, bytes, 1000) && !memcmp(got + 2000, bytes + 1000, 3000) &&
              !memcmp(got + 9000, bytes + 4000, 5) && got[1000] == 0xa5, "vector data");
    BYTES(p_cuFileWritev(h, iov, 3, 500000, 0), 4005);
    check(file_same(path, 500000, 4005, 77, 1), "vector written");
    BYTES(p_cuFileReadv(h, iov, 3, (1 << 20) - 1500, 0), 1500);
    BYTES(p_cuFileReadv(h, iov, 0, 0, 0), 0);
    BYTES(p_cuFileReadv(h, NULL, 2, 0, 0), -5022);
    BYTES(p_cuFileReadv(h, iov, 3, 0, 1), -5022);
    BYTES(p_cuFileReadv(h, iov, SIZE_MAX, 0, 0), -5022);
    BYTES(p_cuFileReadv(h, iov, 3, -1, 0), -5022);
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
}

/* ---- batches ---- */
enum { UNIT = 65536 };
static CUfileIOParams_t entry(CUfileHandle_t h, dptr d, size_t size, off_t at, off_t to, int op, size_t cookie) {
    CUfileIOParams_t p;
    memset(&p, 0, sizeof p);
    p.mode = CUFILE_BATCH;
    p.fh = h;
    p.u.batch.devPtr_base = (void *)d;
    p.u.batch.size = size;
    p.u.batch.file_offset = at;
    p.u.batch.devPtr_offset = to;
    p.opcode = op;
    p.cookie = (void *)cookie;
    return p;
}
/* takes events until `want` have come; each cookie (1..want) once, with status and ret */
static int drain(CUfileBatchHandle_t batch, unsigned want, int status, ssize_t ret) {
    u8 *seen = calloc(want + 2, 1);
    unsigned got = 0, ok = 1;
    for (int turns = 0; got < want && turns < 1000 && ok; turns++) {
        CUfileIOEvents_t events[32];
        unsigned count = 32;
        struct timespec soon = {0, 100000000};
        if (p_cuFileBatchIOGetStatus(batch, 1, &count, events, &soon).err) { ok = 0; break; }
        for (unsigned i = 0; i < count; i++, got++) {
            size_t cookie = (size_t)events[i].cookie;
            if (cookie < 1 || cookie > want || seen[cookie]++) { ok = 0; printf("FAIL %s: cookie %zu\n", group, cookie); }
            else if (events[i].status != status || (ret >= 0 && events[i].ret != (size_t)ret)) {
                ok = 0;
                printf("FAIL %s: cookie %zu status %d ret %zd\n", group, cookie, events[i].status, (ssize_t)events[i].ret);
            }
        }
    }
    free(seen);
    return ok && got == want;
}
static void batches(void) {
    enum { N = 128 };
    char *path = file_of("batch", 2 * N * UNIT, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR), ro = handle_of(path, O_RDONLY);
    dptr d = device(N * UNIT);
    CUfileBatchHandle_t q = NULL;
    CODE(p_cuFileBatchIOSetUp(&q, 0), 5022);
    CODE(p_cuFileBatchIOSetUp(&q, 129), 5022);
    CODE(p_cuFileBatchIOSetUp(&q, ~0u), 5022);
    CODE(p_cuFileBatchIOSetUp(NULL, 8), 5022);
    CODE(p_cuFileBatchIOSetUp(&q, N), 0);
    CUfileIOParams_t io[N];
    CUfileIOEvents_t events[N];
    unsigned count = 8;
    struct timespec none = {0, 0}, bad = {0, 2000000000};
    CODE(p_cuFileBatchIOGetStatus(q, 0, &count, events, &none), 0);
    check(count == 0, "nothing submitted");
    count = 8;
    CODE(p_cuFileBatchIOGetStatus(q, 1, &count, events, NULL), 0);
    check(count == 0, "nothing to wait for");
    for (int n = 1; n <= N; n = n == 1 ? 16 : n * 2) {
        cu_set(d, 0xa5, N * UNIT);
        for (int i = 0; i < n; i++) io[i] = entry(h, d, UNIT, i * UNIT, i * UNIT, CUFILE_READ, i + 1);
        CODE(p_cuFileBatchIOSubmit(q, n, io, 0), 0);
        check(drain(q, n, CUFILE_COMPLETE, UNIT), "%d reads", n);
        check(same(d, N * UNIT, 0, (size_t)n * UNIT, 0, 1), "data of %d reads", n);
    }
    /* reads and writes mixed, odd sizes and offsets */
    u8 *bytes = pattern(N / 2 * UNIT, 0, 9);
    cu_h2d(d + N / 2 * UNIT, bytes, N / 2 * UNIT);
    for (int i = 0; i < N / 2; i++) {
        io[2 * i] = entry(h, d, 777, 13 + i * UNIT, 5 + i * UNIT, CUFILE_READ, 2 * i + 1);
        io[2 * i + 1] = entry(h, d, 777, (off_t)(N + i) * UNIT + 3, (N / 2 + i) * UNIT + 1, CUFILE_WRITE, 2 * i + 2);
    }
    CODE(p_cuFileBatchIOSubmit(q, N, io, 0), 0);
    check(drain(q, N, CUFILE_COMPLETE, 777), "mixed");
    int ok = 1;
    for (int i = 0; i < N / 2; i++) ok &= file_same(path, (off_t)(N + i) * UNIT + 3, 777, i * UNIT + 1, 9);
    check(ok, "what the batch wrote");
    /* the end of the file, and beyond */
    io[0] = entry(h, d, 4096, 2 * N * UNIT - 100, 0, CUFILE_READ, 1);
    CODE(p_cuFileBatchIOSubmit(q, 1, io, 0), 0);
    check(drain(q, 1, CUFILE_COMPLETE, 100), "crossing the end");
    io[0] = entry(h, d, 4096, 3 * N * UNIT, 0, CUFILE_READ, 1);
    io[1] = entry(h, d, 0, 0, 0, CUFILE_READ, 2);
    CODE(p_cuFileBatchIOSubmit(q, 2, io, 0), 0);
    check(drain(q, 2, CUFILE_COMPLETE, 0), "beyond the end, and nothing");
    /* a bad entry: nothing starts, nothing is reported */
    struct { const char *what; int code; CUfileIOParams_t p; } wrong[] = {
        {"file offset", 5022, entry(h, d, UNIT, -1, 0, 0, 1)}, {"offset", 5022, entry(h, d, UNIT, 0, -1, 0, 1)},
        {"handle", 5027, entry(NULL, d, UNIT, 0, 0, 0, 1)}, {"handle", 5027, entry((void *)0x1234, d, UNIT, 0, 0, 0, 1)},
        {"buffer", 5022, entry(h, 0, UNIT, 0, 0, 0, 1)}, {"opcode", 5022, entry(h, d, UNIT, 0, 0, 7, 1)},
        {"mode", 5022, entry(h, d, UNIT, 0, 0, 0, 1)}, {"size", 5014, entry(h, d, N * UNIT + 1, 0, 0, 0, 1)},
        {"read-only", 5019, entry(ro, d, UNIT, 0, 0, 1, 1)},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        if (!strcmp(wrong[i].what, "mode")) wrong[i].p.mode = 0;
        for (int k = 0; k < 5; k++) io[k] = k == 2 ? wrong[i].p : entry(h, d, UNIT, 0, 0, 0, k + 1);
        int code = p_cuFileBatchIOSubmit(q, 5, io, 0).err;
        check(code == wrong[i].code, "bad %s: %d", wrong[i].what, code);
        count = 8;
        CODE(p_cuFileBatchIOGetStatus(q, 0, &count, events, &none), 0);
        check(count == 0, "bad %s: %u events", wrong[i].what, count);
    }
    CODE(p_cuFileBatchIOSubmit(q, 0, io, 0), 5022);
    CODE(p_cuFileBatchIOSubmit(q, 4, NULL, 0), 5022);
    CODE(p_cuFileBatchIOSubmit(NULL, 1, io, 0), 5022);
    CODE(p_cuFileBatchIOSubmit((void *)0x1234, 1, io, 0), 5022);
    CODE(p_cuFileBatchIOGetStatus(q, 0, NULL, events, &none), 5022);
    count = 8;
    CODE(p_cuFileBatchIOGetStatus(q, 0, &count, NULL, &none), 5022);
    CODE(p_cuFileBatchIOGetStatus(NULL, 0, &count, events, &none), 5022);
    CODE(p_cuFileBatchIOGetStatus(q, 9, &count, events, &none), 5022);
    CODE(p_cuFileBatchIOGetStatus(q, 0, &count, events, &bad), 5022);
    count = 0;
    CODE(p_cuFileBatchIOGetStatus(q, 0, &count, events, &none), 5022);
    CODE(p_cuFileBatchIOCancel(NULL), 5022);
    CODE(p_cuFileBatchIOCancel(q), 0);
    p_cuFileBatchIODestroy(q);
    p_cuFileBatchIODestroy(q);
    p_cuFileBatchIODestroy(NULL);
    CODE(p_cuFileBatchIOCancel(q), 5022);
    /* capacity counts what was not reported yet */
    CODE(p_cuFileBatchIOSetUp(&q, 4), 0);
    for (int i = 0; i < 5; i++) io[i] = entry(h, d, UNIT, 0, i * UNIT, 0, i + 1);
    CODE(p_cuFileBatchIOSubmit(q, 5, io, 0), 5037);
    CODE(p_cuFileBatchIOSubmit(q, 4, io, 0), 0);
    CODE(p_cuFileBatchIOSubmit(q, 1, io, 0), 5037);
    check(drain(q, 4, CUFILE_COMPLETE, UNIT), "four");
    for (int turn = 0; turn < 3; turn++) {
        CODE(p_cuFileBatchIOSubmit(q, 4, io, 0), 0);
        count = 4;
        CODE(p_cuFileBatchIOGetStatus(q, 4, &count, events, NULL), 0);
        check(count == 4, "all at once: %u", count);
    }
    p_cuFileBatchIODestroy(q);
    /* cancelled: nothing of it is reported, and there is room for as much again */
    CODE(p_cuFileBatchIOSetUp(&q, N), 0);
    for (int i = 0; i < N; i++) io[i] = entry(h, d, UNIT, i * UNIT, i * UNIT, 0, i + 1);
    for (int turn = 0; turn < 3; turn++) {
        CODE(p_cuFileBatchIOSubmit(q, N, io, 0), 0);
        CODE(p_cuFileBatchIOCancel(q), 0);
        count = N;
        CODE(p_cuFileBatchIOGetStatus(q, N, &count, events, NULL), 0);
        check(count == 0, "cancelled, and %u events", count);
    }
    CODE(p_cuFileBatchIOSubmit(q, 8, io, 0), 0);
    check(drain(q, 8, CUFILE_COMPLETE, UNIT), "after a cancel");
    CODE(p_cuFileBatchIOSubmit(q, N, io, 0), 0);
    p_cuFileBatchIODestroy(q); /* with work under way */
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
}

/* 10,000 entries at once, over however small a pool */
static void crowd(void) {
    enum { BATCHES = 80, EACH = 125, SIZE = 4096 };
    char *path = file_of("crowd", BATCHES * SIZE, 1);
    CUfileHandle_t h = handle_of(path, O_RDONLY);
    dptr d = device((size_t)BATCHES * EACH * SIZE);
    static CUfileBatchHandle_t q[BATCHES];
    static CUfileIOParams_t io[EACH];
    for (int b = 0; b < BATCHES; b++) {
        CODE(p_cuFileBatchIOSetUp(&q[b], EACH), 0);
        for (int i = 0; i < EACH; i++)
            io[i] = entry(h, d, SIZE, b * SIZE, ((off_t)b * EACH + i) * SIZE, CUFILE_READ, i + 1);
        CODE(p_cuFileBatchIOSubmit(q[b], EACH, io, 0), 0);
    }
    for (int b = 0; b < BATCHES; b++) {
        check(drain(q[b], EACH, CUFILE_COMPLETE, SIZE), "batch %d", b);
        p_cuFileBatchIODestroy(q[b]);
    }
    u8 *bytes = malloc((size_t)BATCHES * EACH * SIZE);
    cu_d2h(bytes, d, (size_t)BATCHES * EACH * SIZE);
    int ok = 1;
    for (size_t i = 0; i < (size_t)BATCHES * EACH * SIZE; i += 97)
        ok &= bytes[i] == byte_at(i / SIZE / EACH * SIZE + i % SIZE, 1);
    check(ok, "data of 10,000 entries");
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
}

/* ---- streams ---- */
typedef struct { size_t size; off_t file, place; ssize_t moved; } late_t;
static void streams(void) {
    const size_t B = 4 << 20;
    char *path = file_of("streams", B, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR), ro = handle_of(path, O_RDONLY), wo = handle_of(path, O_WRONLY);
    dptr d = device(B);
    CUstream s, t;
    if (cu_stream(&s, 1) || cu_stream(&t, 1)) die("streams");
    struct { size_t size; off_t at, to; ssize_t expect; } cases[] = {
        {1 << 20, 0, 0, 1 << 20}, {4097, 13, 5, 4097}, {8192, (4 << 20) - 4096, 0, 4096}, {4096, 4 << 20, 0, 0},
        {0, 0, 0, 0}, {4 << 20, 0, 0, 4 << 20}, {4096, -1, 0, -5022}, {4096, 0, -1, -5022}, {B + 1, 0, 0, -5014},
    };
    CUstream used[] = {s, NULL, (CUstream)1, (CUstream)2};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        late_t a = {cases[i].size, cases[i].at, cases[i].to, -999};
        CUstream in = used[i % 4];
        cu_set(d, 0xa5, B);
        CODE(p_cuFileReadAsync(h, (void *)d, &a.size, &a.file, &a.place, &a.moved, in), 0);
        check(cu_sync(in) == 0, "sync");
        check(a.moved == cases[i].expect, "case %zu: %zd, not %zd", i, a.moved, cases[i].expect);
        if (a.moved >= 0) check(same(d, B, a.place, a.moved, a.file, 1), "data of case %zu", i);
    }
    late_t a = {4096, 0, 0, -999};
    CODE(p_cuFileReadAsync(NULL, (void *)d, &a.size, &a.file, &a.place, &a.moved, s), 5027);
    CODE(p_cuFileReadAsync(h, NULL, &a.size, &a.file, &a.place, &a.moved, s), 5022);
    CODE(p_cuFileReadAsync(wo, (void *)d, &a.size, &a.file, &a.place, &a.moved, s), 5019);
    CODE(p_cuFileWriteAsync(ro, (void *)d, &a.size, &a.file, &a.place, &a.moved, s), 5019);
    CODE(p_cuFileReadAsync(h, (void *)d, NULL, &a.file, &a.place, &a.moved, s), 5022);
    CODE(p_cuFileReadAsync(h, (void *)d, &a.size, NULL, &a.place, &a.moved, s), 5022);
    CODE(p_cuFileReadAsync(h, (void *)d, &a.size, &a.file, NULL, &a.moved, s), 5022);
    CODE(p_cuFileReadAsync(h, (void *)d, &a.size, &a.file, &a.place, NULL, s), 5022);
    check(cu_sync(s) == 0, "the stream works after refusals");
    /* write, then read back behind it: in order, a hundred times over two streams */
    static late_t w[200], r[200];
    for (int i = 0; i < 200; i++) {
        w[i] = (late_t){5000, i * 7001, (i % 9) * 131, -999};
        r[i] = (late_t){5000, i * 7001, (1 << 20) + i * 5003, -999};
        CUstream in = i & 1 ? s : t;
        CODE(p_cuFileWriteAsync(h, (void *)d, &w[i].size, &w[i].file, &w[i].place, &w[i].moved, in), 0);
        CODE(p_cuFileReadAsync(h, (void *)d, &r[i].size, &r[i].file, &r[i].place, &r[i].moved, in), 0);
    }
    check(cu_sync(s) == 0 && cu_sync(t) == 0, "both streams");
    u8 *bytes = malloc(B);
    cu_d2h(bytes, d, B);
    int ok = 1;
    for (int i = 0; i < 200; i++)
        ok &= w[i].moved == 5000 && r[i].moved == 5000 && !memcmp(bytes + w[i].place, bytes + r[i].place, 5000);
    check(ok, "written and read back in order");
    free(bytes);
    file_of("streams", B, 1);
    /* flags: what is fixed is taken at the call, the rest when the stream comes to it */
    u8 *word = aligned_alloc(4096, 4096);
    memset(word, 0, 4096);
    dptr gate = 0;
    if (cu_register(word, 4096, 3) || cu_map(&gate, word, 0)) die("a word for the stream");
    for (unsigned flags = 0; flags < 8; flags++) {
        CODE(p_cuFileStreamRegister(s, flags), 0);
        __atomic_store_n((unsigned *)word, 0, __ATOMIC_SEQ_CST);
        cu_set(d, 0xa5, B);
        check(cu_wait(s, gate, 1, 1) == 0, "hold the stream");
        late_t l = {4096, 0, 0, -999};
        CODE(p_cuFileReadAsync(h, (void *)d, &l.size, &l.file, &l.place, &l.moved, s), 0);
        /* another stream is not held up by it */
        late_t o = {4096, 0, 65536, -999};
        CODE(p_cuFileReadAsync(h, (void *)(d + (2 << 20)), &o.size, &o.file, &o.place, &o.moved, t), 0);
        check(cu_sync(t) == 0 && o.moved == 4096, "the other stream goes on");
        l.size = 8192;
        l.file = 4096;
        l.place = 16384;
        __atomic_store_n((unsigned *)word, 1, __ATOMIC_SEQ_CST);
        check(cu_sync(s) == 0, "sync");
        size_t size = flags & 4 ? 4096 : 8192;
        off_t file = flags & 2 ? 0 : 4096, place = flags & 1 ? 0 : 16384;
        check(l.moved == (ssize_t)size, "flags %u: %zd", flags, l.moved);
        check(same(d, 1 << 20, place, size, file, 1), "flags %u: data", flags);
        CODE(p_cuFileStreamDeregister(s), 0);
    }
    CODE(p_cuFileStreamDeregister(s), 5022);
    CODE(p_cuFileStreamRegister(s, 16), 5022);
    CODE(p_cuFileStreamRegister(s, 0), 0);
    CODE(p_cuFileStreamRegister(s, 7), 5022);
    CODE(p_cuFileStreamDeregister(s), 0);
    /* another stream with the handle of one that was registered and used, and is gone, was not registered */
    CUstream gone, next;
    check(cu_stream(&gone, 1) == 0, "a stream");
    CODE(p_cuFileStreamRegister(gone, 7), 0);
    late_t first = {4096, 0, 0, -999};
    CODE(p_cuFileReadAsync(h, (void *)d, &first.size, &first.file, &first.place, &first.moved, gone), 0);
    check(cu_sync(gone) == 0 && first.moved == 4096, "a read in it");
    check(cu_destroy(gone) == 0 && cu_stream(&next, 1) == 0, "another stream");
    check(next == gone || !test_counter, "the test driver gives the handle out again");
    if (next == gone && stream_ids) {
        __atomic_store_n((unsigned *)word, 0, __ATOMIC_SEQ_CST);
        check(cu_wait(next, gate, 1, 1) == 0, "hold the stream");
        late_t l = {4096, 0, 0, -999};
        CODE(p_cuFileReadAsync(h, (void *)d, &l.size, &l.file, &l.place, &l.moved, next), 0);
        l.size = 8192;
        __atomic_store_n((unsigned *)word, 1, __ATOMIC_SEQ_CST);
        check(cu_sync(next) == 0 && l.moved == 8192, "flags of another stream: %zd", l.moved);
        CODE(p_cuFileStreamDeregister(next), 5022);
        /* and can be registered, also where nothing was read in the one before */
        CODE(p_cuFileStreamRegister(next, 1), 0);
        check(cu_destroy(next) == 0 && cu_stream(&next, 1) == 0, "a third stream");
        if (next == gone) CODE(p_cuFileStreamRegister(next, 2), 0);
        CODE(p_cuFileStreamRegister(next, 4), next == gone ? 5022 : 0);
        CODE(p_cuFileStreamDeregister(next), 0);
    }
    check(cu_destroy(next) == 0, "destroy");
    /* a captured stream: refused, and the capture is not spoilt; nor is it by what is done meanwhile elsewhere, and by
       registering the stream itself. The driver's own answers say whether a call was one that captures do not allow. */
    CUstream apart;
    check(cu_stream(&apart, 1) == 0, "a stream");
    for (int mode = 0; cu_begin && cu_end && mode < 3; mode++) {
        void *graph = NULL;
        late_t there = {4096, 0, 0, -999};
        int64_t refused = test_counter ? test_counter("refused") : 0;
        check(cu_begin(s, mode) == 0, "capture mode %d", mode);
        CODE(p_cuFileReadAsync(h, (void *)d, &a.size, &a.file, &a.place, &a.moved, s), 5038);
        CODE(p_cuFileWriteAsync(h, (void *)d, &a.size, &a.file, &a.place, &a.moved, s), 5038);
        BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
        BYTES(p_cuFileRead(h, (void *)d, 1 << 20, 0, 0), 1 << 20);
        CODE(p_cuFileReadAsync(h, (void *)d, &there.size, &there.file, &there.place, &there.moved, apart), 0);
        CODE(p_cuFileStreamRegister(s, 7), 0);
        CODE(p_cuFileReadAsync(h, (void *)d, &a.size, &a.file, &a.place, &a.moved, s), 5038);
        CODE(p_cuFileStreamDeregister(s), 0);
        check(cu_end(s, &graph) == 0 && graph, "end of capture, mode %d", mode);
        check(!test_counter || test_counter("refused") == refused, "refused calls, mode %d", mode);
        check(cu_sync(apart) == 0 && there.moved == 4096, "a read elsewhere, mode %d: %zd", mode, there.moved);
    }
    check(cu_destroy(apart) == 0, "destroy");
    /* what is not in the page cache, at places that agree with nothing */
    int fd = open(path, O_RDONLY);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    late_t c[] = {{1 << 20, 13, 5, -999}, {300000, 2 << 20, 2 << 20, -999}, {5000, (3 << 20) + 4096, 3 << 20, -999}};
    cu_set(d, 0xa5, B);
    for (int i = 0; i < 3; i++) CODE(p_cuFileReadAsync(h, (void *)d, &c[i].size, &c[i].file, &c[i].place, &c[i].moved, s), 0);
    check(cu_sync(s) == 0, "sync");
    bytes = malloc(B);
    cu_d2h(bytes, d, B);
    for (int i = 0; i < 3; i++) {
        int right = c[i].moved == (ssize_t)c[i].size;
        for (size_t k = 0; right && k < c[i].size; k++) right = bytes[c[i].place + k] == byte_at(c[i].file + k, 1);
        check(right, "cold %d: %zd of %zu", i, c[i].moved, c[i].size);
    }
    free(bytes);
    /* a file that takes no more, in the middle of a request */
    char *full = file_of("streams-full", 0, 1);
    CUfileHandle_t f = handle_of(full, O_RDWR);
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 1000000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    late_t over[] = {{B, 0, 0, -999}, {B, 1000000, 0, -999}};
    for (int i = 0; i < 2; i++) CODE(p_cuFileWriteAsync(f, (void *)d, &over[i].size, &over[i].file, &over[i].place, &over[i].moved, s), 0);
    check(cu_sync(s) == 0, "sync");
    setrlimit(RLIMIT_FSIZE, &before);
    check(over[0].moved == 1000000 && over[1].moved == -EFBIG, "beyond the limit: %zd and %zd", over[0].moved, over[1].moved);
    /* closed while a request waits for its stream */
    late_t left = {4096, 0, 0, -999};
    __atomic_store_n((unsigned *)word, 0, __ATOMIC_SEQ_CST);
    check(cu_wait(s, gate, 1, 1) == 0, "hold the stream");
    CODE(p_cuFileReadAsync(h, (void *)d, &left.size, &left.file, &left.place, &left.moved, s), 0);
    CODE(p_cuFileDriverClose_v2(), 0);
    __atomic_store_n((unsigned *)word, 1, __ATOMIC_SEQ_CST);
    check(cu_sync(s) == 0 && left.moved == -5027, "closed meanwhile: %zd", left.moved);
    cu_unregister(word);
    cu_free(d);
}

/* requests in many streams of every priority and in the default ones, between copies of the caller's, each stream
 * waiting for the next one's; some larger than the pinned memory of a request. Also where all streams share one hardware
 * queue (CUDA_DEVICE_MAX_CONNECTIONS=1), and where there is less pinned memory than requests want
 * (BEELINE_POOL_BYTES) */
static void connections(void) {
    enum { MADE = 40, STREAMS = MADE + 3, BEFORE = 24, ROUNDS = 4, B = 1 << 20, COPY = 64 << 10, SMALL = 5000 };
    enum { BIGS = 3, BIG = (9 << 20) + 77, ROOM = BIG + 4096 };
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*make)(CUstream *, unsigned, int), (*range)(int *, int *);
    int (*in)(dptr, const void *, size_t, CUstream), (*out)(void *, dptr, size_t, CUstream);
    int (*event)(void **, unsigned), (*record)(void *, CUstream), (*after)(CUstream, void *, unsigned);
    *(void **)&make = dlsym(cuda, "cuStreamCreateWithPriority");
    *(void **)&range = dlsym(cuda, "cuCtxGetStreamPriorityRange");
    *(void **)&in = symbol(cuda, "cuMemcpyHtoDAsync_v2");
    *(void **)&out = symbol(cuda, "cuMemcpyDtoHAsync_v2");
    *(void **)&event = symbol(cuda, "cuEventCreate");
    *(void **)&record = symbol(cuda, "cuEventRecord");
    *(void **)&after = symbol(cuda, "cuStreamWaitEvent");
    char *path = file_of("connections", B + STREAMS * COPY, 1), *large = file_of("connections-large", 2 * BIGS * ROOM, 2);
    CUfileHandle_t h = handle_of(path, O_RDWR), hl = handle_of(large, O_RDWR);
    dptr d = device((size_t)STREAMS * (B + COPY)), dl = device(2 * ROOM * BIGS);
    CUstream s[STREAMS], before;
    int least = 0, greatest = 0;
    if (range) range(&least, &greatest);
    for (int i = 0; i < BEFORE; i++)
        if (cu_stream(&before, 1)) die("a stream");
    for (int i = 0; i < MADE; i++) {
        int priority = i % 3 == 0 ? greatest : i % 3 == 1 ? least : 0;
        if (make ? make(&s[i], 1, priority) : cu_stream(&s[i], 1)) die("a stream");
    }
    s[MADE] = NULL, s[MADE + 1] = (CUstream)1, s[MADE + 2] = (CUstream)2;
    void *e[STREAMS];
    for (int i = 0; i < STREAMS; i++)
        if (event(&e[i], 2)) die("an event");
    u8 *from = aligned_alloc(4096, STREAMS * COPY), *to = aligned_alloc(4096, STREAMS * B), *want = pattern(B, 0, 1);
    u8 *wanted = pattern(BIGS * ROOM, 0, 2), *got = malloc(ROOM);
    if (cu_register(from, STREAMS * COPY, 3) || cu_register(to, STREAMS * B, 3)) die("pinned memory");
    static late_t r[STREAMS], w[STREAMS], few[STREAMS], rl[BIGS], wl[BIGS];
    int rounds = getenv("CONFORMANCE_AT_CALL") ? 1 : ROUNDS;
    for (int round = 0; round < rounds; round++) {
        memset(from, round + 1, STREAMS * COPY);
        memset(to, 0, STREAMS * B);
        for (int i = 0; i < STREAMS; i++) {
            dptr own = d + (dptr)i * (B + COPY);
            r[i] = (late_t){B, 0, 0, -999};
            check(in(own + B, from + i * COPY, COPY, s[i]) == 0, "copy in");
            CODE(p_cuFileReadAsync(h, (void *)own, &r[i].size, &r[i].file, &r[i].place, &r[i].moved, s[i]), 0);
            if (i % 15 == 7) {
                /* at addresses and places in the file that agree with nothing */
                int k = i / 15;
                rl[k] = (late_t){BIG, k * ROOM + round, k * ROOM + 3 * round, -999};
                wl[k] = (late_t){BIG, (BIGS + k) * ROOM + 5 * round, k * ROOM + 3 * round, -999};
                CODE(p_cuFileReadAsync(hl, (void *)dl, &rl[k].size, &rl[k].file, &rl[k].place, &rl[k].moved, s[i]), 0);
                CODE(p_cuFileWriteAsync(hl, (void *)dl, &wl[k].size, &wl[k].file, &wl[k].place, &wl[k].moved, s[i]), 0);
            }
            check(record(e[i], s[i]) == 0, "record");
        }
        for (int i = 0; i < STREAMS; i++) {
            dptr own = d + (dptr)i * (B + COPY);
            w[i] = (late_t){round % 2 ? COPY : SMALL, B + i * COPY, B, -999};
            few[i] = (late_t){SMALL, 17, 17, -999};
            check(after(s[i], e[(i + 1) % STREAMS], 0) == 0, "wait for the next stream");
            CODE(p_cuFileReadAsync(h, (void *)own, &few[i].size, &few[i].file, &few[i].place, &few[i].moved, s[i]), 0);
            check(out(to + i * B, own, B, s[i]) == 0, "copy out");
            CODE(p_cuFileWriteAsync(h, (void *)own, &w[i].size, &w[i].file, &w[i].place, &w[i].moved, s[i]), 0);
        }
        for (int i = 0; i < STREAMS; i++) check(cu_sync(s[i]) == 0, "sync");
        int fd = open(path, O_RDONLY), bad = 0;
        u8 *file = malloc(COPY);
        for (int i = 0; i < STREAMS; i++) {
            check(r[i].moved == B && few[i].moved == SMALL && w[i].moved == (ssize_t)w[i].size,
                  "stream %d: read %zd and %zd, written %zd", i, r[i].moved, few[i].moved, w[i].moved);
            bad += memcmp(to + i * B, want, B) != 0;
            bad += pread(fd, file, COPY, B + i * COPY) != COPY || memcmp(file, from + i * COPY, w[i].size);
        }
        check(!bad, "round %d: %d differ", round, bad);
        free(file);
        close(fd);
        for (int k = 0; k < BIGS; k++) {
            check(rl[k].moved == BIG && wl[k].moved == BIG, "large %d: read %zd, written %zd", k, rl[k].moved, wl[k].moved);
            check(!cu_d2h(got, dl + rl[k].place, BIG) && !memcmp(got, wanted + rl[k].file, BIG), "round %d: large %d", round, k);
            check(file_same(large, wl[k].file, BIG, rl[k].file, 2), "round %d: written large %d", round, k);
        }
    }
    /* sizes that are not known at the call: longer, shorter, beyond the end of the file */
    u8 *word = aligned_alloc(4096, 4096);
    dptr gate = 0;
    memset(word, 0, 4096);
    if (cu_register(word, 4096, 3) || cu_map(&gate, word, 0)) die("a word for the stream");
    const size_t sizes[] = {BIG, 1, 0, 3 << 20, 6 * ROOM + 5, 100000};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (getenv("CONFORMANCE_AT_CALL")) break;
        late_t l = {i % 2 ? BIG : 10, 0, 0, -999}, v = l;
        off_t end = 2 * BIGS * ROOM;
        __atomic_store_n((unsigned *)word, 0, __ATOMIC_SEQ_CST);
        check(cu_wait(s[1], gate, 1, 1) == 0, "hold the stream");
        CODE(p_cuFileReadAsync(hl, (void *)dl, &l.size, &l.file, &l.place, &l.moved, s[1]), 0);
        CODE(p_cuFileWriteAsync(hl, (void *)dl, &v.size, &v.file, &v.place, &v.moved, s[1]), 0);
        l = (late_t){sizes[i], sizes[i] > (size_t)end ? BIG : 4099, 11, -999};
        if (sizes[i] > (size_t)end) l.size = 2 * ROOM * BIGS - 11;
        v = (late_t){sizes[i] > BIG ? BIG : sizes[i], l.file, l.place, -999};
        __atomic_store_n((unsigned *)word, 1, __ATOMIC_SEQ_CST);
        check(cu_sync(s[1]) == 0, "sync");
        ssize_t expect = l.file + (off_t)l.size > end ? end - l.file : (ssize_t)l.size;
        check(l.moved == expect && v.moved == (ssize_t)v.size, "late size %zu: %zd and %zd, not %zd and %zu", l.size, l.moved, v.moved, expect, v.size);
        u8 *read = malloc(expect + 1), *device_bytes = malloc(expect + 1);
        int fd = open(large, O_RDONLY);
        check(!expect || (pread(fd, read, expect, l.file) == expect && !cu_d2h(device_bytes, dl + l.place, expect) &&
                              !memcmp(read, device_bytes, expect)), "late size %zu: data", l.size);
        close(fd);
        free(read);
        free(device_bytes);
    }
    /* where a request is carried out at the call, a stream that is held up is not waited for without end */
    if (getenv("CONFORMANCE_AT_CALL") && cu_wait(s[0], gate, 1, 1) == 0) {
        CODE(p_cuFileReadAsync(h, (void *)d, &r[0].size, &r[0].file, &r[0].place, &r[0].moved, s[0]), 5030);
        check(errno == ETIMEDOUT, "errno %d", errno);
        __atomic_store_n((unsigned *)word, 1, __ATOMIC_SEQ_CST);
        check(cu_sync(s[0]) == 0, "sync");
        CODE(p_cuFileReadAsync(h, (void *)d, &r[0].size, &r[0].file, &r[0].place, &r[0].moved, s[0]), 0);
        check(r[0].moved == B, "carried out at the call: %zd", r[0].moved);
    }
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_unregister(word);
    cu_unregister(from);
    cu_unregister(to);
    cu_free(d);
    cu_free(dl);
    free(want);
    free(wanted);
    free(got);
}

static void parameters(void) {
    size_t value = 0, least = 0, most = 0;
    bool flag;
    char text[256];
    for (int p = 0; p < 12; p++) {
        CODE(p_cuFileGetParameterSizeT(p, &value), 0);
        CODE(p_cuFileGetParameterMinMaxValue(p, &least, &most), 0);
        check(least <= value && value <= most, "parameter %d: %zu in %zu..%zu", p, value, least, most);
        CODE(p_cuFileSetParameterSizeT(p, most), 0);
        if (most < SIZE_MAX) CODE(p_cuFileSetParameterSizeT(p, most + 1), 5022);
        if (least > 0) CODE(p_cuFileSetParameterSizeT(p, least - 1), 5022);
        size_t now = 0;
        CODE(p_cuFileGetParameterSizeT(p, &now), 0);
        check(now == most, "parameter %d: %zu", p, now);
        CODE(p_cuFileSetParameterSizeT(p, value), 0);
    }
    for (int p = 0; p < 14; p++) {
        CODE(p_cuFileGetParameterBool(p, &flag), 0);
        CODE(p_cuFileSetParameterBool(p, flag), 0);
    }
    for (int p = 0; p < 4; p++) {
        CODE(p_cuFileGetParameterString(p, text, sizeof text), 0);
        CODE(p_cuFileSetParameterString(p, text), 0);
    }
    CODE(p_cuFileGetParameterSizeT(99, &value), 5022);
    CODE(p_cuFileGetParameterSizeT(-1, &value), 5022);
    CODE(p_cuFileGetParameterSizeT(1, NULL), 5022);
    CODE(p_cuFileGetParameterBool(14, &flag), 5022);
    CODE(p_cuFileGetParameterString(4, text, sizeof text), 5022);
    CODE(p_cuFileGetParameterString(0, text, 2), 5022);
    CODE(p_cuFileGetParameterString(0, text, -5), 5022);
    CODE(p_cuFileSetParameterString(0, "BOGUS"), 5022);
    CODE(p_cuFileSetParameterString(0, NULL), 5022);
    /* whatever cufile.json says: no more is written than there is room for */
    size_t sizes[16], numbers[16], untouched[13];
    memset(untouched, 0x5a, sizeof untouched);
    memset(sizes, 0x5a, sizeof sizes);
    memset(numbers, 0x5a, sizeof numbers);
    CODE(p_cuFileGetParameterPosixPoolSlabArray(sizes, numbers, 3), 0);
    check(!memcmp(sizes + 3, untouched, sizeof untouched) && !memcmp(numbers + 3, untouched, sizeof untouched),
          "words behind the arrays");
    size_t kb[4] = {4, 1024, 16384, 0}, counts[4] = {64, 64, 16, 0}, got[4], n[4];
    CODE(p_cuFileSetParameterPosixPoolSlabArray(kb, counts, 3), 0);
    CODE(p_cuFileGetParameterPosixPoolSlabArray(got, n, 3), 0);
    check(!memcmp(kb, got, 24) && !memcmp(counts, n, 24), "slabs");
    CODE(p_cuFileSetParameterPosixPoolSlabArray(kb, counts, 4), 5022);
    CODE(p_cuFileSetParameterPosixPoolSlabArray(NULL, counts, 3), 5022);
    CODE(p_cuFileGetParameterPosixPoolSlabArray(got, n, 0), 5022);
    CODE(p_cuFileSetParameterGpuBounceBufferSlabArray(kb, counts, 1), 0);
    CODE(p_cuFileSetParameterSizeT(2, 3), 0);
    CUfileDrvProps_t props;
    CODE(p_cuFileDriverGetProperties(&props), 0);
    check(props.nvfs.major_version == 0 && props.nvfs.max_direct_io_size == 16384 && props.nvfs.dcontrolflags == 2 &&
              props.max_device_cache_size == 131072 && props.max_batch_io_size == 128, "properties");
    CODE(p_cuFileDriverGetProperties(NULL), 5022);
    for (int open = 0; open < 2; open++) {
        static const struct { int which; size_t kb; int code; } limits[] = {
            {0, 4, 0}, {0, 0, 5003}, {1, 0, 5003}, {1, 4, 5003}, {1, 64, 0}, {1, 1000, 5003}, {1, 16384, 0},
            {1, 16385, 5003}, {2, 0, 0}, {2, 1, 5003}, {2, 131072, 0}, {2, (size_t)1 << 40, 5022}, {3, 0, 0},
            {3, 1, 5003}, {3, (size_t)1 << 25, 0}, {3, (size_t)1 << 40, 5022},
        };
        for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
            size_t kb = limits[i].kb;
            CUfileError_t e = limits[i].which == 0 ? p_cuFileDriverSetPollMode(true, kb)
                : limits[i].which == 1 ? p_cuFileDriverSetMaxDirectIOSize(kb)
                : limits[i].which == 2 ? p_cuFileDriverSetMaxCacheSize(kb) : p_cuFileDriverSetMaxPinnedMemSize(kb);
            check(e.err == limits[i].code, "limit %d, %zu KB: %d", limits[i].which, kb, e.err);
        }
        if (!open) CODE(p_cuFileDriverOpen(), 0);
    }
    CODE(p_cuFileGetParameterSizeT(2, &value), 0);
    check(value == 3, "staged: %zu", value);
    CODE(p_cuFileSetParameterSizeT(2, 4), 5026);
    CODE(p_cuFileSetParameterBool(2, true), 5026);
    CODE(p_cuFileSetParameterString(0, "DEBUG"), 5026);
    unsigned p2p = 9;
    CODE(p_cuFileDriverGetP2PFlags(4, &p2p), 0);
    check(p2p == 0, "p2p %u", p2p);
    CODE(p_cuFileDriverSetP2PFlags(4, 1), 5008);
    size_t bar = 0;
    CODE(p_cuFileGetBARSizeInKB(99, &bar), 5022);
    CODE(p_cuFileGetBARSizeInKB(-1, &bar), 5022);
    CODE(p_cuFileGetBARSizeInKB(0, NULL), 5022);
    char *json;
    if (asprintf(&json, "%s/topology.json", folder) < 0) die("memory");
    CODE(p_cuFileExportPCIeTopology(json), 0);
    CODE(p_cuFileExportPCIeTopology("/nowhere/x"), 5030);
    CODE(p_cuFileExportPCIeTopology(NULL), 5022);
    CODE(p_cuFileDriverClose_v2(), 0);
}

static void statistics(void) {
    static CUfileStatsLevel1_t one;
    static CUfileStatsLevel2_t two;
    static CUfileStatsLevel3_t three;
    char *path = file_of("stats", 4 << 20, 1);
    int level = -1;
    CODE(p_cuFileGetStatsL1(&one), 5022);
    CODE(p_cuFileSetStatsLevel(-1), 5022);
    CODE(p_cuFileSetStatsLevel(4), 5022);
    CODE(p_cuFileStatsStart(), 5001);
    CODE(p_cuFileDriverOpen(), 0);
    CODE(p_cuFileStatsStart(), 5030);
    CODE(p_cuFileSetStatsLevel(3), 0);
    CODE(p_cuFileGetStatsLevel(&level), 0);
    check(level == 3, "level %d", level);
    CODE(p_cuFileStatsStart(), 0);
    dptr d = device(1 << 20);
    CODE(p_cuFileBufRegister((void *)d, 1 << 20, 0), 0);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    for (int i = 0; i < 4; i++) BYTES(p_cuFileRead(h, (void *)d, 1 << 20, i << 20, 0), 1 << 20);
    BYTES(p_cuFileWrite(h, (void *)d, 4096, 0, 0), 4096);
    BYTES(p_cuFileRead(h, (void *)d, 4096, -1, 0), -5022);
    CUfileBatchHandle_t q;
    CUfileIOParams_t p = entry(h, d, 4096, 0, 0, 0, 1);
    CODE(p_cuFileBatchIOSetUp(&q, 4), 0);
    CODE(p_cuFileBatchIOSubmit(q, 1, &p, 0), 0);
    check(drain(q, 1, CUFILE_COMPLETE, 4096), "batch");
    p_cuFileBatchIODestroy(q);
    CODE(p_cuFileGetStatsL1(&one), 0);
    check(one.read_ops.ok == 4 && one.read_ops.err == 1 && one.write_ops.ok == 1, "reads %lu/%lu, writes %lu",
          (long)one.read_ops.ok, (long)one.read_ops.err, (long)one.write_ops.ok);
    check(one.read_bytes == 4 << 20 && one.write_bytes == 4096 && one.buf_register_ops.ok == 1, "bytes");
    check(one.batch_submit_ops.ok == 1 && one.batch_complete_ops.ok == 1 && one.batch_read_bytes == 4096, "batch");
    CODE(p_cuFileGetStatsL2(&two), 0);
    check(two.read_size_kb_hist[9] == 4 && two.write_size_kb_hist[1] == 1, "sizes");
    CODE(p_cuFileGetStatsL3(&three), 0);
    check(three.num_gpus == 1 && three.per_gpu_stats[0].n_posix_reads == 5 && three.per_gpu_stats[0].n_mmap == 1,
          "gpu: %lu reads", (long)three.per_gpu_stats[0].n_posix_reads);
    CODE(p_cuFileGetStatsL1(NULL), 5022);
    CODE(p_cuFileStatsStop(), 0);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    CODE(p_cuFileGetStatsL1(&one), 0);
    check(one.read_ops.ok == 4, "stopped");
    CODE(p_cuFileStatsReset(), 0);
    CODE(p_cuFileGetStatsL1(&one), 0);
    check(one.read_ops.ok == 0, "reset");
    CODE(p_cuFileDriverClose_v2(), 0);
    CODE(p_cuFileSetStatsLevel(0), 0);
    cu_free(d);
}

/* ---- many threads ---- */
struct work { CUfileHandle_t h, direct; dptr shared; unsigned seed; int bad; const char *path; };
static void *reader(void *arg) {
    struct work *work = arg;
    const size_t size = 16 << 20, most = 256 << 10;
    cu_current(context);
    dptr own = device(most);
    u8 *bytes = malloc(most);
    for (int i = 0; i < 60; i++) {
        size_t n = 1 + rand_r(&work->seed) % most;
        off_t at = rand_r(&work->seed) % (size - n);
        ssize_t r = p_cuFileRead(i & 2 ? work->direct : work->h, (void *)(i & 1 ? work->shared : own), n, at, 0);
        if (r != (ssize_t)n || cu_d2h(bytes, i & 1 ? work->shared : own, n)) { work->bad++; continue; }
        for (size_t k = 0; k < n; k += 61) if (bytes[k] != byte_at(at + k, 1)) { work->bad++; break; }
        if (i % 10 == 0) {
            CUfileHandle_t h = NULL;
            int fd = open(work->path, O_RDONLY);
            work->bad += code_of_fd(&h, fd, 1) != 0;
            work->bad += p_cuFileBufRegister((void *)own, most, 0).err != 0;
            work->bad += p_cuFileRead(h, (void *)own, n, at, 0) != (ssize_t)n;
            work->bad += p_cuFileBufDeregister((void *)own).err != 0;
            p_cuFileHandleDeregister(h);
            close(fd);
            work->bad += p_cuFileDriverOpen().err != 0;
            work->bad += p_cuFileDriverClose_v2().err != 0;
        }
    }
    cu_free(own);
    free(bytes);
    return NULL;
}
static void *fresh_thread(void *arg) {
    struct work *work = arg;
    work->bad = p_cuFileRead(work->h, (void *)work->shared, 65536, 0, 0) != 65536;
    void *current = (void *)1;
    work->bad += cu_get_current(&current) || current; /* and it has no context afterwards */
    return NULL;
}
static void threads(void) {
    enum { T = 16 };
    char *path = file_of("threads", 16 << 20, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR), direct = h;
    int fd = open(path, O_RDWR | O_DIRECT);
    if (fd >= 0) check(code_of_fd(&direct, fd, 1) == 0, "direct");
    pthread_t ids[T];
    static struct work work[T];
    for (int i = 0; i < T; i++) {
        work[i] = (struct work){h, direct, device(256 << 10), i * 7919 + 1, 0, path};
        pthread_create(&ids[i], NULL, reader, &work[i]);
    }
    int bad = 0;
    for (int i = 0; i < T; i++) {
        pthread_join(ids[i], NULL);
        bad += work[i].bad;
        cu_free(work[i].shared);
    }
    check(bad == 0, "%d errors in %d threads", bad, T);
    check(p_cuFileUseCount() == 1, "count %ld", p_cuFileUseCount());
    work[0] = (struct work){h, h, device(65536), 0, 0, path};
    pthread_create(&ids[0], NULL, fresh_thread, &work[0]);
    pthread_join(ids[0], NULL);
    check(!work[0].bad, "a thread that never touched CUDA");
    CODE(p_cuFileDriverClose_v2(), 0);
}

/* what is in the file already is written again: by one thread, by several at once, while somebody cuts it */
enum { REWRITERS = 4, REGION = (4 << 20) + 123 };
struct rewriter {
    CUfileHandle_t h;
    dptr bytes;
    unsigned seed;
    off_t start;
    int turns, bad;
};
static void *rewrite(void *arg) {
    static const size_t sizes[] = {1, 4095, 4096, 4097, 65536, (128 << 10) + 1, 1 << 20, (1 << 20) + 3, (3 << 20) + 5};
    struct rewriter *w = arg;
    unsigned seed = w->seed;
    if (cu_current(context)) w->bad++;
    /* all of it once, then anywhere */
    for (size_t at = 0, step = (1 << 20) + 4097; at < REGION; at += step) {
        size_t n = REGION - at < step ? REGION - at : step;
        w->bad += p_cuFileWrite(w->h, (void *)w->bytes, n, w->start + at, at) != (ssize_t)n;
    }
    for (int i = 0; i < w->turns; i++) {
        size_t n = sizes[rand_r(&seed) % 9], at = (size_t)rand_r(&seed) % (REGION - n);
        w->bad += p_cuFileWrite(w->h, (void *)w->bytes, n, w->start + at, at) != (ssize_t)n;
    }
    return NULL;
}
static volatile int cutting;
static void *cutter(void *arg) {
    int fd = *(int *)arg;
    for (int i = 0; cutting; i++) {
        if (ftruncate(fd, i % 2 ? REWRITERS * (off_t)REGION : (i * 977) % 50000)) break;
        usleep(300);
    }
    return NULL;
}
static void rewrites(void) {
    const size_t size = REWRITERS * (size_t)REGION;
    char *path = file_of("rewrites", size, 1);
    int fd = open(path, O_RDWR);
    CUfileHandle_t h = NULL;
    check(code_of_fd(&h, fd, 1) == 0, "register");
    static struct rewriter w[REWRITERS];
    pthread_t ids[REWRITERS], other;
    for (int i = 0; i < REWRITERS; i++) {
        w[i] = (struct rewriter){h, device(REGION), 10 + i, i * (off_t)REGION, 20, 0};
        u8 *bytes = pattern(REGION, 0, w[i].seed);
        check(cu_h2d(w[i].bytes, bytes, REGION) == 0, "data");
        free(bytes);
    }
    for (int round = 0; round < 3; round++) {
        int cut = round == 2;
        cutting = 1;
        if (cut) pthread_create(&other, NULL, cutter, &fd);
        for (int i = 0; i < REWRITERS; i++) {
            pthread_create(&ids[i], NULL, rewrite, &w[i]);
            if (!round) pthread_join(ids[i], NULL);
        }
        for (int i = 0; i < REWRITERS; i++) {
            if (round) pthread_join(ids[i], NULL);
            check(!w[i].bad, "round %d: %d writes failed", round, w[i].bad);
            if (!cut) check(file_same(path, w[i].start, REGION, 0, w[i].seed), "data of round %d", round);
        }
        cutting = 0;
        if (cut) pthread_join(other, NULL);
        /* the other bytes for the next round */
        for (int i = 0; i < REWRITERS && !round; i++) w[i].start = (REWRITERS - 1 - i) * (off_t)REGION;
    }
    /* after all that, and with what is not in the page cache any more */
    check(ftruncate(fd, size) == 0, "ftruncate");
    for (int i = 0; i < 3; i++) {
        if (i == 1) fsync(fd), posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        BYTES(p_cuFileWrite(h, (void *)w[i].bytes, REGION - 7, 5, 0), REGION - 7);
        check(file_same(path, 5, REGION - 7, 0, w[i].seed), "data, %d", i);
    }
    /* the time of the file is that of the write, also of one soon after another */
    struct timespec old[2] = {{1000, 0}, {1000, 0}};
    struct stat a, b;
    for (int i = 0; i < 3; i++) {
        futimens(fd, old);
        usleep(10000);
        BYTES(p_cuFileWrite(h, (void *)w[0].bytes, 1 << 20, 0, 0), 1 << 20);
        BYTES(p_cuFileWrite(h, (void *)w[0].bytes, 1 << 20, 0, 0), 1 << 20);
        fstat(fd, &a);
        check(a.st_mtime > 1000, "modified in %ld", (long)a.st_mtime);
        usleep(10000);
        BYTES(p_cuFileWrite(h, (void *)w[0].bytes, 1 << 20, 0, 0), 1 << 20);
        fstat(fd, &b);
        check(b.st_mtim.tv_sec > a.st_mtim.tv_sec || b.st_mtim.tv_nsec > a.st_mtim.tv_nsec, "modified once more");
    }
    /* the end of a file grows, in a request that starts inside */
    BYTES(p_cuFileWrite(h, (void *)w[1].bytes, 2 << 20, (off_t)size - 4096, 0), 2 << 20);
    check(file_same(path, size - 4096, 2 << 20, 0, w[1].seed), "data past the end");
    fstat(fd, &a);
    check(a.st_size == (off_t)size - 4096 + (2 << 20), "%ld bytes", (long)a.st_size);
    static const int flags[] = {O_RDWR | O_SYNC, O_RDWR | O_DSYNC, O_WRONLY, O_RDWR | O_DIRECT};
    for (int i = 0; i < 4; i++) {
        int one = open(path, flags[i]);
        CUfileHandle_t g = NULL;
        if (one < 0) continue; /* O_DIRECT on a tmpfs */
        check(code_of_fd(&g, one, 1) == 0, "register with %#x", flags[i]);
        BYTES(p_cuFileWrite(g, (void *)w[i].bytes, 3 << 20, 777, 0), 3 << 20);
        check(file_same(path, 777, 3 << 20, 0, w[i].seed), "data with %#x", flags[i]);
        p_cuFileHandleDeregister(g);
        close(one);
    }
    p_cuFileHandleDeregister(h);
    CODE(p_cuFileDriverClose_v2(), 0);
    for (int i = 0; i < REWRITERS; i++) cu_free(w[i].bytes);
    close(fd);
    unlink(path);
}

/* threads that come and go on one device leave room for another one; with two devices alone */
static pthread_barrier_t together;
static void *one_of_many(void *arg) {
    struct work *work = arg;
    pthread_barrier_wait(&together);
    for (int i = 0; i < 8; i++) work->bad += p_cuFileRead(work->h, (void *)work->shared, 65536, 0, 0) != 65536;
    return NULL;
}
static void devices(void) {
    enum { T = 64 };
    int second;
    void *other;
    if (cu_device(&second, 1)) { printf("SKIP devices: there is one\n"); return; }
    char *path = file_of("devices", 1 << 20, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    dptr d = device(65536);
    pthread_t ids[T];
    static struct work work[T];
    for (int round = 0; round < 2; round++) {
        /* one after the other, then all at once */
        pthread_barrier_init(&together, NULL, round ? T : 1);
        for (int i = 0; i < T; i++) {
            work[i] = (struct work){h, h, d, 0, 0, path};
            pthread_create(&ids[i], NULL, one_of_many, &work[i]);
            if (!round) pthread_join(ids[i], NULL);
        }
        for (int i = 0; i < T; i++) {
            if (round) pthread_join(ids[i], NULL);
            check(!work[i].bad, "thread %d of round %d: %d reads failed", i, round, work[i].bad);
        }
        if (cu_retain(&other, second) || cu_current(other)) die("the second device");
        dptr e = device(1 << 20);
        BYTES(p_cuFileRead(h, (void *)e, 1 << 20, 0, 0), 1 << 20);
        check(same(e, 1 << 20, 0, 1 << 20, 0, 1), "data on the second device");
        cu_free(e);
        cu_current(context);
    }
    BYTES(p_cuFileRead(h, (void *)d, 65536, 0, 0), 65536);
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
}

/* lanes come back whatever became of a request, and are gone when close returns; only where the driver can
 * be told to stall, and a wait does not take long */
static void stuck(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*fault)(const char *, uint64_t, const char *);
    int (*release)(void);
    int64_t (*counter)(const char *);
    *(void **)&fault = dlsym(cuda, "beeline_test_cuda_fault");
    *(void **)&release = dlsym(cuda, "beeline_test_cuda_release");
    *(void **)&counter = dlsym(cuda, "beeline_test_cuda_counter");
    if (!fault || !release || !counter || !getenv("BEELINE_STALL_SECONDS")) return;
    const size_t size = 8 << 20;
    char *path = file_of("stuck", size, 1), *full = file_of("full", 0, 1);
    dptr d = device(size);
    u8 *bytes = pattern(size, 0, 1);
    check(cu_h2d(d, bytes, size) == 0, "data");
    int64_t streams = counter("streams"), events = counter("events"), host = counter("host");
    CUfileHandle_t h = handle_of(path, O_RDWR), f = handle_of(full, O_RDWR);
    /* writes that end short while copies are in flight */
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 1000000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 0; i < 40; i++) BYTES(p_cuFileWrite(f, (void *)d, size, 0, 0), 1000000);
    setrlimit(RLIMIT_FSIZE, &before);
    check(counter("streams") == streams + 1, "one lane for one thread: %ld", (long)(counter("streams") - streams));
    /* a copy that does not end in time, and ends later */
    for (int i = 0; i < 2; i++) {
        check(fault("copy", 0, "stall") == 0, "stall");
        BYTES(p_cuFileRead(h, (void *)d, i ? 65536 : size, 0, 0), -1);
        check(errno == ETIMEDOUT, "errno %d", errno);
        check(release() == 0, "release");
        BYTES(p_cuFileRead(h, (void *)d, size, 0, 0), size);
        check(same(d, size, 0, size, 0, 1), "data after a stall");
    }
    CODE(p_cuFileDriverClose_v2(), 0);
    check(counter("streams") == streams, "%ld streams after close", (long)(counter("streams") - streams));
    check(counter("events") == events, "%ld events after close", (long)(counter("events") - events));
    for (int i = 0; i < 2000 && counter("host") > host; i++) usleep(5000);
    check(counter("host") == host, "%ld pieces of pinned memory stay", (long)(counter("host") - host));
    free(bytes);
    cu_free(d);
}

/* where a child crashed, for whoever reads the log */
static void told(int number) {
    void *frames[40];
    int count = backtrace(frames, 40);
    backtrace_symbols_fd(frames, count, 1);
    _exit(number);
}

/* a child of fork is refused, without a hang or a crash */
static void forks(void) {
    char *path = file_of("forks", 1 << 20, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    dptr d = device(65536);
    CODE(p_cuFileBufRegister((void *)d, 65536, 0), 0);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        alarm(10);
        u8 host[64];
        CUfileHandle_t other;
        int bad = p_cuFileRead(h, (void *)d, 4096, 0, 0) != -5034 || p_cuFileRead(h, host, 64, 0, 0) != -5034;
        bad |= (p_cuFileDriverOpen().err != 5034) << 1 | (code_of_fd(&other, 0, 1) != 5034) << 2;
        bad |= (p_cuFileBufDeregister((void *)d).err != 5034) << 3 | (p_cuFileDriverClose_v2().err != 5034) << 4;
        bad |= (p_cuFileUseCount() != -1) << 5;
        p_cuFileHandleDeregister(h);
        p_cuFileBatchIODestroy((void *)1);
        _exit(bad);
    }
    int status = -1;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child: status %#x", status);
    /* what the CUDA driver's own exit handlers do in a child is not this library's: told, not judged */
    child = fork();
    if (!child) {
        alarm(10);
        signal(SIGSEGV, told);
        exit(0);
    }
    waitpid(child, &status, 0);
    if (status) printf("note: exit(0) in a child of fork: status %#x\n", status);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    CODE(p_cuFileDriverClose_v2(), 0);
}

/* random arguments, good and bad: every answer is a number of bytes or an error, and nothing crashes */
static void fuzz(void) {
    const char *turns = getenv("CONFORMANCE_FUZZ");
    char *path = file_of("fuzz", 300000, 1);
    CUfileHandle_t good = handle_of(path, O_RDWR);
    const size_t B = 200000;
    dptr d = device(B);
    u8 *host = malloc(B);
    unsigned seed = 12345;
    CUfileBatchHandle_t q = NULL;
    CODE(p_cuFileBatchIOSetUp(&q, 16), 0);
    int limit = turns ? atoi(turns) : 3000;
    for (int i = 0; i < limit; i++) {
        static const long odd[] = {0, 1, -1, 511, 4096, 65536, 199999, 200000, 200001, 299999, 300001, 1L << 31,
                                   1L << 40, 1L << 62, 0x7fffffffffffffff, -4096};
#define ANY (rand_r(&seed) % 3 ? (long)(rand_r(&seed) % 250000) : odd[rand_r(&seed) % 16])
        void *handles[] = {good, good, good, good, NULL, (void *)0x1234, (void *)d, q};
        void *h = handles[rand_r(&seed) % 8];
        void *places[] = {(void *)d, (void *)(d + 1), (void *)(d + B - 1), host, NULL, (void *)8, (void *)-1L};
        int which = rand_r(&seed) % 7;
        void *ptr = places[which];
        size_t size = (size_t)ANY;
        off_t at = ANY, to = ANY;
        /* memory of the host is the caller's promise: keep it */
        if (which == 3) { size = size % 1000; to = (off_t)((size_t)to % 1000); }
        ssize_t r = 0;
        switch (rand_r(&seed) % 12) {
        case 0: case 1: case 2: r = p_cuFileRead(h, ptr, size, at, to); break;
        case 3: case 4: r = p_cuFileWrite(h, ptr, size % 300000, at < 600000 ? at : -1, to); break;
        case 5: p_cuFileBufRegister(ptr, size, (int)to); break;
        case 6: p_cuFileBufDeregister(ptr); break;
        case 7: case 8: {
            CUfileIOParams_t p[3];
            for (int k = 0; k < 3; k++) p[k] = entry(h, (dptr)ptr, size % 300000, at % 300000, to, rand_r(&seed) % 8 == 0 ? 7 : 0, k);
            p_cuFileBatchIOSubmit(rand_r(&seed) % 9 ? q : ptr, rand_r(&seed) % 4, p, 0);
            break;
        }
        case 9: {
            CUfileIOEvents_t events[16];
            unsigned count = rand_r(&seed) % 17;
            struct timespec soon = {rand_r(&seed) % 9 ? 0 : -1, 1000};
            p_cuFileBatchIOGetStatus(q, rand_r(&seed) % 4, &count, events, &soon);
            break;
        }
        case 10: {
            size_t value;
            p_cuFileGetParameterSizeT((int)at, &value);
            p_cuFileSetParameterSizeT((int)at % 12, size);
            p_cuFileDriverSetMaxCacheSize(size);
            break;
        }
        default: if (rand_r(&seed) % 8 == 0) p_cuFileBatchIOCancel(q);
        }
        int fine = r >= -5050 && (r < 0 || (size_t)r <= size);
        check(fine, "answer %zd for %zu bytes", r, size);
    }
    p_cuFileBatchIODestroy(q);
    BYTES(p_cuFileRead(good, (void *)d, 0, 0, 0), 0);
    CODE(p_cuFileDriverClose_v2(), 0);
    cu_free(d);
    free(host);
}

/* larger than one system call moves (STOR-DATA-03); only where there is room for it */
static void huge(void) {
    const size_t size = ((size_t)1 << 31) + 5;
    dptr d = 0;
    if (cu_alloc(&d, size)) { printf("SKIP huge: no device memory for 2 GiB\n"); return; }
    char *path = file_of("huge", 0, 1);
    int fd = open(path, O_RDWR);
    size_t marks[] = {0, 0x7ffff000 - 2048, size - 4096};
    if (ftruncate(fd, size + 8192)) die("ftruncate");
    for (int i = 0; i < 3; i++) {
        u8 *bytes = pattern(4096, marks[i], 1);
        if (pwrite(fd, bytes, 4096, marks[i]) != 4096) die("pwrite");
        free(bytes);
    }
    CUfileHandle_t h = NULL;
    check(code_of_fd(&h, fd, 1) == 0, "register");
    BYTES(p_cuFileRead(h, (void *)d, size, 0, 0), size);
    for (int i = 0; i < 3; i++) {
        u8 *bytes = pattern(4096, marks[i], 1), got[4096];
        cu_d2h(got, d + marks[i], 4096);
        check(!memcmp(got, bytes, 4096), "mark %d", i);
        free(bytes);
    }
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, (off_t)1 << 31), -5014);
    BYTES(p_cuFileRead(h, (void *)d, 5, (off_t)marks[2], (off_t)1 << 31), 5);
    CODE(p_cuFileDriverClose_v2(), 0);
    unlink(path);
    cu_free(d);
}

/* last: the process ends with everything open */
static void at_exit(void) {
    char *path = file_of("exit", 1 << 20, 1);
    CUfileHandle_t h = handle_of(path, O_RDWR);
    dptr d = device(65536);
    CODE(p_cuFileBufRegister((void *)d, 65536, 0), 0);
    BYTES(p_cuFileRead(h, (void *)d, 4096, 0, 0), 4096);
    CUfileBatchHandle_t q;
    CODE(p_cuFileBatchIOSetUp(&q, 8), 0);
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } groups[] = {
        {"opening", opening}, {"handles", handles}, {"buffers", buffers}, {"matrix", matrix}, {"edges", edges},
        {"vectors", vectors}, {"batches", batches}, {"crowd", crowd}, {"streams", streams}, {"connections", connections},
        {"parameters", parameters}, {"statistics", statistics}, {"threads", threads}, {"rewrites", rewrites},
        {"fuzz", fuzz},
        {"devices", devices}, {"stuck", stuck}, {"huge", huge}, {"forks", forks}, {"exit", at_exit},
    };
    if (argc < 3) die("usage: conformance LIBCUFILE FOLDER [GROUP..]");
    folder = argv[2];
    start_cuda();
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    if (!library) die(dlerror());
#define LOAD(name) *(void **)&p_##name = symbol(library, #name);
    FUNCTIONS(LOAD)
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        int wanted = argc == 3;
        for (int a = 3; a < argc; a++) wanted |= !strcmp(argv[a], groups[i].name);
        if (!wanted) continue;
        group = groups[i].name;
        int before = failures, done = checks;
        struct timespec a, z;
        clock_gettime(CLOCK_MONOTONIC, &a);
        groups[i].run();
        clock_gettime(CLOCK_MONOTONIC, &z);
        printf("%-10s %5d checks, %d failed, %.2f s\n", group, checks - done, failures - before,
               z.tv_sec - a.tv_sec + (z.tv_nsec - a.tv_nsec) * 1e-9);
        fflush(stdout);
    }
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
