// Matrix-vector products: a warp computes a few rows of weights; its lanes process the units of a row in turn.
#pragma once
#include "entries.cuh"
#include "weights.cuh"

// Grids assume VEC_BLOCKS resident blocks per multiprocessor. With one register more, some blocks would run in a second round.
enum : unsigned { VEC_WARPS = 8, VEC_THREADS = VEC_WARPS * WARP, VEC_BLOCKS = 4 };

// One row of activations per matrix. It is already quantized, or each block quantizes it if `quantized` is null. Blocks (x, `entry`)
// divide the rows of the entry. With GLU, a warp computes the same row of gate and up.
template <class W, unsigned ROWS, bool GLU>
__device__ inline void mat_vec_one(
    const byte* weights, const byte* up, const unsigned long long* table, const int* ids, size_t expert_size, unsigned row_size,
    const float* bias, const float* up_bias, const float* x, const void* quantized, unsigned n_source, unsigned rows_per,
    unsigned n_in, unsigned n_out, unsigned glu, float* out, Start start, unsigned entry
) {
    extern __shared__ int4 shared[];  // (n_in) codes, (n_in / 32) groups
    const unsigned lane = threadIdx.x % WARP;
    // The previous kernel may select the matrix, unless there is only one.
    const bool early = !ids && !table;
    if (!early) {
        follow_previous(start);
    }
    const size_t expert = ids ? ids[entry] : 0;
    // Skip an entry without a matrix.
    if (table && table[entry] == 0) return;
    const byte* matrices[2] = {table ? (const byte*)table[entry] : weights + expert * expert_size, up + expert * expert_size};
    const size_t row_of_x = entry / rows_per;
    out += size_t(entry) * n_out;

    const unsigned units = (n_in + W::UNIT - 1) / W::UNIT;
    const unsigned sets = GLU ? n_out : (n_out + ROWS - 1) / ROWS, step = gridDim.x * VEC_WARPS;
    const auto load = [&](typename W::Raw(&raw)[ROWS], unsigned set, unsigned u) {
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) {
            const unsigned row = GLU ? set : min(set * ROWS + r, n_out - 1);
            raw[r] = W::load(matrices[GLU ? r : 0] + size_t(row) * row_size, u, n_in);
        }
    };

    // Prefetch one unit ahead, also across rows. The first load is in flight while the activations are quantized.
    typename W::Raw next[ROWS];
    unsigned set = blockIdx.x * VEC_WARPS + threadIdx.x / WARP;
    if (set < sets && lane < units) load(next, set, lane);
    if (early) {
        follow_previous(start);
    }

    typename W::Source source;
    if constexpr (W::QUANTIZED) {
        Group* groups = (Group*)((signed char*)shared + n_in);
        if (quantized) copy_row(Activations(quantized, n_source, n_in), row_of_x, shared, groups);
        else quantize_row(x + row_of_x * n_in, n_in, shared, groups);
        __syncthreads();
        source = {shared, groups};
    } else {
        source = {x + row_of_x * n_in};
    }

    for (; set < sets; set += step) {
        float sums[ROWS] = {};
        for (unsigned first = 0; first < units; first += WARP) {
            const unsigned u = first + lane;
            typename W::Raw raw[ROWS];
#pragma unroll
            for (unsigned r = 0; r < ROWS; r++) raw[r] = next[r];
            const bool last = first + WARP >= units;
            const unsigned next_set = last ? set + step : set, next_unit = last ? lane : u + WARP;
            if (next_set < sets && next_unit < units) load(next, next_set, next_unit);
            if (u < units) {
                const typename W::Input in = W::input(source, u, n_in);
#pragma unroll
                for (unsigned r = 0; r < ROWS; r++) {
                    typename W::Decoded decoded;
                    W::decode(raw[r], u, decoded);
                    sums[r] += W::dot(decoded, in);
                }
            }
        }
#pragma unroll
        for (unsigned r = 0; r < ROWS; r++) sums[r] = warp_sum(sums[r]);
        if (GLU) {
            if (lane == 0) {
                const size_t at = expert * n_out + set;
                out[set] = activate_any(glu, sums[0] + (bias ? bias[at] : 0), sums[ROWS - 1] + (up_bias ? up_bias[at] : 0));
            }
        } else {
#pragma unroll
            for (unsigned r = 0; r < ROWS; r++) {
                const unsigned row = set * ROWS + r;
                if (lane == r && row < n_out) {
                    store(out + row, sums[r] + (bias ? bias[expert * n_out + row] : 0), glu);
                }
            }
        }
    }
}

// A few rows of activations per matrix: weights are decoded once for TOKENS rows. Blocks (x, y, z) compute the entries of matrix y from
// TOKENS · z on.
template <class W, unsigned TOKENS>
__device__ inline void mat_vec_several(
    const byte* weights, size_t expert_size, unsigned row_size, const float* bias, const float* x, const void* quantized,
    unsigned n_source, const Entries& entries, unsigned n_in, unsigned n_out, unsigned glu, float* out
) {
    constexpr unsigned ROWS = 2;
    const Activations activations(quantized, n_source, n_in);
    const unsigned lane = threadIdx.x % WARP, expert = blockIdx.y;
    const unsigned begin = entries.begin(expert), end = entries.end(expert);
    weights += expert * expert_size;
    if (bias) bias += size_t(expert) * n_out;

    const unsigned units = (n_in + W::UNIT - 1) / W::UNIT;
    const unsigned sets = (n_out + ROWS - 1) / ROWS;
    for (unsigned set = blockIdx.x * VEC_WARPS + threadIdx.x / WARP; set < sets; set += gridDim.x * VEC_WARPS) {
        for (unsigned chunk = begin + blockIdx.z * TOKENS; chunk < end; chunk += gridDim.z * TOKENS) {
            // The next unit is loaded while this one is multiplied.
            typename W::Raw next[ROWS];
            const auto load = [&](unsigned u) {
#pragma unroll
                for (unsigned r = 0; r < ROWS; r++) {
                    next[r] = W::load(weights + size_t(min(set * ROWS + r, n_out - 1)) * row_size, u, n_in);
                }
            };
            if (lane < units) load(lane);
            unsigned entry[TOKENS];
            typename W::Source sources[TOKENS];
#pragma unroll
            for (unsigned t = 0; t < TOKENS; t++) {
                // After the end, the last entry is repeated and not stored.
                entry[t] = entries.at(min(chunk + t, end - 1));
                sources[t] = W::source(x, activations, entries.row(entry[t]));
            }
            float sums[ROWS][TOKENS] = {};
            for (unsigned u = lane; u < units; u += WARP) {
                typename W::Decoded decoded[ROWS];
#pragma unroll
                for (unsigned r = 0; r < ROWS; r++) W::decode(next[r], u, decoded[r]);
                if (u + WARP < units) load(u + WARP);
#pragma unroll
                for (unsigned t = 0; t < TOKENS; t++) {
                    const typename W::Input in = W::input(sources[t], u, n_in);
#pragma unroll
                    for (unsigned r = 0; r < ROWS; r++) sums[r][t] += W::dot(decoded[r], in);
                }
            }
#pragma unroll
            for (unsigned r = 0; r < ROWS; r++) {
                const unsigned row = set * ROWS + r;
#pragma unroll
                for (unsigned t = 0; t < TOKENS; t++) {
                    const float sum = warp_sum(sums[r][t]);
                    if (lane == t && chunk + t < end && row < n_out) {
                        store(out + size_t(entry[t]) * n_out + row, sum + (bias ? bias[row] : 0), glu);
                    }
                }
            }
        }
    }
}
