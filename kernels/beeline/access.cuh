// The caller's memory at any alignment: 8 and 16 bytes at a time, never a byte beyond the end.
#pragma once
#include "layout.cuh"

DEVICE u64 load8(u64 at, u64 left) {
    if (at % 8 == 0 && left >= 8) return load<u64>(at);
    u64 v = 0;
    if (at % 4 == 0 && left >= 8) return (u64)load<u32>(at) | (u64)load<u32>(at + 4) << 32;
    for (u32 i = 0; i < 8 && i < left; i++) v |= (u64)load<u8>(at + i) << (8 * i);
    return v;
}
DEVICE void store8(u64 at, u64 left, u64 v) {
    if (at % 8 == 0 && left >= 8) {
        store<u64>(at, v);
    } else if (at % 4 == 0 && left >= 8) {
        store<u32>(at, (u32)v);
        store<u32>(at + 4, (u32)(v >> 32));
    } else {
        for (u32 i = 0; i < 8 && i < left; i++) store<u8>(at + i, (u8)(v >> (8 * i)));
    }
}
DEVICE Quad load16(u64 at, u64 left) {
    if (at % 16 == 0 && left >= 16) return load<Quad>(at);
    u64 a = load8(at, left), b = left > 8 ? load8(at + 8, left - 8) : 0;
    return Quad{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
DEVICE void store16(u64 at, u64 left, Quad v) {
    if (at % 16 == 0 && left >= 16) {
        store(at, v);
        return;
    }
    store8(at, left, (u64)v.x | (u64)v.y << 32);
    if (left > 8) store8(at + 8, left - 8, (u64)v.z | (u64)v.w << 32);
}
DEVICE u64 low(Quad v) { return (u64)v.x | (u64)v.y << 32; }
DEVICE u64 high(Quad v) { return (u64)v.z | (u64)v.w << 32; }
DEVICE u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
