// Matrix-matrix products in tiles of 64 rows of weights and 64 rows of activations. Block (x, y, z) computes rows 64 x ..+ 64 of
// matrix y with every gridDim.z-th tile of its entries, starting with tile z.
#pragma once
#include "tile_entries.cuh"
#include "weights.cuh"

enum : unsigned { TILE = 64, MUL_THREADS = 256 };

// A tile of quantized weights and activations: 128 elements of each row.
template <class F>
struct QuantizedTile {
    static constexpr unsigned STEP = 128;
    // Words per row of codes, with four words of padding so that eight rows are in different banks.
    static constexpr unsigned STRIDE = STEP / 4 + 4;
    // Number of weights with the same scale, and number of such parts per row.
    static constexpr unsigned PART = F::SCALES == Scales::Quarters ? 16 : 32;
    static constexpr unsigned PARTS = STEP / PART;

    alignas(16) unsigned weights[TILE * STRIDE];
    alignas(16) int inputs[TILE * STRIDE];
    float scales[PARTS][TILE];
    float mins[F::MIN ? PARTS : 1][TILE];
    alignas(8) float input_scales[STEP / 32][TILE];
    alignas(8) float input_sums[F::MIN ? PARTS : 1][TILE];  // scaled

    // Stores the decoded unit `u` of the step for row `r`, with codes as signed bytes.
    __device__ void put_weights(unsigned r, unsigned u, const Unit& unit) {
        const unsigned a = F::first(u) % STEP, b = a + F::STRIDE;
#pragma unroll
        for (unsigned i = 0; i < 8; i++) {
            // Bytes do not borrow from each other: each is at least 128 before the subtraction.
            const unsigned code = F::OFFSET == 0
                ? unit.codes[i]
                : ((unit.codes[i] | 0x80808080) - F::OFFSET * 0x01010101) ^ 0x80808080;
            weights[r * STRIDE + (i < 4 ? a : b) / 4 + i % 4] = code;
        }
        // With one scale per 32 weights, two units of K-quants contain the same two scales. The first unit stores them.
        if (a % PART != 0) return;
#pragma unroll
        for (unsigned half = 0; half < (F::SCALES == Scales::One ? 1 : 2); half++) {
            const unsigned part = (half ? b : a) / PART;
            scales[part][r] = unit.scale[half];
            if (F::MIN) mins[part][r] = unit.min[half];
        }
    }

    __device__ void put_group(unsigned t, unsigned g, const Group& group) {
        input_scales[g][t] = group.scale;
        if (F::MIN && PART == 32) input_sums[g][t] = group.scale * (group.sum(0) + group.sum(1));
        if (F::MIN && PART == 16) {
            input_sums[2 * g % PARTS][t] = group.scale * group.sum(0);
            input_sums[(2 * g + 1) % PARTS][t] = group.scale * group.sum(1);
        }
    }
};

// The part of a tile that a thread accumulates. With tensor cores: their layout for 16 rows of weights and 32 rows of activations
// per warp. Without: 4 x 4.
struct Products {
    float sums[4][4];

#if __CUDA_ARCH__ >= 800
    // Row of weights and row of activations of sums[i][j].
    __device__ static unsigned weight(unsigned, unsigned j) {
        const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        return warp % 4 * 16 + lane / 4 + j / 2 * 8;
    }
    __device__ static unsigned token(unsigned i, unsigned j) {
        const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        return warp / 4 * 32 + i * 8 + lane % 4 * 2 + j % 2;
    }

