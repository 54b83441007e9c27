// Activations as 8-bit integers: 32 of them share a scale, amax / 127; the sum of each 16 codes is kept for formats with a
// minimum or an offset. The numbers are those of ggml's q8_1; the codes of a row lie together, and so do its scales.
#pragma once
#include "intrinsics.cuh"

// Scale of 32 activations, and the sums of their first and last 16 codes in the low and the high half.
struct alignas(8) Group {
    float scale;
    unsigned sums;
    __device__ int sum(unsigned half) const { return int(short(sums >> 16 * half)); }
};

// Rows of quantized activations in memory: the codes of all rows, then their groups.
struct Activations {
    const signed char* codes;
    const Group* groups;
    unsigned n_in;
    __device__ Activations(const void* p, size_t rows, unsigned n_in)
        : codes((const signed char*)p), groups((const Group*)(codes + rows * n_in)), n_in(n_in) {}
    __device__ const int4* codes_of(size_t row) const { return (const int4*)(codes + row * n_in); }
    __device__ const Group* groups_of(size_t row) const { return groups + row * (n_in / 32); }
};

// Quantizes the four activations of each lane, eight lanes a group. `i` counts fours; all lanes of the warp take part, those
// past the end with zeros and `store` false.
__device__ inline void quantize_four(float4 x, unsigned i, bool store, int* codes, Group* groups) {
    const auto magnitude = [](float value) { return __float_as_uint(value) & 0x7fffffff; };
    // As integers, so that a NaN is the largest of all and stays.
    unsigned most = max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
#pragma unroll
    for (unsigned step = 1; step < 8; step *= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
    const float amax = __uint_as_float(most);
    const float inverse = most == 0 ? 0 : __fdiv_rn(127, amax);
    const int a = __float2int_rn(x.x * inverse), b = __float2int_rn(x.y * inverse);
    const int c = __float2int_rn(x.z * inverse), d = __float2int_rn(x.w * inverse);
    int sum = a + b + c + d;
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    const int second = __shfl_down_sync(ALL_LANES, sum, 4);
    if (!store) return;
    codes[i] = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
    // In half precision, as ggml keeps it: near ties of a router fall as they do there.
    if (i % 8 == 0) groups[i / 8] = {round_to_half(__fdiv_rn(amax, 127)), (unsigned(sum) & 0xffff) | unsigned(second) << 16};
}

// Quantizes a row of `n` activations with all threads of the block.
__device__ inline void quantize_row(const float* x, unsigned n, int* codes, Group* groups) {
    const unsigned fours = n / 4;
    for (unsigned i = threadIdx.x; i - threadIdx.x % WARP < fours; i += blockDim.x) {
        const bool inside = i < fours;
        quantize_four(inside ? ((const float4*)x)[i] : float4{}, i, inside, codes, groups);
    }
}
