// What the kernels ask of the machine: memory operations with a stated order, barriers, time.
//
// Every PTX instruction that is not plain C++ stands here, and nowhere else. With BEELINE_HOST the
// same names come from host.h, so that the very code of the kernels runs on CPU threads in a test.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef int i32;
typedef long long i64;

struct Quad {
    u32 x, y, z, w;
};

#ifdef BEELINE_HOST
#include "host.h"
#else

#define DEVICE __device__ __forceinline__
// Rarely run: one copy of the code for all who wait.
#define OUTLINE static __device__ __noinline__
#define UNLIKELY(c) __builtin_expect(!!(c), 0)

// One 16-byte access, not cached in L1, not torn below 8 bytes. A packet carries a flag in each half.
DEVICE void store_packet(u64 at, Quad v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
DEVICE Quad load_packet(u64 at) {
    Quad v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
// 16 bytes of a line of 128, of which a warp stores and loads four by one instruction; `flag`: the last of a line's.
DEVICE void store_line(u64 at, Quad v, bool) { store_packet(at, v); }
DEVICE Quad load_line(u64 at, bool) { return load_packet(at); }
// Whether it holds for every thread of the warp; all of them come.
DEVICE bool warp_all(bool v) { return __all_sync(0xffffffffu, v); }
// 16 bytes of data that another device writes or reads: ordered by flags, never kept in L1.
DEVICE Quad load_shared16(u64 at) {
    Quad v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
DEVICE void store_shared16(u64 at, Quad v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE u32 load_flag(u64 at) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
DEVICE u32 peek(u64 at) {
    u32 v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
DEVICE u64 load_flag_wide(u64 at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
DEVICE u64 peek_wide(u64 at) {
    u64 v;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
// Everything this block has written (its barrier came before) is seen by whoever sees the flag.
DEVICE void release_flag(u64 at, u32 v) {
    asm volatile("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
// For a word whose sight promises only that what was read before it has been read.
DEVICE void store_word(u64 at, u32 v) {
    asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
DEVICE void store_wide(u64 at, u64 v) {
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Two threads that each store, come here and then load what the other stores: one of them at least sees it.
DEVICE void fence_order() { asm volatile("fence.sc.sys;" ::: "memory"); }
DEVICE u32 swap_if_zero(u64 at, u32 v) {
    u32 old;
    asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], 0, %2;" : "=r"(old) : "l"(at), "r"(v) : "memory");
    return old;
}
DEVICE u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
// Kernels may start before what was queued before them has ended (programmatic dependent launch), where they are machine
// code for compute capability 9.0: `cargo xtask kernels` makes instructions of these two marks there. Elsewhere, and
// where they are launched without asking for it, a kernel begins when the one before has ended.
//
// Waits for the end of what was queued before; its writes are seen then.
DEVICE void after_earlier() { asm volatile("//sm_90 griddepcontrol.wait;" ::: "memory"); }
// Once every block has come here, blocks of the next kernel may start, as far as there is room for them.
DEVICE void admit_next() { asm volatile("//sm_90 griddepcontrol.launch_dependents;" ::: "memory"); }
// The only accesses that may stand before `after_earlier`, which their marks say: to words that kernels change nowhere else.
// Adds to one of another device (which carries out atomic operations of others), adds to an own one, looks at an own one.
DEVICE void announce(u64 at, u32 v) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1; //before the wait" ::"l"(at), "r"(v) : "memory");
}
DEVICE u32 add_early(u64 at, u32 v) {
    u32 old;
    asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], %2; //before the wait" : "=r"(old) : "l"(at), "r"(v) : "memory");
    return old;
}
DEVICE u32 peek_early(u64 at) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1]; //before the wait" : "=r"(v) : "l"(at) : "memory");
    return v;
}
// Adds one, after everything that this thread has written, and what it knows that others have, for who looks at the word from this
// device, and for all who learn of it from there on, since order is handed on: whatever a stream of this device does behind its
// wait for the word, and the host and other devices behind what that stream then tells them. For who looks at the word itself from
// elsewhere it promises nothing. (For the whole system it took a microsecond longer between two H200, until every store to
// the other device was acknowledged.)
DEVICE void count_up(u64 at) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }
// Copies that the machine makes by itself, between memory of a device and memory of a block (`at_block`), of whole 16 bytes at
// addresses that are multiples of 16: one thread asks for them and waits. Only machine code for compute capability 9.0 has them.
DEVICE bool has_bulk() {
    u32 v;
    asm volatile("mov.u32 %0, 0;\n\t//sm_90 mov.u32 %0, 1;" : "=r"(v));
    return v != 0;
}
DEVICE u64 at_block(const void *p) { return __cvta_generic_to_shared(p); }
// Prepares the word by which a copy to the block is seen to have come; it is used again and again, with alternating parity.
DEVICE void bulk_prepare(u64 word) {
    asm volatile("//sm_90 mbarrier.init.shared.b64 [%0], 1;\n\t//sm_90 fence.mbarrier_init.release.cluster;\n\t//sm_90 fence.proxy.async;" ::"r"((u32)word) : "memory");
}
DEVICE void bulk_load(u64 to, u64 from, u32 bytes, u64 word) {
    asm volatile("//sm_90 mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n\t//sm_90 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];" ::"r"((u32)word), "r"(bytes), "r"((u32)to), "l"(from) : "memory");
}
DEVICE bool bulk_loaded(u64 word, u32 parity) {
    u32 v;
    asm volatile("mov.u32 %0, 1;\n\t//sm_90 { .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(v) : "r"((u32)word), "r"(parity) : "memory");
    return v != 0;
}
DEVICE void bulk_store(u64 to, u64 from, u32 bytes) {
    asm volatile("//sm_90 cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t//sm_90 cp.async.bulk.commit_group;" ::"l"(to), "r"((u32)from), "r"(bytes) : "memory");
}
// Until all but the last two stores have read their part of the block's memory.
DEVICE void bulk_read_all_but_2() { asm volatile("//sm_90 cp.async.bulk.wait_group.read 2;" ::: "memory"); }
// Until all stores have been made; a fence behind this has them before it, as this thread's own.
DEVICE void bulk_stored() {
    asm volatile("//sm_90 cp.async.bulk.wait_group 0;\n\t//sm_90 fence.proxy.async;" ::: "memory");
}
// Barrier `id` of the `threads` that come to it (whole warps).
DEVICE void barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_threads() { return blockDim.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE void relax() {}

// Memory of the caller's, through the ordinary caches.
template <class W>
DEVICE W load(u64 at) {
    return *reinterpret_cast<const W *>(at);
}
template <class W>
DEVICE void store(u64 at, W v) {
    *reinterpret_cast<W *>(at) = v;
}
template <>
DEVICE Quad load<Quad>(u64 at) {
    uint4 v = *reinterpret_cast<const uint4 *>(at);
    return Quad{v.x, v.y, v.z, v.w};
}
template <>
DEVICE void store<Quad>(u64 at, Quad v) {
    *reinterpret_cast<uint4 *>(at) = make_uint4(v.x, v.y, v.z, v.w);
}

DEVICE float bits_f32(u32 v) { return __uint_as_float(v); }
DEVICE u32 f32_bits(float v) { return __float_as_uint(v); }
DEVICE double bits_f64(u64 v) { return __longlong_as_double((long long)v); }
DEVICE u64 f64_bits(double v) { return (u64)__double_as_longlong(v); }
DEVICE float f16_f32(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
DEVICE u16 f32_f16(float f) {
    u16 v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
DEVICE u16 f32_bf16(float f) {
    u16 v;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
DEVICE float min_of(float a, float b) { return fminf(a, b); }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE double min_of(double a, double b) { return fmin(a, b); }
DEVICE double max_of(double a, double b) { return fmax(a, b); }
// No contraction of a product and a sum: the same bits whatever the compiler thinks.
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float over(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double times(double a, double b) { return __dmul_rn(a, b); }
DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }
DEVICE double over(double a, double b) { return __ddiv_rn(a, b); }
#endif
