// The kernels on CPU threads: one thread for each of the device's, barriers that count, words that are
// atomic. For tests of the protocols; see ../emulate. With BEELINE_FIBERS the threads of a block are fibers of one
// CPU thread: then every loop on somebody else's word has to call `relax`.
#pragma once
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#define DEVICE inline
#define OUTLINE inline
#define UNLIKELY(c) (c)

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
inline void barrier(u32 id, u32 threads) { host_block->barriers[id].wait(threads); }
inline void warp_barrier() { host_block->barriers[15].wait(32); }
inline void relax() { std::this_thread::yield(); }
#endif
// Faults: a mutation of the protocol that a test must notice.
inline std::atomic<int> host_fault{0};

template <class W>
inline std::atomic<W> &host_word(u64 at) {
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
inline void release_flag(u64 at, u32 v) { host_word<u32>(at).store(v, std::memory_order_release); }
inline void store_word(u64 at, u32 v) { host_word<u32>(at).store(v, std::memory_order_release); }
inline void store_wide(u64 at, u64 v) { host_word<u64>(at).store(v, std::memory_order_release); }
inline u32 swap_if_zero(u64 at, u32 v) {
    u32 old = 0;
    host_word<u32>(at).compare_exchange_strong(old, v);
    return old;
}
inline u64 now_ns() { return (u64)std::chrono::steady_clock::now().time_since_epoch().count(); }
inline u32 thread_index() { return host_thread; }
inline u32 block_threads() { return host_threads; }
inline u32 block_index() { return host_block_index; }

template <class W>
inline W load(u64 at) {
    W v;
    memcpy(&v, (const void *)at, sizeof v);
    return v;
}
template <class W>
inline void store(u64 at, W v) {
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
