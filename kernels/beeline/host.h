// The kernels on CPU threads: one for each warp, whose threads take turns on it wherever one waits; barriers that
// count, words that are atomic. For tests of the protocols; see ../emulate. With BEELINE_FIBERS all threads of a block are
// fibers of one CPU thread. Either way every loop on somebody else's word has to call `relax`.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <ucontext.h>
#include <vector>

#define DEVICE inline
#define OUTLINE inline
#define UNLIKELY(c) (c)

// Of a kernel that may start early: the threads that have not waited yet, and how often one of those touched memory. A test
// sets the first where its kernels must wait.
inline thread_local bool host_unready[1024];
inline std::atomic<u32> host_too_early{0}, host_admissions{0};

#ifdef BEELINE_FIBERS
#include "../emulate/fibers.h"
#else
struct HostBarrier {
    std::mutex mutex;
    std::condition_variable wake;
    u32 waiting = 0, round = 0;
    void wait(u32 threads) {
        std::unique_lock<std::mutex> lock(mutex);
        u32 mine = round;
        if (++waiting == threads) {
            waiting = 0;
            round++;
            wake.notify_all();
        } else {
            wake.wait(lock, [&] { return round != mine; });
        }
    }
};
struct HostBlock {
    HostBarrier barriers[16];
};
inline thread_local u32 host_thread, host_threads, host_block_index;
inline thread_local HostBlock *host_block;
// A warp: its threads have stacks of their own, and go on one after the other on the thread of the CPU that they share.
struct HostWarp {
    struct Lane {
        ucontext_t at;
        std::vector<char> stack;
        u32 votes;
        bool over;
    };
    Lane lanes[32];
    ucontext_t home;
    std::function<void()> body;
    u32 first, arrived[17], round[17], against[2];

    static HostWarp *&here() {
        static thread_local HostWarp *warp;
        return warp;
    }
    static void start() {
        HostWarp &warp = *here();
        warp.body();
        Lane &lane = warp.lanes[host_thread % 32];
        lane.over = true;
        swapcontext(&lane.at, &warp.home);
    }
    void run(u32 thread, std::function<void()> what) {
        here() = this, first = thread, body = std::move(what);
        for (Lane &lane : lanes) {
            lane.stack.resize(1 << 17), lane.votes = 0, lane.over = false;
            getcontext(&lane.at);
            lane.at.uc_stack.ss_sp = lane.stack.data(), lane.at.uc_stack.ss_size = lane.stack.size(), lane.at.uc_link = nullptr;
            makecontext(&lane.at, &HostWarp::start, 0);
        }
        for (u32 left = 32; left > 0;) {
            for (u32 l = 0; l < 32; l++) {
                if (lanes[l].over) continue;
                host_thread = first + l;
                swapcontext(&home, &lanes[l].at);
                left -= lanes[l].over;
            }
            std::this_thread::yield();
        }
    }
    void turn() { swapcontext(&lanes[host_thread % 32].at, &home); }
    // The last thread that comes goes on for all to `beyond`, where other warps are.
    template <class F>
    void meet(u32 id, F beyond) {
        u32 mine = round[id];
        if (++arrived[id] == 32) {
            beyond();
            arrived[id] = 0, round[id]++;
        } else {
            while (round[id] == mine) turn();
        }
    }
};
inline void barrier(u32 id, u32 threads) {
    HostWarp::here()->meet(id, [&] { host_block->barriers[id].wait(threads / 32); });
}
inline void warp_barrier() { HostWarp::here()->meet(16, [] {}); }
inline bool warp_all(bool v) {
    HostWarp &warp = *HostWarp::here();
    u32 &against = warp.against[warp.lanes[host_thread % 32].votes++ % 2];
    against |= !v;
    warp_barrier();
    bool all = against == 0;
    warp_barrier();
    // Used again by the next vote but one, which nobody comes to before the next one is over.
    against = 0;
    return all;
}
inline void relax() { HostWarp::here()->turn(); }
#endif
// Faults: a mutation of the protocol that a test must notice.
inline std::atomic<int> host_fault{0};

