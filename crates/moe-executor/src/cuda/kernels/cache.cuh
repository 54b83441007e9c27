// Rows of the KV cache in the types of kv_cache/params.rs, with the memory layout of ggml.
#pragma once
#include "intrinsics.cuh"

// Types of the cache; the numbers are those of launch/attention.rs.
enum : unsigned { CACHE_F32, CACHE_F16, CACHE_Q8_0 };

__device__ inline unsigned short half_bits(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Readers of the elements of a head from element `first` on, four at a time. `first` is a multiple of 4, and of 32 for Q8_0.
struct F32Row {
    const float4* at;
    __device__ F32Row(const void* cache, size_t first, unsigned) : at((const float4*)((const float*)cache + first)) {}
    __device__ float4 operator[](unsigned four) const { return at[four]; }
};

struct F16Row {
    const uint2* at;
    __device__ F16Row(const void* cache, size_t first, unsigned) : at((const uint2*)((const unsigned short*)cache + first)) {}
    __device__ float4 operator[](unsigned four) const {
        const uint2 bits = at[four];
        return {half_to_float(bits.x), half_to_float(bits.x >> 16), half_to_float(bits.y), half_to_float(bits.y >> 16)};
    }
};

// Blocks of 34 bytes: a scale in half precision and 32 codes. Blocks are aligned to two bytes only.
struct Q8Row {
    const byte* at;
    __device__ Q8Row(const void* cache, size_t first, unsigned) : at((const byte*)cache + first / 32 * 34) {}
    __device__ float4 operator[](unsigned four) const {
        const unsigned short* block = (const unsigned short*)(at + four / 8 * 34);
        const float scale = half_to_float(block[0]);
        const unsigned low = block[1 + four % 8 * 2], high = block[2 + four % 8 * 2];
        const auto code = [](unsigned bits) { return float((signed char)bits); };
        return {scale * code(low), scale * code(low >> 8), scale * code(high), scale * code(high >> 8)};
    }
};

// A reader for any type, for caches whose keys and values have different types.
struct AnyRow {
    const void* cache;
    size_t first;
    unsigned type;
    __device__ AnyRow(const void* cache, size_t first, unsigned type) : cache(cache), first(first), type(type) {}
    __device__ float4 operator[](unsigned four) const {
        if (type == CACHE_F16) return F16Row(cache, first, type)[four];
        if (type == CACHE_Q8_0) return Q8Row(cache, first, type)[four];
        return F32Row(cache, first, type)[four];
    }
};