    template <class F>
    __device__ void add(const QuantizedTile<F>& tile) {
        using Tile = QuantizedTile<F>;
        const unsigned lane = threadIdx.x % WARP, in_group = lane % 4;
        const unsigned row = weight(0, 0), first = token(0, 0) - in_group * 2 + lane / 4;
#pragma unroll 1
        for (unsigned g = 0; g < Tile::STEP / 32; g++) {
            const unsigned* w = tile.weights + row * Tile::STRIDE + 8 * g + in_group;
            const int a[4] = {int(w[0]), int(w[8 * Tile::STRIDE]), int(w[4]), int(w[8 * Tile::STRIDE + 4])};
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const int* x = tile.inputs + (first + 8 * i) * Tile::STRIDE + 8 * g + in_group;
                const int b[2] = {x[0], x[4]};
                const float2 scale = *(const float2*)&tile.input_scales[g][token(i, 0)];
#pragma unroll
                for (unsigned half = 0; half < 32 / Tile::PART; half++) {
                    const unsigned part = g * (32 / Tile::PART) + half;
                    int c[4] = {};
                    if (Tile::PART == 32) mma_32(c, a, b);
                    else mma_16(c, a[2 * half], a[2 * half + 1], b[half]);
                    const float low = tile.scales[part][row], high = tile.scales[part][row + 8];
                    sums[i][0] += low * scale.x * c[0];
                    sums[i][1] += low * scale.y * c[1];
                    sums[i][2] += high * scale.x * c[2];
                    sums[i][3] += high * scale.y * c[3];
                    if (F::MIN) {
                        const float2 sum = *(const float2*)&tile.input_sums[part][token(i, 0)];
                        const float low_min = tile.mins[part][row], high_min = tile.mins[part][row + 8];
                        sums[i][0] -= low_min * sum.x;
                        sums[i][1] -= low_min * sum.y;
                        sums[i][2] -= high_min * sum.x;
                        sums[i][3] -= high_min * sum.y;
                    }
                }
            }
        }
    }
#else
    __device__ static unsigned weight(unsigned, unsigned j) { return threadIdx.x % 16 + 16 * j; }
    __device__ static unsigned token(unsigned i, unsigned) { return threadIdx.x / 16 + 16 * i; }

    template <class F>
    __device__ void add(const QuantizedTile<F>& tile) {
        using Tile = QuantizedTile<F>;
#pragma unroll 1
        for (unsigned part = 0; part < Tile::PARTS; part++) {
            int products[4][4] = {};
#pragma unroll
            for (unsigned at = 0; at < Tile::PART / 4; at++) {
                int w[4], x[4];
#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                    w[i] = tile.weights[weight(0, i) * Tile::STRIDE + part * (Tile::PART / 4) + at];
                    x[i] = tile.inputs[token(i, 0) * Tile::STRIDE + part * (Tile::PART / 4) + at];
                }
#pragma unroll
                for (unsigned i = 0; i < 4; i++)
#pragma unroll
                    for (unsigned j = 0; j < 4; j++) products[i][j] = __dp4a(w[j], x[i], products[i][j]);
            }
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const float scale = tile.input_scales[part * Tile::PART / 32][token(i, 0)];
#pragma unroll
                for (unsigned j = 0; j < 4; j++) {
                    sums[i][j] += tile.scales[part][weight(0, j)] * scale * products[i][j];
                    if (F::MIN) sums[i][j] -= tile.mins[part][weight(0, j)] * tile.input_sums[part][token(i, 0)];
                }
            }
        }
    }
#endif

    // `first_row`, `first`: first row of weights and first entry of the tile.
    __device__ void put(
        const TileEntries<TILE>& tile, unsigned first_row, unsigned n_out, unsigned first, unsigned end, const float* bias, unsigned glu,
        float* out
    ) const {
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                const unsigned row = first_row + weight(i, j), t = token(i, j);
                if (row < n_out && first + t < end) {
                    store(out + size_t(tile.entry[t]) * n_out + row, sums[i][j] + (bias ? bias[row] : 0), glu);
                }
            }
        }
    }
};

