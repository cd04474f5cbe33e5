// Element types and reduction operators. Elements are reduced in the order of ranks, 16-bit and 8-bit
// floats in 32-bit, so that the result depends on nothing but the inputs and the number of ranks.
#pragma once
#include "layout.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// FP8 by the device's own conversions: to nearest even, saturating.
#define FP8(NAME, PTX)                                                                       \
    struct NAME : FloatOps<float> {                                                          \
        typedef u8 Bits;                                                                     \
        static DEVICE float decode(Bits v) {                                                 \
            u32 two;                                                                         \
            asm("cvt.rn.f16x2." PTX " %0, %1;" : "=r"(two) : "h"((u16)v));                   \
            return f16_f32((u16)two);                                                        \
        }                                                                                    \
        static DEVICE Bits encode(float f) {                                                 \
            u16 two;                                                                         \
            asm("cvt.rn.satfinite." PTX ".f32 %0, %1, %2;" : "=h"(two) : "f"(0.f), "f"(f));  \
            return (Bits)two;                                                                \
        }                                                                                    \
    };
#else
// FP8 in software: exact, and the same on every device (E4M3 has no infinity and one NaN per sign).
template <int EXP, int MAN, bool INF>
struct Fp8 {
    static constexpr int BIAS = (1 << (EXP - 1)) - 1;
    static DEVICE float decode(u8 v) {
        u32 sign = (u32)(v & 0x80) << 24, magnitude = v & 0x7f;
        if (INF ? magnitude > 0x7c : magnitude == 0x7f) return bits_f32(sign | 0x7fc00000u);
        if (INF && magnitude == 0x7c) return bits_f32(sign | 0x7f800000u);
        // The bits as a float are too small by 2^(127 - BIAS); subnormals come out right by the product.
        float f = times(bits_f32(magnitude << (23 - MAN)), bits_f32((u32)(127 + 127 - BIAS) << 23));
        return bits_f32(f32_bits(f) | sign);
    }
    // Rounds to nearest even; what is too large becomes the largest finite number.
    static DEVICE u8 encode(float f) {
        const u32 MAX = INF ? 0x7b : 0x7e;
        u32 bits = f32_bits(f), sign = (bits >> 24) & 0x80, a = bits & 0x7fffffffu;
        if (a > 0x7f800000u) return (u8)(sign | (INF ? 0x7e : 0x7f));
        u32 v;
        if (a < ((u32)(127 - BIAS + 1) << 23)) {
            // Subnormal: adding 2^(23 - MAN + 1 - BIAS) leaves the rounded steps in the low bits.
            u32 magic = (u32)(127 + 23 - MAN + 1 - BIAS) << 23;
            v = f32_bits(plus(bits_f32(a), bits_f32(magic))) - magic;
        } else {
            u32 odd = (a >> (23 - MAN)) & 1;
            v = ((a + (1u << (22 - MAN)) - 1 + odd) >> (23 - MAN)) - ((u32)(127 - BIAS) << MAN);
        }
        return (u8)(sign | (v > MAX ? MAX : v));
    }
};
#endif

template <class S, class A>
struct Int {
    typedef S Bits;
    typedef A Acc;
    static DEVICE Acc decode(Bits v) { return (Acc)v; }
    static DEVICE Bits encode(Acc a) { return (Bits)a; }
    static DEVICE Acc sum(Acc a, Acc b) { return (Acc)((u64)a + (u64)b); }
    static DEVICE Acc product(Acc a, Acc b) { return (Acc)((u64)a * (u64)b); }
    // Of a wrapped sum, as the type would have wrapped it; truncates.
    static DEVICE Acc divide(Acc a, u32 n) { return (Acc)((S)a / (S)n); }
    static DEVICE Acc least(Acc a, Acc b) { return a < b ? a : b; }
    static DEVICE Acc greatest(Acc a, Acc b) { return a > b ? a : b; }
};
template <class F>
struct FloatOps {
    typedef F Acc;
    static DEVICE Acc sum(Acc a, Acc b) { return plus(a, b); }
    static DEVICE Acc product(Acc a, Acc b) { return times(a, b); }
    static DEVICE Acc divide(Acc a, u32 n) { return over(a, (Acc)n); }
    static DEVICE Acc least(Acc a, Acc b) { return min_of(a, b); }
    static DEVICE Acc greatest(Acc a, Acc b) { return max_of(a, b); }
};

