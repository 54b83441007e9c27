// The combination of the splits of attention, and stores to the KV cache.
#include "attention.cuh"

// Combines the splits of a row. Block: (token, head).
KERNEL attention_combine(const float* parts, const float* __restrict__ sinks, unsigned n_head, unsigned head_dim, unsigned splits, float* out, Start start) {
    follow_previous(start);
    extern __shared__ float weights[];
    const size_t row = blockIdx.x, rows = gridDim.x;
    const float* states = parts + rows * splits * head_dim + 2 * row * splits;
    const unsigned lane = threadIdx.x % WARP;
    // Every warp computes the same largest score and total.
    float top = -INFINITE, total = 0.0f;
    for (unsigned i = lane; i < splits; i += WARP) top = fmaxf(top, states[2 * i]);
    top = warp_max(top);
    for (unsigned i = lane; i < splits; i += WARP) total += states[2 * i + 1] * expf(states[2 * i] - top);
    total = warp_sum(total);
    for (unsigned i = threadIdx.x; i < splits; i += blockDim.x) weights[i] = expf(states[2 * i] - top);
    __syncthreads();
    const float factor = closing_factor(top, total, sinks, row % n_head);
    for (unsigned i = threadIdx.x; i < head_dim; i += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (unsigned split = 0; split < splits; ++split) sum = fmaf(weights[split], parts[(row * splits + split) * head_dim + i], sum);
        out[row * head_dim + i] = sum * factor;
    }
}

// Stores of rows of keys or values as rows `at` of `out`, which has `width` columns. Block: (row, part of its columns).
__device__ size_t stored_at(const unsigned* at, unsigned width, unsigned column) { return size_t(at[blockIdx.x]) * width + column; }

KERNEL store_rows_f32(const float* x, const unsigned* at, unsigned width, float* out, Start start) {
    follow_previous(start);
    const unsigned i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < width) out[stored_at(at, width, i)] = x[size_t(blockIdx.x) * width + i];
}

KERNEL store_rows_f16(const float* x, const unsigned* at, unsigned width, unsigned short* out, Start start) {
    follow_previous(start);
    const unsigned i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < width) out[stored_at(at, width, i)] = half_bits(x[size_t(blockIdx.x) * width + i]);
}

// A warp converts a block of 32 elements like the CPU: codes are rounded to the nearest integer, ties to even. `width` is
// a multiple of 32, so that either all or no lanes of a warp have an element.
KERNEL store_rows_q8_0(const float* x, const unsigned* at, unsigned width, byte* out, Start start) {
    follow_previous(start);
    const unsigned i = blockIdx.y * blockDim.x + threadIdx.x, lane = threadIdx.x % WARP;
    if (i >= width) return;
    const float value = x[size_t(blockIdx.x) * width + i];
    // As integers, so that NaN is the largest value and propagates.
    const unsigned most = warp_max(__float_as_uint(value) & 0x7fffffff);
    const float amax = __uint_as_float(most);
    byte* block = out + stored_at(at, width, i) / 32 * 34;
    if (lane == 0) *(unsigned short*)block = half_bits(__fdiv_rn(amax, 127));
    block[2 + lane] = byte(__float2int_rn(value * (most == 0 ? 0 : __fdiv_rn(127, amax))));
}
