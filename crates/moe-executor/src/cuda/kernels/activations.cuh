// Activations as 8-bit integers ("codes"). A group of 32 has a scale, amax / 127, and the sum of each half for formats with a
// minimum or an offset. Values are the same as in ggml's Q8_1, but codes and groups are stored in separate arrays.
#pragma once
#include "intrinsics.cuh"

// Scale of 32 activations, and the sums of their first and last 16 codes in the low and the high 16 bits.
struct alignas(8) Group {
    float scale;
    unsigned sums;
    __device__ int sum(unsigned half) const { return int(short(sums >> 16 * half)); }
    __device__ int sum() const { return int(short(sums)) + (int(sums) >> 16); }
};

// Rows of quantized activations: the codes of all rows, then their groups.
struct Activations {
    const signed char* codes;
    const Group* groups;
    unsigned n_in;
    __device__ Activations(const void* p, size_t rows, unsigned n_in)
        : codes((const signed char*)p), groups((const Group*)(codes + rows * n_in)), n_in(n_in) {}
    __device__ const int4* codes_of(size_t row) const { return (const int4*)(codes + row * n_in); }
    __device__ const Group* groups_of(size_t row) const { return groups + row * (n_in / 32); }
};

// As an integer, so that NaN is the largest value and propagates.
__device__ inline unsigned largest_magnitude(const float4& x) {
    const auto magnitude = [](float value) { return __float_as_uint(value) & 0x7fffffff; };
    return max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
}

// Four activations times `by`, rounded, as bytes.
__device__ inline int four_codes(const float4& x, float by) {
    const int a = __float2int_rn(x.x * by), b = __float2int_rn(x.y * by), c = __float2int_rn(x.z * by), d = __float2int_rn(x.w * by);
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Sixteen quantized activations, half a group. The neighbouring lane has the other half; both lanes must participate.
struct HalfGroup {
    int codes[4];
    float scale;
    int sum;
};

__device__ inline HalfGroup quantize_sixteen(const float4 (&x)[4]) {
    unsigned most = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; i++) most = max(most, largest_magnitude(x[i]));
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 1));
    const float amax = __uint_as_float(most);
    const float inverse = most == 0 ? 0 : __fdiv_rn(127, amax);
    // The scale in half precision like in ggml, so that near ties of a router are decided in the same way.
    HalfGroup half = {{}, round_to_half(__fdiv_rn(amax, 127)), 0};
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        half.codes[i] = four_codes(x[i], inverse);
        half.sum = __dp4a(half.codes[i], 0x01010101, half.sum);
    }
    return half;
}

// Quantizes chunk `i` of the `n` chunks of 16 values in `x`; zeros after the end. Loads bypass L1, which may be stale if the
// kernel started early.
__device__ inline HalfGroup quantize_sixteen_of(const float* x, size_t i, size_t n) {
    float4 four[4] = {};
    if (i < n) {
#pragma unroll
        for (unsigned j = 0; j < 4; j++) four[j] = __ldcg((const float4*)x + 4 * i + j);
    }
    return quantize_sixteen(four);
}

// Stores the scale and the sum of a half group.
__device__ inline void store_group(const HalfGroup& half, size_t i, Group* groups) {
    if (i % 2 == 0) groups[i / 2].scale = half.scale;
    ((unsigned short*)&groups[i / 2].sums)[i % 2] = half.sum;
}

// Quantizes a row of `n` activations. All threads of the block participate.
__device__ inline void quantize_row(const float* x, unsigned n, int4* codes, Group* groups) {
    const unsigned sixteens = n / 16;
    for (unsigned i = threadIdx.x; i - threadIdx.x % WARP < sixteens; i += blockDim.x) {
        const HalfGroup half = quantize_sixteen_of(x, i, sixteens);
        if (i >= sixteens) continue;
        codes[i] = {half.codes[0], half.codes[1], half.codes[2], half.codes[3]};
        store_group(half, i, groups);
    }
}

// Copies a quantized row. All threads of the block participate.
__device__ inline void copy_row(const Activations& from, size_t row, int4* codes, Group* groups) {
    for (unsigned i = threadIdx.x; i < from.n_in / 32; i += blockDim.x) {
        const int4* source = from.codes_of(row) + 2 * i;
        const int4 a = source[0], b = source[1];
        codes[2 * i] = a;
        codes[2 * i + 1] = b;
        groups[i] = from.groups_of(row)[i];
    }
}

// Four quantized activations; eight consecutive lanes have a group. Only the first of them has `group`.
struct FourOfGroup {
    int codes;
    Group group;
};

// All lanes of the warp must participate.
__device__ inline FourOfGroup quantize_four(const float4& x) {
    unsigned most = largest_magnitude(x);
#pragma unroll
    for (unsigned step = 4; step > 0; step /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
    const float amax = __uint_as_float(most);
    const int codes = four_codes(x, most == 0 ? 0 : __fdiv_rn(127, amax));
    int sum = __dp4a(codes, 0x01010101, 0);
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    const int second = __shfl_xor_sync(ALL_LANES, sum, 4);
    return {codes, {round_to_half(__fdiv_rn(amax, 127)), (unsigned(sum) & 0xffff) | unsigned(second) << 16}};
}

// Quantizes one activation per lane, a group per warp.
__device__ inline void quantize_one(float x, signed char* codes, Group* group) {
    const unsigned most = warp_max(__float_as_uint(x) & 0x7fffffff);
    const float amax = __uint_as_float(most);
    const int code = __float2int_rn(x * (most == 0 ? 0 : __fdiv_rn(127, amax)));
    const unsigned lane = threadIdx.x % WARP;
    codes[lane] = code;
    const int2 sums = sums_of_halves(code);
    if (lane == 0) *group = {round_to_half(__fdiv_rn(amax, 127)), (unsigned(sums.x) & 0xffff) | unsigned(sums.y) << 16};
}
