// What a path between two devices can carry: copies by threads, read and reduce, a flag there and back.
#include "beeline/access.cuh"

// `bytes` is a multiple of 16; both addresses are aligned to 16.
extern "C" __global__ void __launch_bounds__(512) bl_copy(u64 to, u64 from, u64 bytes) {
    u64 count = bytes / 16, step = (u64)gridDim.x * blockDim.x, i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        Quad v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = load<Quad>(from + (i + k * step) * 16);
#pragma unroll
        for (int k = 0; k < 4; k++) store(to + (i + k * step) * 16, v[k]);
    }
    for (; i < count; i += step) store(to + i * 16, load<Quad>(from + i * 16));
}

DEVICE u32 add(u32 a, u32 b) { return f32_bits(plus(bits_f32(a), bits_f32(b))); }
DEVICE Quad add(Quad a, Quad b) { return Quad{add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w)}; }

// Sums of 32-bit floats in place: what a one-shot all-reduce does with each peer.
extern "C" __global__ void __launch_bounds__(512) bl_read_add(u64 own, u64 peer, u64 bytes) {
    u64 count = bytes / 16, step = (u64)gridDim.x * blockDim.x, i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        Quad v[4], w[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = load<Quad>(peer + (i + k * step) * 16);
#pragma unroll
        for (int k = 0; k < 4; k++) w[k] = load<Quad>(own + (i + k * step) * 16);
#pragma unroll
        for (int k = 0; k < 4; k++) store(own + (i + k * step) * 16, add(v[k], w[k]));
    }
    for (; i < count; i += step) store(own + i * 16, add(load<Quad>(peer + i * 16), load<Quad>(own + i * 16)));
}

// One thread on each side passes a number back and forth; `first` is 1 on the side that begins. Ends by the
// deadline at the latest; `rounds` goes to the word after the own one when all are done.
extern "C" __global__ void bl_ping(u64 own, u64 peer, u32 first, u32 rounds, u64 timeout_ns) {
    u64 end = now_ns() + timeout_ns;
    for (u32 i = 1; i <= rounds; i++) {
        if (first) store_word(peer, i);
        for (u32 spin = 1; (i32)(peek(own) - i) < 0; spin++)
            if (spin % 1024 == 0 && now_ns() > end) return;
        if (!first) store_word(peer, i);
    }
    store_word(own + 4, rounds);
}
