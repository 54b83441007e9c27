// Matrix-matrix products with quantized weights on tensor cores. For 8.0 and later.
#pragma once
#include "matrices.cuh"
#include "quantized_tile.cuh"
#include "tile_entries.cuh"

#if __CUDA_ARCH__ >= 800
// Tiles of `M` rows of weights and `N` rows of activations. Block (x, y, z) computes rows M x ..+ M of matrix y with every
// gridDim.z-th tile of its entries, starting with tile z. WM x WN warps. While a step is computed, the weights of the next one are
// loaded to registers and its activations to shared memory. Dynamic shared memory: two steps.
template <class W, unsigned M, unsigned N, unsigned WM, unsigned WN>
__device__ inline void mat_mul_quantized_tiles(
    const byte* weights, size_t expert_size, unsigned row_size, const float* bias, const void* quantized, unsigned n_source,
    const Entries& entries, unsigned n_in, unsigned n_out, unsigned glu, float* out
) {
    using F = typename W::Format;
    using Tile = QuantizedTile<F, M, N>;
    enum : unsigned { TILES_M = M / WM / 16, TILES_N = N / WN / 8, LOADERS = WM * WN * WARP / 4 };
    enum : unsigned { UNITS = M / LOADERS, GROUPS = (N + LOADERS - 1) / LOADERS, HALVES = 32 / Tile::PART, ROW = Tile::ROW };
    // The bits of 1.5 * 2^23. As a float, their sum with a small integer is greater by this integer, so that its conversion is exact
    // and only takes a subtraction.
    enum : unsigned { MAGIC = 0x4b400000 };
    // As the launch assumes for the size of dynamic shared memory.
    static_assert(sizeof(Tile) <= (F::MIN && HALVES == 2 ? 208 * M + 192 * N : 180 * M + 176 * N), "size of a tile");
    extern __shared__ int4 tiles[];
    __shared__ TileEntries<N> chosen;
    const Activations activations(quantized, n_source, n_in);
    const unsigned expert = blockIdx.y, first_row = blockIdx.x * M;
    const unsigned begin = entries.begin(expert), end = entries.end(expert);
    weights += expert * expert_size;
    if (bias) bias += size_t(expert) * n_out;

    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, in_group = lane % 4;
    const unsigned row = warp % WM * (M / WM), token = warp / WM * (N / WN);
    const unsigned left = (row + lane % 16) * ROW + lane / 16 * 16;
    const unsigned right = (token + lane % 8 + lane / 16 * 8) * ROW + lane / 8 % 2 * 16;

    // Four threads load a row: one unit of weights and 32 activations each.
    const unsigned loader = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const unsigned units = n_in / 32;
    const byte* mine[UNITS];
#pragma unroll
    for (unsigned i = 0; i < UNITS; i++) mine[i] = weights + size_t(min(first_row + loader + i * LOADERS, n_out - 1)) * row_size;

    for (unsigned first = begin + blockIdx.z * N; first < end; first += gridDim.z * N) {
        __syncthreads();
        chosen.fill(entries, first, end);
        __syncthreads();
        typename F::Raw raw[UNITS];
        Group groups[GROUPS];
        const auto load = [&](unsigned u, Tile& tile) {
#pragma unroll
            for (unsigned i = 0; i < GROUPS; i++) {
                const unsigned t = loader + i * LOADERS;
                if (N % LOADERS > 0 && t >= N) continue;
                const unsigned x = chosen.row[t];
                const int4* codes = activations.codes_of(x);
                const unsigned to = shared_address(tile.inputs) + t * ROW + quarter * 32;
                copy_or_zero(to, codes + 2 * u, u < units ? 16 : 0);
                copy_or_zero(to + 16, codes + 2 * u + 1, u < units ? 16 : 0);
                groups[i] = {0.0f, 0};
                if (u < units) groups[i] = activations.groups_of(x)[u];
            }
            end_batch();
            if (u < units) {
#pragma unroll
                for (unsigned i = 0; i < UNITS; i++) raw[i] = F::load(mine[i], u);
            }
        };
        float sums[TILES_M][TILES_N][4] = {};
        Tile* tile = (Tile*)tiles;
        Tile* next = tile + 1;
        load(quarter, *tile);
        for (unsigned u = quarter; u - quarter < units; u += 4) {
#pragma unroll
            for (unsigned i = 0; i < UNITS; i++) {
                // After the end, codes and scales are zero.
                Unit unit = {};
                if (u < units) F::decode(raw[i], u, unit);
                tile->put_weights(loader + i * LOADERS, u, unit);
            }
#pragma unroll
            for (unsigned i = 0; i < GROUPS; i++) {
                if (N % LOADERS == 0 || loader + i * LOADERS < N) tile->put_group(loader + i * LOADERS, quarter, groups[i]);
            }
            // The step is there, and no warp reads the previous one any more.
            wait_for_batches<0>();
            __syncthreads();
            if (u - quarter + 4 < units) load(u + 4, *next);

            const unsigned w_at = shared_address(tile->weights) + left, x_at = shared_address(tile->inputs) + right;
#pragma unroll 1
            for (unsigned g = 0; g < Tile::STEP / 32; g++) {
                unsigned a[TILES_M][4];
                float scale[TILES_M][2][HALVES], minimum[TILES_M][2][HALVES];
#pragma unroll
                for (unsigned m = 0; m < TILES_M; m++) {
                    load_matrices(a[m], w_at + m * 16 * ROW + g * 32);
#pragma unroll
                    for (unsigned i = 0; i < 2 * HALVES; i++) {
                        const unsigned part = g * HALVES + i % HALVES, r = row + m * 16 + i / HALVES * 8 + group;
                        scale[m][i / HALVES][i % HALVES] = tile->scales[part][r];
                        if (F::MIN) minimum[m][i / HALVES][i % HALVES] = tile->mins[part][r];
                    }
                }
#pragma unroll
                for (unsigned n = 0; n < TILES_N; n += 2) {
                    unsigned b[4];
                    load_matrices(b, x_at + n * 8 * ROW + g * 32);
#pragma unroll
                    for (unsigned e = 0; e < 2; e++) {
                        const unsigned t = token + (n + e) * 8 + in_group * 2;
                        const float2 by = *(const float2*)&tile->input_scales[g][t];
#pragma unroll
                        for (unsigned half = 0; half < HALVES; half++) {
                            float2 sum = {0.0f, 0.0f};
                            if (F::MIN) sum = *(const float2*)&tile->input_sums[(g * HALVES + half) % Tile::PARTS][t];
#pragma unroll
                            for (unsigned m = 0; m < TILES_M; m++) {
                                int c[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
                                if (HALVES == 1) {
                                    const int w[4] = {int(a[m][0]), int(a[m][1]), int(a[m][2]), int(a[m][3])};
                                    const int x[2] = {int(b[2 * e]), int(b[2 * e + 1])};
                                    mma_32(c, w, x);
                                } else {
                                    mma_16(c, a[m][2 * half], a[m][2 * half + 1], b[2 * e + half]);
                                }
                                float(&to)[4] = sums[m][n + e];
#pragma unroll
                                for (unsigned j = 0; j < 4; j++) {
                                    const float product = __int_as_float(c[j]) - __int_as_float(MAGIC);
                                    to[j] += scale[m][j / 2][half] * (j % 2 ? by.y : by.x) * product;
                                    if (F::MIN) to[j] -= minimum[m][j / 2][half] * (j % 2 ? sum.y : sum.x);
                                }
                            }
                        }
                    }
                }
            }
            Tile* const previous = tile;
            tile = next;
            next = previous;
        }
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
