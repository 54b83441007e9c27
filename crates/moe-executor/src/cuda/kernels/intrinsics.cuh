// Instructions without an intrinsic in NVRTC, which has no CUDA headers.
#pragma once
#include "pipeline.cuh"

// Loads 16 bytes that are read once, without allocation in L1. `p` is aligned to 16 bytes.
__device__ inline uint4 load_once(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

// The same at this place in the program: before the wait for the previous kernel.
__device__ inline uint4 load_now(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ inline float half_to_float(unsigned bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}

// The bits of a number in half precision.
__device__ inline unsigned half_of(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline float round_to_half(float x) { return half_to_float(half_of(x)); }

#if __CUDA_ARCH__ >= 800
// c (16 x 8) += a (16 x 32) * b (32 x 8), signed bytes. With `group` = lane / 4 and `in_group` = lane % 4, a lane has
//   a: rows group, group + 8, each at columns 4 in_group ..+ 4; then the same rows plus 16 columns
//   b: column group at rows 4 in_group ..+ 4; then plus 16 rows
//   c: row group at columns 2 in_group, + 1; then row group + 8
__device__ inline void mma_32(int (&c)[4], const int (&a)[4], const int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with 16 columns of a and 16 rows of b: the first or the second halves of the operands of `mma_32`.
__device__ inline void mma_16(int (&c)[4], int a0, int a1, int b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif
