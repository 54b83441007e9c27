// Matrix-matrix products with weights in F16 or BF16 on tensor cores. For 8.0 and later.
#pragma once
#include "matrices.cuh"
#include "tile_entries.cuh"
#include "weights.cuh"

#if __CUDA_ARCH__ >= 800
__device__ inline void mma(Half, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_f16(c, a, b0, b1); }
__device__ inline void mma(Brain, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_bf16(c, a, b0, b1); }

// 64 elements of a row in eight chunks of 16 bytes. Chunk c of row r is at c ^ r % 8, so that neither copies nor `load_matrices` have
// bank conflicts.
struct alignas(128) StepRow {
    uint4 chunks[8];
};

// Tiles of `M` rows of weights and `N` rows of activations. Block (x, y, z) computes rows M x ..+ M of matrix y with every
// gridDim.z-th tile of its entries, starting with tile z. WM x WN warps; steps of 64 elements are copied `STAGES` - 1 ahead.
//
// `x`: rows of activations in the type of the weights. `n_in` is a multiple of 8. Dynamic shared memory: STAGES (M + N) rows of
// a step.
template <class W, unsigned M, unsigned N, unsigned WM, unsigned WN, unsigned STAGES>
__device__ inline void mat_mul_16_bit(
    const byte* weights, size_t expert_size, unsigned row_size, const float* bias, const byte* x, const Entries& entries,
    unsigned n_in, unsigned n_out, unsigned glu, float* out
) {
    using E = typename W::Element;
    enum : unsigned { STEP = 64, PARTS = STEP / 16, ROW = sizeof(StepRow), STAGE = (M + N) * ROW, LOADERS = WM * WN * WARP / 8 };
    enum : unsigned { TILES_M = M / WM / 16, TILES_N = N / WN / 8 };
    extern __shared__ StepRow stages[];
    __shared__ TileEntries<N> chosen;
    const unsigned expert = blockIdx.y, first_row = blockIdx.x * M;
    const unsigned begin = entries.begin(expert), end = entries.end(expert);
    weights += expert * expert_size;
    if (bias) bias += size_t(expert) * n_out;

    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned row = warp % WM * (M / WM), token = warp / WM * (N / WN);
    const unsigned base = shared_address(stages);
    // Addresses of this lane for `load_matrices` in the first part of the first stage.
    const unsigned left = (row + lane % 16) * ROW + (lane / 16 ^ lane % 8) * 16;
    const unsigned right = (M + token + lane % 8 + lane / 16 * 8) * ROW + (lane / 8 % 2 ^ lane % 8) * 16;

    // Eight threads copy a row.
    const unsigned chunk = threadIdx.x % 8, loader = threadIdx.x / 8, steps = (n_in + STEP - 1) / STEP;
    const unsigned to = base + loader * ROW + (chunk ^ loader % 8) * 16;
    const byte* mine[M / LOADERS];
#pragma unroll
    for (unsigned i = 0; i < M / LOADERS; i++) {
        mine[i] = weights + size_t(min(first_row + loader + i * LOADERS, n_out - 1)) * row_size + chunk * 16;
    }

    for (unsigned first = begin + blockIdx.z * N; first < end; first += gridDim.z * N) {
        __syncthreads();
        chosen.fill(entries, first, end);
        __syncthreads();
        const byte* inputs[(N + LOADERS - 1) / LOADERS];
#pragma unroll
        for (unsigned i = 0; i < (N + LOADERS - 1) / LOADERS; i++) {
            const unsigned t = loader + i * LOADERS;
            inputs[i] = x + (size_t(chosen.row[N % LOADERS == 0 ? t : min(t, N - 1)]) * n_in + chunk * 8) * 2;
        }
        const auto copy = [&](unsigned step, unsigned stage) {
            const unsigned at = step * STEP, bytes = at + chunk * 8 < n_in ? 16 : 0;
            stage = stage * STAGE + to;
#pragma unroll
            for (unsigned i = 0; i < M / LOADERS; i++) copy_or_zero(stage + i * LOADERS * ROW, mine[i] + size_t(at) * 2, bytes);
#pragma unroll
            for (unsigned i = 0; i < (N + LOADERS - 1) / LOADERS; i++) {
                if (N % LOADERS > 0 && loader + i * LOADERS >= N) continue;
                copy_or_zero(stage + (M + i * LOADERS) * ROW, inputs[i] + size_t(at) * 2, bytes);
            }
        };
        // The operands of a part of a step are loaded while the previous part is computed.
        unsigned a[2][TILES_M][4], b[2][TILES_N / 2][4];
        const auto load = [&](unsigned which, unsigned stage, unsigned part) {
            const unsigned from = base + stage * STAGE;
#pragma unroll
            for (unsigned m = 0; m < TILES_M; m++) load_matrices(a[which][m], from + (left ^ part * 32) + m * 16 * ROW);
#pragma unroll
            for (unsigned n = 0; n < TILES_N / 2; n++) load_matrices(b[which][n], from + (right ^ part * 32) + n * 16 * ROW);
        };

        float sums[TILES_M][TILES_N][4] = {};
#pragma unroll
        for (unsigned s = 0; s < STAGES - 1; s++) {
            if (s < steps) copy(s, s);
            end_batch();
        }
        wait_for_batches<STAGES - 2>();
        __syncthreads();
        load(0, 0, 0);
        unsigned stage = 0, last = STAGES - 1;
        for (unsigned step = 0; step < steps; step++) {
            if (step + STAGES - 1 < steps) copy(step + STAGES - 1, last);
            end_batch();
            last = stage;
            const unsigned next = stage == STAGES - 1 ? 0 : stage + 1;
#pragma unroll
            for (unsigned p = 0; p < PARTS; p++) {
                if (p < PARTS - 1) {
                    load((p + 1) % 2, stage, p + 1);
                } else {
                    // The next step is there, and no warp will read this one.
                    wait_for_batches<STAGES - 2>();
                    __syncthreads();
                    load(0, next, 0);
                }
#pragma unroll
                for (unsigned m = 0; m < TILES_M; m++) {
#pragma unroll
                    for (unsigned n = 0; n < TILES_N; n++) {
                        const unsigned(&two)[4] = b[p % 2][n / 2];
                        mma(E(), sums[m][n], a[p % 2][m], two[n % 2 * 2], two[n % 2 * 2 + 1]);
                    }
                }
            }
            stage = next;
        }

        const unsigned group = lane / 4, in_group = lane % 4;
#pragma unroll
        for (unsigned n = 0; n < TILES_N; n++) {
#pragma unroll
            for (unsigned e = 0; e < 2; e++) {
                const unsigned t = token + n * 8 + in_group * 2 + e;
                if (first + t >= end) continue;
                float* const row_out = out + size_t(chosen.entry[t]) * n_out;
#pragma unroll
                for (unsigned m = 0; m < 2 * TILES_M; m++) {
                    const unsigned at = first_row + row + m * 8 + group;
                    if (at < n_out) store(row_out + at, sums[m / 2][n][m % 2 * 2 + e] + (bias ? bias[at] : 0), glu);
                }
            }
        }
    }
}
#endif
