// The threads of a block as fibers of the CPU thread that runs the block: they take turns at barriers and wherever
// one waits (`relax`), so that a launch costs microseconds and not the start of thousands of threads. Blocks run one
// after the other, as on a device that can hold a single one.
#pragma once
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>

// Threads of an emulated block, at most: kernels loop over their data, whatever a launch asks for.
constexpr u32 FIBERS_MAX = 96; // a warp that sends, one that takes, and one for headers
constexpr size_t FIBER_STACK = 128 << 10; // with a page at its end that nobody may touch

struct Fiber {
    jmp_buf at;
    bool started, done;
    i32 barrier; // that it waits at, or -1
    u32 round, votes;
};

// What one CPU thread needs to run blocks.
struct Fibers {
    Fiber all[FIBERS_MAX] = {};
    ucontext_t first;
    jmp_buf scheduler;
    u8 *stacks = nullptr;
    struct {
        u32 waiting, round;
    } barriers[16 + FIBERS_MAX / 32] = {}; // the last ones of warps
    u32 against[FIBERS_MAX / 32][2] = {}; // votes of a warp
    void (*body)(const void *) = nullptr;
    const void *args = nullptr;
    ~Fibers() {
        if (stacks) munmap(stacks, FIBERS_MAX * FIBER_STACK);
    }
};
inline thread_local Fibers fibers;
inline thread_local u32 host_thread, host_threads, host_block_index, host_blocks;

// To the scheduler, which comes back.
__attribute__((noinline)) inline void fiber_away() {
    Fibers &f = fibers;
    if (_setjmp(f.all[host_thread].at) == 0) _longjmp(f.scheduler, 1);
}
inline void fiber_main() {
    for (;;) {
        fibers.body(fibers.args);
        fibers.all[host_thread].done = true;
        fiber_away();
    }
}
__attribute__((noinline)) inline void fiber_resume(u32 thread) {
    Fibers &f = fibers;
    Fiber &fiber = f.all[thread];
    host_thread = thread;
    if (_setjmp(f.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&f.first);
    f.first.uc_link = nullptr;
    f.first.uc_stack.ss_sp = f.stacks + thread * FIBER_STACK + 4096;
    f.first.uc_stack.ss_size = FIBER_STACK - 4096;
    makecontext(&f.first, fiber_main, 0);
    setcontext(&f.first);
}

inline void relax() { fiber_away(); }
inline void barrier(u32 id, u32 threads) {
    Fibers &f = fibers;
    auto &b = f.barriers[id];
    if (++b.waiting == threads) {
        b.waiting = 0;
        b.round++;
        return;
    }
    Fiber &fiber = f.all[host_thread];
    fiber.barrier = (i32)id, fiber.round = b.round;
    fiber_away();
}
inline void warp_barrier() { barrier(16 + host_thread / 32, 32); }
inline bool warp_all(bool v) {
    Fibers &f = fibers;
    u32 &against = f.against[host_thread / 32][f.all[host_thread].votes++ % 2];
    against |= !v;
    warp_barrier();
    bool all = against == 0;
    warp_barrier();
    // Used again by the next vote but one, which nobody comes to before the next one is over.
    against = 0;
    return all;
}

// Nothing moves in this block until another device, or the host, does something.
inline void fibers_idle(u32 times) {
    timespec pause = {0, 20000};
    if (times < 16)
        sched_yield();
    else
        nanosleep(&pause, nullptr);
}

// Runs `body` by all threads of one block.
inline void fibers_run(u32 block, u32 blocks, u32 threads, void (*body)(const void *), const void *args) {
    Fibers &f = fibers;
    if (!f.stacks) {
        void *at = mmap(nullptr, FIBERS_MAX * FIBER_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) abort();
        f.stacks = (u8 *)at;
        for (u32 t = 0; t < FIBERS_MAX; t++) mprotect(f.stacks + t * FIBER_STACK, 4096, PROT_NONE);
    }
    host_threads = threads, host_block_index = block, host_blocks = blocks;
    f.body = body, f.args = args;
    for (auto &b : f.barriers) b = {};
    for (auto &votes : f.against) votes[0] = votes[1] = 0;
    for (u32 t = 0; t < threads; t++) f.all[t].done = false, f.all[t].barrier = -1, f.all[t].votes = 0;
    u32 left = threads, idle = 0;
    while (left) {
        bool moved = false, ran = false;
        for (u32 t = 0; t < threads; t++) {
            Fiber &fiber = f.all[t];
            if (fiber.done) continue;
            if (fiber.barrier >= 0) {
                if (f.barriers[fiber.barrier].round == fiber.round) continue;
                fiber.barrier = -1;
                moved = true;
            }
            ran = true;
            fiber_resume(t);
            left -= fiber.done;
            moved |= fiber.done || fiber.barrier >= 0;
        }
        if (!ran) {
            fprintf(stderr, "block %u: %u threads wait at barriers that no other comes to\n", block, left);
            abort();
        }
        if (moved)
            idle = 0;
        else
            fibers_idle(idle++);
    }
}
