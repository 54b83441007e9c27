// Matrix-matrix products without tensor cores, in tiles of 64 rows of weights and 64 rows of activations. Block (x, y, z) computes
// rows 64 x ..+ 64 of matrix y with every gridDim.z-th tile of its entries, starting with tile z.
#pragma once
#include "quantized_tile.cuh"
#include "tile_entries.cuh"

enum : unsigned { TILE = 64, MUL_THREADS = 256 };

// The 4 x 4 sums of a thread.
struct Products {
    float sums[4][4];

    __device__ static unsigned weight(unsigned, unsigned j) { return threadIdx.x % 16 + 16 * j; }
    __device__ static unsigned token(unsigned i, unsigned) { return threadIdx.x / 16 + 16 * i; }

    template <class F>
    __device__ void add(const QuantizedTile<F, TILE, TILE>& tile) {
        using Tile = QuantizedTile<F, TILE, TILE>;
        const int *weights = (const int*)tile.weights, *inputs = (const int*)tile.inputs;
#pragma unroll 1
        for (unsigned part = 0; part < Tile::PARTS; part++) {
            int products[4][4] = {};
#pragma unroll
            for (unsigned at = 0; at < Tile::PART / 4; at++) {
                int w[4], x[4];
#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                    w[i] = weights[weight(0, i) * (Tile::ROW / 4) + part * (Tile::PART / 4) + at];
                    x[i] = inputs[token(i, 0) * (Tile::ROW / 4) + part * (Tile::PART / 4) + at];
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
    using Tile = QuantizedTile<F, TILE, TILE>;
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
            tile.inputs[mine * (Tile::ROW / 16) + 2 * quarter] = inputs[0];
            tile.inputs[mine * (Tile::ROW / 16) + 2 * quarter + 1] = inputs[1];
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