inline void host_touch() {
    if (host_unready[host_thread % 1024]) host_too_early++;
}
inline void after_earlier() { host_unready[host_thread % 1024] = false; }
inline void admit_next() { host_touch(), host_admissions++; }
template <class W>
inline std::atomic<W> &host_word(u64 at) {
    host_touch();
    return *reinterpret_cast<std::atomic<W> *>(at);
}
// Torn between its halves, as the device may do it.
inline void store_packet(u64 at, Quad v) {
    host_word<u64>(at + 8).store((u64)v.z | (u64)v.w << 32, std::memory_order_relaxed);
    if (host_fault == 1) std::this_thread::yield();
    host_word<u64>(at).store((u64)v.x | (u64)v.y << 32, std::memory_order_relaxed);
}
inline Quad load_packet(u64 at) {
    u64 a = host_word<u64>(at).load(std::memory_order_relaxed), b = host_word<u64>(at + 8).load(std::memory_order_relaxed);
    return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
inline Quad load_shared16(u64 at) { return load_packet(at); }
inline void store_shared16(u64 at, Quad v) { store_packet(at, v); }
inline u32 load_flag(u64 at) { return host_word<u32>(at).load(std::memory_order_acquire); }
inline u32 peek(u64 at) { return host_word<u32>(at).load(std::memory_order_acquire); }
inline u64 load_flag_wide(u64 at) { return host_word<u64>(at).load(std::memory_order_acquire); }
inline u64 peek_wide(u64 at) { return host_word<u64>(at).load(std::memory_order_acquire); }
inline void release_flag(u64 at, u32 v) { host_word<u32>(at).store(v, std::memory_order_release); }
inline void store_word(u64 at, u32 v) { host_word<u32>(at).store(v, std::memory_order_release); }
inline void store_wide(u64 at, u64 v) { host_word<u64>(at).store(v, std::memory_order_release); }
inline void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void fence_order() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline u32 swap_if_zero(u64 at, u32 v) {
    u32 old = 0;
    host_word<u32>(at).compare_exchange_strong(old, v);
    return old;
}
// No `host_word`: they may come before the wait.
inline u32 add_early(u64 at, u32 v) { return reinterpret_cast<std::atomic<u32> *>(at)->fetch_add(v, std::memory_order_relaxed); }
inline void announce(u64 at, u32 v) { add_early(at, v); }
inline u32 peek_early(u64 at) { return reinterpret_cast<std::atomic<u32> *>(at)->load(std::memory_order_acquire); }
inline void count_up(u64 at) { host_word<u32>(at).fetch_add(1, std::memory_order_release); }
inline u64 now_ns() { return (u64)std::chrono::steady_clock::now().time_since_epoch().count(); }
// Copies of the machine's own are made as late as may be: what was not waited for is not there.
struct HostBulk {
    struct Copy {
        u64 to, from;
        u32 bytes;
        void make() const { memcpy((void *)to, (const void *)from, bytes); }
    };
    std::vector<Copy> stores;
    std::vector<std::pair<u64, Copy>> loads;
    void store_all_but(size_t left) {
        while (stores.size() > left) stores.front().make(), stores.erase(stores.begin());
    }
    static HostBulk &of_thread() { // one thread of a block uses it, and blocks one after the other
        static thread_local HostBulk bulk;
        return bulk;
    }
};
inline std::atomic<bool> host_has_bulk{true};
inline bool has_bulk() { return host_has_bulk; }
inline u64 at_block(const void *p) { return (u64)p; }
inline void bulk_prepare(u64 word) { *(u64 *)word = 0; } // how many copies have come
inline void bulk_load(u64 to, u64 from, u32 bytes, u64 word) {
    host_touch();
    HostBulk::of_thread().loads.push_back({word, {to, from, bytes}});
}
inline bool bulk_loaded(u64 word, u32 parity) {
    u64 &came = *(u64 *)word;
    if (came % 2 != parity) return true; // the one that is waited for is over
    auto &loads = HostBulk::of_thread().loads;
    for (size_t i = 0; i < loads.size(); i++)
        if (loads[i].first == word) {
            loads[i].second.make();
            loads.erase(loads.begin() + i);
            came++;
            return true;
        }
    return false;
}
inline void bulk_store(u64 to, u64 from, u32 bytes) { HostBulk::of_thread().stores.push_back({to, from, bytes}); }
inline void bulk_read_all_but_2() { HostBulk::of_thread().store_all_but(2); }
inline void bulk_stored() {
    HostBulk::of_thread().store_all_but(0);
    fence_system();
}
// The flag of a line goes last and is looked at first.
inline void store_line(u64 at, Quad v, bool flag) {
    if (!flag) store_packet(at, v);
    warp_barrier();
    if (!flag) return;
    host_word<u64>(at).store((u64)v.x | (u64)v.y << 32, std::memory_order_relaxed);
    if (host_fault == 1) std::this_thread::yield();
    host_word<u64>(at + 8).store((u64)v.z | (u64)v.w << 32, std::memory_order_release);
}
inline Quad load_line(u64 at, bool flag) {
    u64 last = flag ? host_word<u64>(at + 8).load(std::memory_order_acquire) : 0;
    warp_barrier();
    Quad v = load_packet(at);
    return flag ? Quad{v.x, v.y, (u32)last, (u32)(last >> 32)} : v;
}
inline u32 thread_index() { return host_thread; }
inline u32 block_threads() { return host_threads; }
inline u32 block_index() { return host_block_index; }

template <class W>
inline W load(u64 at) {
    host_touch();
    W v;
    memcpy(&v, (const void *)at, sizeof v);
    return v;
}
template <class W>
inline void store(u64 at, W v) {
    host_touch();
    memcpy((void *)at, &v, sizeof v);
}
template <class A, class B>
inline A host_bits(B v) {
    A a;
    static_assert(sizeof a == sizeof v, "");
    memcpy(&a, &v, sizeof a);
    return a;
}
inline float bits_f32(u32 v) { return host_bits<float>(v); }
inline u32 f32_bits(float v) { return host_bits<u32>(v); }
inline double bits_f64(u64 v) { return host_bits<double>(v); }
inline u64 f64_bits(double v) { return host_bits<u64>(v); }
inline float f16_f32(u16 v) { return (float)host_bits<_Float16>(v); }
inline u16 f32_f16(float f) { return host_bits<u16>((_Float16)f); }
inline u16 f32_bf16(float f) {
    u32 bits = f32_bits(f);
    if (f != f) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float min_of(float a, float b) { return fminf(a, b); }
inline float max_of(float a, float b) { return fmaxf(a, b); }
inline double min_of(double a, double b) { return fmin(a, b); }
inline double max_of(double a, double b) { return fmax(a, b); }
inline float times(float a, float b) { return a * b; }
inline float plus(float a, float b) { return a + b; }
inline float over(float a, float b) { return a / b; }
inline double times(double a, double b) { return a * b; }
inline double plus(double a, double b) { return a + b; }
inline double over(double a, double b) { return a / b; }
