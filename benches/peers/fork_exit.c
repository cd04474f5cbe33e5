/* Does a child of fork that calls exit(0) survive the CUDA driver's own exit handlers? Without any library
 * beside the driver: the control for what a drop-in library does there.
 *
 * usage: fork_exit      runs each stage in a process of its own
 * prints a line a stage: how the child ended (0 is well; 0xb a segmentation fault)
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *stages[] = {"the driver is loaded", "cuInit", "a primary context", "memory",
                               "a stream and a copy", "registered host memory", "a thread that waits",
                               "a thread that copies", "events and words",
                               "a thread's own stream", "a captured graph"};
enum { STAGES = sizeof stages / sizeof *stages };

static void *cuda;
static int call0(const char *name, int a) { return ((int (*)(int))dlsym(cuda, name))(a); }

#include <pthread.h>
static void *waits(void *arg) {
    (void)arg;
    pause();
    return NULL;
}
static unsigned long long shared;
static void *copies(void *arg) {
    static char bytes[4096];
    int bad = ((int (*)(void *))dlsym(cuda, "cuCtxSetCurrent"))(arg);
    bad |= ((int (*)(unsigned long long, const void *, size_t))dlsym(cuda, "cuMemcpyHtoD_v2"))(shared, bytes, sizeof bytes);
    if (bad) printf("a copy in a thread: %d\n", bad);
    pause();
    return NULL;
}
static int stage(int last) {
    cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!cuda) return printf("SKIP libcuda: %s\n", dlerror()), 2;
    void *context = NULL, *stream = NULL, *host = NULL;
    unsigned long long memory = 0;
    int device = 0, bad = 0;
    if (last >= 1) bad |= call0("cuInit", 0);
    if (last >= 2) {
        bad |= ((int (*)(int *, int))dlsym(cuda, "cuDeviceGet"))(&device, 0);
        bad |= ((int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain"))(&context, device);
        bad |= ((int (*)(void *))dlsym(cuda, "cuCtxSetCurrent"))(context);
    }
    if (last >= 3) bad |= ((int (*)(void *, size_t))dlsym(cuda, "cuMemAlloc_v2"))(&memory, 1 << 20);
    if (last >= 4) {
        static char bytes[4096];
        bad |= ((int (*)(void **, unsigned))dlsym(cuda, "cuStreamCreate"))(&stream, 1);
        bad |= ((int (*)(unsigned long long, const void *, size_t, void *))dlsym(cuda, "cuMemcpyHtoDAsync_v2"))(
            memory, bytes, sizeof bytes, stream);
        bad |= ((int (*)(void *))dlsym(cuda, "cuStreamSynchronize"))(stream);
    }
    if (last >= 5) {
        host = aligned_alloc(4096, 1 << 20);
        bad |= ((int (*)(void *, size_t, unsigned))dlsym(cuda, "cuMemHostRegister_v2"))(host, 1 << 20, 3);
    }
    pthread_t id;
    if (last >= 6) bad |= pthread_create(&id, NULL, waits, NULL);
    if (last >= 7) {
        shared = memory;
        bad |= pthread_create(&id, NULL, copies, context);
        usleep(100000);
    }
    if (last >= 8) {
        unsigned long long word = 0;
        for (int i = 0; i < 16; i++) {
            void *event = NULL;
            bad |= ((int (*)(void **, unsigned))dlsym(cuda, "cuEventCreate"))(&event, 2);
            bad |= ((int (*)(void *, void *))dlsym(cuda, "cuEventRecord"))(event, stream);
        }
        bad |= ((int (*)(unsigned long long *, void *, unsigned))dlsym(cuda, "cuMemHostGetDevicePointer_v2"))(&word, host, 0);
        bad |= ((int (*)(void *, unsigned long long, unsigned, unsigned))dlsym(cuda, "cuStreamWriteValue32_v2"))(stream, word, 1, 0);
        bad |= ((int (*)(void *))dlsym(cuda, "cuStreamSynchronize"))(stream);
    }
    if (last >= 9) {
        static char bytes[4096];
        void *own = (void *)2;
        bad |= ((int (*)(unsigned long long, const void *, size_t, void *))dlsym(cuda, "cuMemcpyHtoDAsync_v2"))(
            memory, bytes, sizeof bytes, own);
        bad |= ((int (*)(void *))dlsym(cuda, "cuStreamSynchronize"))(own);
    }
    if (last >= 10) {
        void *graph = NULL;
        bad |= ((int (*)(void *, int))dlsym(cuda, "cuStreamBeginCapture_v2"))(stream, 0);
        bad |= ((int (*)(void *, void **))dlsym(cuda, "cuStreamEndCapture"))(stream, &graph);
    }
    if (bad) return printf("%-24s a call failed: %d\n", stages[last], bad), 1;
    pid_t child = fork();
    if (!child) {
        alarm(10);
        exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("%-24s exit(0) in a child: status %#x\n", stages[last], status);
    fflush(stdout);
    return 0;
}
int main(void) {
    for (int i = 0; i < STAGES; i++) {
        fflush(stdout);
        pid_t own = fork();
        if (!own) {
            int bad = stage(i);
            fflush(stdout);
            _exit(bad);
        }
        int status;
        waitpid(own, &status, 0);
    }
    return 0;
}
