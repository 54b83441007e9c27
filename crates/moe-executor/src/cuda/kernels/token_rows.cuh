// Products of one token with up to three matrices, such as queries, keys and values. The rows of a block are copied to shared memory while
// the previous kernel runs.
#pragma once
#include "entries.cuh"
#include "lanes.cuh"
#include "pipeline.cuh"

enum : unsigned { ROWS_PER_WARP = 2 };  // as in launch/token_rows.rs

// A matrix, unless `n_out` is 0.
struct OneMatrix {
    const byte* weights;
    const float* bias;
    float* out;
    unsigned n_out;
};

// A warp computes ROWS_PER_WARP rows, which have `segment` bytes, the activations `staged` bytes; both are multiples of 16. The blocks of
// each matrix follow those of the one before. The activations are already quantized, or each block quantizes `x` if `quantized` is null.
template <class V>
__device__ inline void rows_of_token(
    const OneMatrix (&matrices)[3], unsigned row_size, const float* x, const void* quantized, unsigned n_in, unsigned segment,
    unsigned staged, Start start
) {
    extern __shared__ int4 shared[];  // activations; then the rows of each warp
    __shared__ Arrival arrivals[WARP];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, rows = blockDim.x / WARP * ROWS_PER_WARP;
    OneMatrix matrix = matrices[0];
    unsigned first_row = blockIdx.x * rows;
#pragma unroll
    for (unsigned i = 1; i < 3; i++) {
        if (first_row < matrix.n_out) break;
        first_row -= (matrix.n_out + rows - 1) / rows * rows;
        matrix = matrices[i];
    }
    const unsigned row = first_row + warp * ROWS_PER_WARP;
    const byte* from = matrix.weights + size_t(row) * row_size;
    const unsigned begin = unsigned(size_t(from)) % 16, memory = staged + warp * segment;
    const unsigned to = unsigned(__cvta_generic_to_shared(shared)) + memory;
    if (row < matrix.n_out) {
        const unsigned bytes = min(unsigned(ROWS_PER_WARP), matrix.n_out - row) * row_size;
        if (!HAS_ENGINE) {
            copy_ahead(to, from, bytes);
            end_batch();
        } else if (lane == 0) {
            arrivals[warp].begin();
            arrivals[warp].expect(Arrival::around(from, bytes));
            arrivals[warp].copy(to, from, bytes);
        }
    }

    follow_previous(start);
    if (quantized) V::stage(quantized, n_in, shared);
    else V::quantize(x, n_in, shared);
    __syncthreads();
    if (row >= matrix.n_out) return;
    wait_for_batches<0>();
    arrivals[warp].wait();
    const V kind;
    const typename V::Staged in = V::at(shared, n_in, 0, n_in);
    const unsigned* words = (const unsigned*)((const byte*)shared + memory);
    float sums[ROWS_PER_WARP] = {};
    for (unsigned u = lane; u < n_in / V::UNIT; u += WARP) {
#pragma unroll
        for (unsigned r = 0; r < ROWS_PER_WARP; r++) sums[r] += kind.dot(words, begin + r * row_size, u, in, u);
    }
    const float sum = warp_sum_of_two(sums[0], sums[1]);
    const unsigned mine = row + lane / 16;
    if (lane % 16 == 0 && mine < matrix.n_out) matrix.out[mine] = sum + (matrix.bias ? matrix.bias[mine] : 0);
}
