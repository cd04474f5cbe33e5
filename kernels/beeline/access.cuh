// The caller's memory at any alignment: 8 and 16 bytes at a time, never a byte beyond the end.
#pragma once
#include "layout.cuh"

// Less than eight bytes, or not aligned to four.
OUTLINE u64 gather8(u64 at, u32 count) {
    u64 v = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; i++) v |= (u64)load<u8>(at + i) << (8 * i);
    return v;
}
OUTLINE void scatter8(u64 at, u32 count, u64 v) {
#pragma unroll 1
    for (u32 i = 0; i < count; i++) store<u8>(at + i, (u8)(v >> (8 * i)));
}
DEVICE u64 load8(u64 at, u64 left) {
    if (at % 8 == 0 && left >= 8) return load<u64>(at);
    if (at % 4 == 0 && left >= 8) return (u64)load<u32>(at) | (u64)load<u32>(at + 4) << 32;
    return gather8(at, left < 8 ? (u32)left : 8);
}
DEVICE void store8(u64 at, u64 left, u64 v) {
    if (at % 8 == 0 && left >= 8) {
        store<u64>(at, v);
    } else if (at % 4 == 0 && left >= 8) {
        store<u32>(at, (u32)v);
        store<u32>(at + 4, (u32)(v >> 32));
    } else {
        scatter8(at, left < 8 ? (u32)left : 8, v);
    }
}
// 16 bytes that are not whole or not aligned.
OUTLINE Quad gather16(u64 at, u64 left) {
    u64 a = load8(at, left), b = left > 8 ? load8(at + 8, left - 8) : 0;
    return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
DEVICE Quad load16(u64 at, u64 left) {
    if (at % 16 == 0 && left >= 16) return load<Quad>(at);
    return gather16(at, left);
}
OUTLINE void scatter16(u64 at, u64 left, Quad v) {
    store8(at, left, (u64)v.x | (u64)v.y << 32);
    if (left > 8) store8(at + 8, left - 8, (u64)v.z | (u64)v.w << 32);
}
DEVICE void store16(u64 at, u64 left, Quad v) {
    if (at % 16 == 0 && left >= 16)
        store(at, v);
    else
        scatter16(at, left, v);
}
DEVICE u64 low(Quad v) { return (u64)v.x | (u64)v.y << 32; }
DEVICE u64 high(Quad v) { return (u64)v.z | (u64)v.w << 32; }
DEVICE u64 smaller(u64 a, u64 b) { return a < b ? a : b; }

// The caller's memory to the caller's memory.
DEVICE void copy_own(u64 to, u64 from, u64 bytes, u32 t, u32 threads) {
    u64 i = t, whole = bytes / 16;
    if (to % 16 == 0 && from % 16 == 0) {
#pragma unroll 1
        for (; i + 3 * (u64)threads < whole; i += 4 * (u64)threads) {
            Quad v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = load<Quad>(from + (i + k * threads) * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) store(to + (i + k * threads) * 16, v[k]);
        }
    }
#pragma unroll 1
    for (; i * 16 < bytes; i += threads) store16(to + i * 16, bytes - i * 16, load16(from + i * 16, bytes - i * 16));
}

// Words of a block that its threads wait for.
DEVICE void set(u32 &word, u32 value) { *(volatile u32 *)&word = value; }
DEVICE u32 read(const u32 &word) { return *(const volatile u32 *)&word; }

// The words of this thread's peer (thread p asks for rank p).
DEVICE u64 word_to(const MoveArgs &a) { return thread_index() < a.comm.ranks ? a.parts[thread_index()].send_word : 0; }
DEVICE u64 word_from(const MoveArgs &a) { return thread_index() < a.comm.ranks ? a.parts[thread_index()].recv_word : 0; }