template <class W>
__device__ inline void mat_mul_quantized(
    const byte* weights, size_t expert_size, unsigned row_size, const float* bias, const void* quantized, unsigned n_source,
    const Entries& entries, unsigned n_in, unsigned n_out, unsigned glu, float* out
) {
    using F = typename W::Format;
    using Tile = QuantizedTile<F>;
    __shared__ Tile tile;
    __shared__ TileEntries<TILE> chosen;
    const Activations activations(quantized, n_source, n_in);
    const unsigned expert = blockIdx.y, first_row = blockIdx.x * TILE;
    const unsigned begin = entries.begin(expert), end = entries.end(expert);
    weights += expert * expert_size;
    if (bias) bias += size_t(expert) * n_out;

    // Four threads load a row: one unit of weights and 32 activations each.
    const unsigned mine = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const byte* row = weights + size_t(min(first_row + mine, n_out - 1)) * row_size;
    const unsigned units = n_in / 32;
    for (unsigned first = begin + blockIdx.z * TILE; first < end; first += gridDim.z * TILE) {
        __syncthreads();
        chosen.fill(entries, first, end);
        __syncthreads();
        const int4* codes = activations.codes_of(chosen.row[mine]);
        const Group* groups = activations.groups_of(chosen.row[mine]);
        Products products = {};
        for (unsigned u = quarter; u - quarter < units; u += 4) {
            // After the end, scales are zero.
            Unit unit = {};
            int4 inputs[2] = {};
            Group group = {};
            if (u < units) {
                F::decode(F::load(row, u), u, unit);
                inputs[0] = codes[2 * u];
                inputs[1] = codes[2 * u + 1];
                group = groups[u];
            }
            tile.put_weights(mine, u, unit);
            *(int4*)(tile.inputs + mine * Tile::STRIDE + 8 * quarter) = inputs[0];
            *(int4*)(tile.inputs + mine * Tile::STRIDE + 8 * quarter + 4) = inputs[1];
            tile.put_group(mine, quarter, group);
            __syncthreads();
            products.add(tile);
            __syncthreads();
        }
        products.put(chosen, first_row, n_out, first, end, bias, glu, out);
    }
}

// The same for floating-point weights, with 16 elements of each row at a time.
template <class W>
__device__ inline void mat_mul_floating(
    const byte* weights, size_t expert_size, unsigned row_size, const float* bias, const float* x, const Entries& entries,
    unsigned n_in, unsigned n_out, unsigned glu, float* out
) {
    using E = typename W::Element;
    constexpr unsigned STEP = 16, STRIDE = TILE + 4;
    __shared__ float w[STEP][STRIDE], in[STEP][STRIDE];
    __shared__ TileEntries<TILE> chosen;
    const unsigned expert = blockIdx.y, first_row = blockIdx.x * TILE;
    const unsigned begin = entries.begin(expert), end = entries.end(expert);
    weights += expert * expert_size;
    if (bias) bias += size_t(expert) * n_out;

    // Four threads load a row, four elements each.
    const unsigned mine = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const byte* row = weights + size_t(min(first_row + mine, n_out - 1)) * row_size;
    const unsigned my_weight = threadIdx.x % 16, my_token = threadIdx.x / 16;
    for (unsigned first = begin + blockIdx.z * TILE; first < end; first += gridDim.z * TILE) {
        __syncthreads();
        chosen.fill(entries, first, end);
        __syncthreads();
        const float* source = x + size_t(chosen.row[mine]) * n_in;
        float sums[4][4] = {};
        for (unsigned step = 0; step < n_in; step += STEP) {
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned at = step + 4 * quarter + i;
                w[4 * quarter + i][mine] = at < n_in ? E::value(W::element(row, at)) : 0;
                in[4 * quarter + i][mine] = at < n_in ? E::round(source[at]) : 0;
            }
            __syncthreads();
#pragma unroll
            for (unsigned at = 0; at < STEP; at++) {
#pragma unroll
                for (unsigned i = 0; i < 4; i++)
#pragma unroll
                    for (unsigned j = 0; j < 4; j++)
                        sums[i][j] = fmaf(w[at][my_weight + 16 * j], in[at][my_token + 16 * i], sums[i][j]);
            }
            __syncthreads();
        }
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                const unsigned at = first_row + my_weight + 16 * j, t = my_token + 16 * i;
                if (at < n_out && first + t < end) {
                    store(out + size_t(chosen.entry[t]) * n_out + at, sums[i][j] + (bias ? bias[at] : 0), glu);
                }
            }
        }
    }
}
