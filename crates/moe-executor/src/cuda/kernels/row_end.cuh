// How a block of gate and up ends its 32 rows: bias, activation, and the results as they are and quantized.
#pragma once
#include "activations.cuh"
#include "entries.cuh"

// Ends the rows that the block has the products of, one a lane of its first warp: `hidden (k, n_out)`, `codes` and `groups` as in
// `Activations`, or null. `bias` is that of the lane's row.
__device__ inline void end_rows(
    const float (&results)[2][WARP], const float (&bias)[2], unsigned glu, unsigned n_out, float* hidden, signed char* codes,
    Group* groups
) {
    const unsigned lane = threadIdx.x % WARP, row = blockIdx.x * WARP + lane;
    const float value = row < n_out ? activate(glu, results[0][lane] + bias[0], results[1][lane] + bias[1]) : 0;
    const size_t to = size_t(blockIdx.y) * n_out + blockIdx.x * WARP;
    if (row < n_out) hidden[to + lane] = value;
    if (codes) quantize_one(value, codes + to, groups + to / WARP);
}
