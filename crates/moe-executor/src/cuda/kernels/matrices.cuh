// Products of f16 or bf16 matrices on tensor cores, and the copies to shared memory for them. For 8.0 and later.
#pragma once
#include "intrinsics.cuh"

#if __CUDA_ARCH__ >= 800
// Two numbers rounded to half precision; `low` is in the low 16 bits.
__device__ inline unsigned halves(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// 2 to the power x; -INFINITE yields 0.
__device__ inline float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// c (16 x 8, f32) += a (16 x 16, f16) * b (16 x 8, f16). With `group` = lane / 4 and `in_group` = lane % 4, a lane has
//   a: row group at columns 2 in_group, + 1; row group + 8; the same rows plus 8 columns
//   b: column group at rows 2 in_group, + 1; then plus 8 rows
//   c: row group at columns 2 in_group, + 1; then row group + 8
__device__ inline void mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for bf16.
__device__ inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 halves in shared memory. Lane 8 i + r has the address of row r of matrix i, and gets of each matrix the
// elements 2 in_group, + 1 of row group.
__device__ inline void load_matrices(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// The same with each matrix transposed.
__device__ inline void load_transposed(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// Copies `bytes` bytes, 0 or 16, to shared memory and extends them with zeros to 16. Both addresses are multiples of 16.
__device__ inline void copy_or_zero(unsigned to, const void* from, unsigned bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// The halves `odd` (0: the low ones, 1: the high ones) of two registers.
template <unsigned odd>
__device__ inline unsigned pair_of(unsigned a, unsigned b) {
    return __byte_perm(a, b, odd ? 0x7632 : 0x5410);
}
#endif