typedef Int<i8, i32> I8;
typedef Int<u8, u32> U8;
typedef Int<i32, i32> I32;
typedef Int<u32, u32> U32;
typedef Int<i64, i64> I64;
typedef Int<u64, u64> U64;
struct F16 : FloatOps<float> {
    typedef u16 Bits;
    static DEVICE float decode(Bits v) { return f16_f32(v); }
    static DEVICE Bits encode(float a) { return f32_f16(a); }
};
struct BF16 : FloatOps<float> {
    typedef u16 Bits;
    static DEVICE float decode(Bits v) { return bits_f32((u32)v << 16); }
    static DEVICE Bits encode(float a) { return f32_bf16(a); }
};
struct F32 : FloatOps<float> {
    typedef u32 Bits;
    static DEVICE float decode(Bits v) { return bits_f32(v); }
    static DEVICE Bits encode(float a) { return f32_bits(a); }
};
struct F64 : FloatOps<double> {
    typedef u64 Bits;
    static DEVICE double decode(Bits v) { return bits_f64(v); }
    static DEVICE Bits encode(double a) { return f64_bits(a); }
};
#ifdef FP8
FP8(E4M3, "e4m3x2")
FP8(E5M2, "e5m2x2")
#else
struct E4M3 : FloatOps<float> {
    typedef u8 Bits;
    static DEVICE float decode(Bits v) { return Fp8<4, 3, false>::decode(v); }
    static DEVICE Bits encode(float a) { return Fp8<4, 3, false>::encode(a); }
};
struct E5M2 : FloatOps<float> {
    typedef u8 Bits;
    static DEVICE float decode(Bits v) { return Fp8<5, 2, true>::decode(v); }
    static DEVICE Bits encode(float a) { return Fp8<5, 2, true>::encode(a); }
};
#endif

enum { SUM, PROD, MIN, MAX };

// How inputs are weighed and sums finished: pre-multiplied sum, average. Only `SUM` looks at it.
struct Weigh {
    u64 scalar;   // bits of the element type
    u32 multiply; // each input is multiplied by `scalar` first
    u32 divide;   // the sum is divided by this, unless 0
};

template <class T>
DEVICE Weigh weigh(const ReduceArgs &a) {
    return Weigh{a.multiply == 2 ? (u64)load<typename T::Bits>(a.scalar) : a.scalar, a.multiply, a.divide};
}

// The elements of eight bytes while they are reduced.
template <class T, int OP>
struct Unit {
    static constexpr int N = 8 / sizeof(typename T::Bits);
    typename T::Acc a[N];

    static DEVICE typename T::Acc element(u64 v, int i, const Weigh &w) {
        typename T::Acc e = T::decode((typename T::Bits)(v >> (8 * sizeof(typename T::Bits) * i) % 64));
        if (OP == SUM && w.multiply) e = T::product(e, T::decode((typename T::Bits)w.scalar));
        return e;
    }
    DEVICE void first(u64 v, const Weigh &w) {
#pragma unroll
        for (int i = 0; i < N; i++) a[i] = element(v, i, w);
    }
    DEVICE void next(u64 v, const Weigh &w) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            typename T::Acc e = element(v, i, w);
            a[i] = OP == SUM    ? T::sum(a[i], e)
                   : OP == PROD ? T::product(a[i], e)
                   : OP == MIN  ? T::least(a[i], e)
                                : T::greatest(a[i], e);
        }
    }
    DEVICE u64 result(const Weigh &w) {
        u64 v = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (OP == SUM && w.divide) a[i] = T::divide(a[i], w.divide);
            typename T::Bits bits = T::encode(a[i]);
            u64 wide = sizeof(bits) == 1 ? (u8)bits : sizeof(bits) == 2 ? (u16)bits : sizeof(bits) == 4 ? (u32)bits : (u64)bits;
            v |= wide << (8 * sizeof(bits) * i) % 64;
        }
        return v;
    }
};
