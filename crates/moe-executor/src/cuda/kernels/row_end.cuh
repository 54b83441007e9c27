// The end of the 32 rows of a gate-and-up block: bias, activation, and results in f32 and quantized.
#pragma once
#include "activations.cuh"
#include "entries.cuh"

// Stores the rows of the block, one per lane of its first warp, to `hidden (k, n_out)`, and to `codes` and `groups` (see
// `Activations`) unless they are null. `bias` is that of the row of the lane.
__device__ inline void end_rows(
    const float (&results)[2][WARP], const float (&bias)[2], unsigned glu, unsigned n_out, float* hidden, signed char* codes,
    Group* groups
) {
    const unsigned lane = threadIdx.x % WARP, row = blockIdx.x * WARP + lane;
    const float value = row < n_out ? activate_any(glu, results[0][lane] + bias[0], results[1][lane] + bias[1]) : 0;
    const size_t to = size_t(blockIdx.y) * n_out + blockIdx.x * WARP;
    if (row < n_out) hidden[to + lane] = value;
    if (codes) quantize_one(value, codes + to, groups + to / WARP);
}
