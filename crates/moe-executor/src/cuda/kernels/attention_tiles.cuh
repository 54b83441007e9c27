// Attention over a KV cache in F16 on tensor cores. Queries and weights are rounded to F16, and everything else is in f32. Rows of
// keys and values are aligned to 16 bytes, and `head_dim` and `value_dim` are multiples of 8. For 8.0 and later.
#pragma once
#include "attention.cuh"
#include "matrices.cuh"

#if __CUDA_ARCH__ >= 800
#define LOG2_E 1.4426950408889634f

using half_t = unsigned short;

// A row of the online softmax: the largest score and the total weight of the positions so far.
struct Softmax {
    float top, total;
};

// Replaces scores (N tiles of 8 positions; elements E and E + 1 of each) by weights, and returns the factor for earlier sums. Four
// lanes share a row, and each adds only its weights to the total.
template <unsigned E, unsigned N>
__device__ inline float soften(float (&scores)[N][4], Softmax& row) {
    float top = row.top, total = 0.0f;
#pragma unroll
    for (unsigned n = 0; n < N; ++n) top = fmaxf(top, fmaxf(scores[n][E], scores[n][E + 1]));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    // Without a visible position so far, there is no largest score.
    const float base = top == -INFINITE ? 0.0f : top * LOG2_E;
#pragma unroll
    for (unsigned n = 0; n < N; ++n) {
#pragma unroll
        for (unsigned e = E; e < E + 2; ++e) {
            scores[n][e] = power_of_2(fmaf(scores[n][e], LOG2_E, -base));
            total += scores[n][e];
        }
    }
    const float shrink = power_of_2(fmaf(row.top, LOG2_E, -base));
    row.top = top;
    row.total = fmaf(row.total, shrink, total);
    return shrink;
}

// Sum over the four lanes of a row, returned in each.
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The weights of positions 16 i ..+ 16 as the left operand of `mma_f16`.
template <unsigned N>
__device__ inline void weights_of(unsigned (&to)[4], const float (&scores)[N][4], unsigned i) {
    to[0] = halves(scores[2 * i][0], scores[2 * i][1]);
    to[1] = halves(scores[2 * i][2], scores[2 * i][3]);
    to[2] = halves(scores[2 * i + 1][0], scores[2 * i + 1][1]);
    to[3] = halves(scores[2 * i + 1][2], scores[2 * i + 1][3]);
}

// Many tokens: 64 M query rows (row r: token r / heads, head r % heads), of which a warp has 16 M, and tiles of `TILE` positions;
// heads of up to `D` elements. Block: (tokens, KV head, part of its query heads), split. Dynamic shared memory, in rows of D + 8
// halves: queries (64 M), a tile of keys, a tile of values.
template <unsigned D, unsigned M, unsigned TILE>
__device__ void attend_tiles(INPUTS) {
    wait_for_previous(start);
    enum : unsigned { ROWS = 16 * M * WARPS, CHUNKS = D / 8, ROW = D + 8, N = TILE / 8 };
    extern __shared__ float4 shared[];
    __shared__ unsigned rows[ROWS];  // token * n_head + head; ~0u: does not exist
    __shared__ uint2 seen[ROWS];     // first visible position, and the one after the last
    __shared__ uint4 bounds[WARPS];
    const Shape shape = SHAPE;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, in_group = lane % 4;
    const unsigned per_kv = n_head / n_head_kv, pieces = (per_kv + heads - 1) / heads;
    // The last tokens attend to most positions, so their blocks start first.
    const unsigned block = gridDim.x - 1 - blockIdx.x;
    const unsigned piece = block % pieces, kv_head = block / pieces % n_head_kv;
    const unsigned first_head = kv_head * per_kv + piece * heads, n_heads = min(heads, per_kv - piece * heads);
    const unsigned tokens = ROWS / heads, first_token = block / pieces / n_head_kv * tokens;
    half_t* const queries = reinterpret_cast<half_t*>(shared);
    const unsigned keys = shared_address(queries + ROWS * ROW), values = keys + TILE * ROW * 2;

    // Smallest first and largest end of the visible positions of a token, then the largest first and the smallest end.
    uint4 bound = {~0u, 0, 0, ~0u};
    if (threadIdx.x < ROWS) {
        const unsigned r = threadIdx.x, token = first_token + r / heads, head = r % heads;
        const bool there = r / heads < tokens && token < n_tokens && head < n_heads;
        const unsigned position = there ? positions[token] : 0;
        if (there) bound = {first_seen(position, shape), position + 1, first_seen(position, shape), position + 1};
        rows[r] = there ? token * n_head + first_head + head : ~0u;
        seen[r] = {bound.z, bound.w};
    }
    bound.x = __reduce_min_sync(ALL_LANES, bound.x), bound.y = __reduce_max_sync(ALL_LANES, bound.y);
    bound.z = __reduce_max_sync(ALL_LANES, bound.z), bound.w = __reduce_min_sync(ALL_LANES, bound.w);
    if (lane == 0) bounds[warp] = bound;
    __syncthreads();
#pragma unroll
    for (unsigned w = 0; w < WARPS; ++w) {
        bound.x = min(bound.x, bounds[w].x), bound.y = max(bound.y, bounds[w].y);
        bound.z = max(bound.z, bounds[w].z), bound.w = min(bound.w, bounds[w].w);
    }
    unsigned first = bound.x, end = bound.y;
    split_range(first, end, blockIdx.y, splits, TILE);

    // Elements after those of a head and positions after the end are zero.
    const unsigned chunk = threadIdx.x % CHUNKS, chunk_row = threadIdx.x / CHUNKS;
    const auto copy = [&](unsigned to, const void* cache, unsigned dim, unsigned stride, unsigned at) {
        const bool inside = chunk * 8 < dim;
        const half_t* from = static_cast<const half_t*>(cache) + size_t(kv_head) * dim + (inside ? chunk * 8 : 0);
#pragma unroll
        for (unsigned row = chunk_row; row < TILE; row += THREADS / CHUNKS) {
            const bool copied = inside && at + row < end;
            copy_or_zero(to + (row * ROW + chunk * 8) * 2, from + size_t(copied ? at + row : first) * stride, copied ? 16 : 0);
        }
    };
    if (first < end) copy(keys, k, head_dim, k_stride, first);
    end_batch();

#pragma unroll 8
    for (unsigned i = threadIdx.x; i < ROWS * (D / 4); i += THREADS) {
        const unsigned r = i / (D / 4), four = i % (D / 4);
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
        if (rows[r] != ~0u && 4 * four < head_dim) x = fours_of(q + size_t(rows[r]) * head_dim)[four];
        x = scaled(x, scale);
        *reinterpret_cast<uint2*>(queries + r * ROW + 4 * four) = {halves(x.x, x.y), halves(x.z, x.w)};
    }

    // Addresses of this lane for `load_matrices` and `load_transposed`, in the first operands.
    const unsigned left = ((lane % 16) * ROW + lane / 16 * 8) * 2, right = ((lane % 8 + lane / 16 * 8) * ROW + lane / 8 % 2 * 8) * 2;
    const unsigned my_queries = shared_address(queries + warp * 16 * M * ROW) + left;
    Softmax softmax[M][2];
    float sums[M][D / 8][4];
#pragma unroll
    for (unsigned m = 0; m < M; ++m) {
        softmax[m][0] = softmax[m][1] = {-INFINITE, 0.0f};
#pragma unroll
        for (unsigned n = 0; n < D / 8; ++n) sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f;
    }

    for (unsigned at = first; at < end; at += TILE) {
        // The keys are there, and no warp reads the previous values any more.
        wait_for_batches<0>();
        __syncthreads();
        copy(values, v, value_dim, v_stride, at);
        end_batch();

        float scores[M][N][4];
#pragma unroll
        for (unsigned m = 0; m < M; ++m) {
#pragma unroll
            for (unsigned n = 0; n < N; ++n) scores[m][n][0] = scores[m][n][1] = scores[m][n][2] = scores[m][n][3] = 0.0f;
        }
#pragma unroll 4
        for (unsigned i = 0; i < D / 16; ++i) {
            unsigned a[M][4], b[4];
#pragma unroll
            for (unsigned m = 0; m < M; ++m) load_matrices(a[m], my_queries + (16 * m * ROW + 16 * i) * 2);
#pragma unroll
            for (unsigned n = 0; n < N; n += 2) {
                load_matrices(b, keys + right + (8 * n * ROW + 16 * i) * 2);
#pragma unroll
                for (unsigned m = 0; m < M; ++m) mma_f16(scores[m][n], a[m], b[0], b[1]), mma_f16(scores[m][n + 1], a[m], b[2], b[3]);
            }
        }
        // The values are there, and no warp reads the keys any more.
        wait_for_batches<0>();
        __syncthreads();
        if (at + TILE < end) copy(keys, k, head_dim, k_stride, at + TILE);
        end_batch();

        // Some position of the tile is not visible to some row.
        if (at < bound.z || at + TILE > bound.w) {
#pragma unroll
            for (unsigned m = 0; m < M; ++m) {
#pragma unroll
                for (unsigned e = 0; e < 4; ++e) {
                    const uint2 range = seen[(warp * M + m) * 16 + e / 2 * 8 + group];
                    // Positions before the first one wrap around.
                    const unsigned distance = at + 2 * in_group + e % 2 - range.x;
#pragma unroll
                    for (unsigned n = 0; n < N; ++n) {
                        if (distance + 8 * n >= range.y - range.x) scores[m][n][e] = -INFINITE;
                    }
                }
            }
        }
        float shrink[M][2];
        bool shrinks = false;
#pragma unroll
        for (unsigned m = 0; m < M; ++m) {
            shrink[m][0] = soften<0>(scores[m], softmax[m][0]);
            shrink[m][1] = soften<2>(scores[m], softmax[m][1]);
            shrinks |= shrink[m][0] != 1.0f || shrink[m][1] != 1.0f;
        }
        if (__any_sync(ALL_LANES, shrinks)) {
#pragma unroll
            for (unsigned m = 0; m < M; ++m) {
#pragma unroll
                for (unsigned n = 0; n < D / 8; ++n) {
#pragma unroll
                    for (unsigned e = 0; e < 4; ++e) sums[m][n][e] *= shrink[m][e / 2];
                }
            }
        }
#pragma unroll
        for (unsigned i = 0; i < TILE / 16; ++i) {
            unsigned a[M][4], b[4];
#pragma unroll
            for (unsigned m = 0; m < M; ++m) weights_of(a[m], scores[m], i);
#pragma unroll
            for (unsigned n = 0; n < D / 8; n += 2) {
                load_transposed(b, values + left + (16 * i * ROW + 8 * n) * 2);
#pragma unroll
                for (unsigned m = 0; m < M; ++m) mma_f16(sums[m][n], a[m], b[0], b[1]), mma_f16(sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (unsigned m = 0; m < M; ++m) {
#pragma unroll
        for (unsigned h = 0; h < 2; ++h) {
            const unsigned row = rows[(warp * M + m) * 16 + 8 * h + group];
            const float total = row_sum(softmax[m][h].total);
            if (row == ~0u) continue;
            // The four lanes of a row store the same state.
            const Sink sink = sink_of(row / n_head, row % n_head, blockIdx.y, softmax[m][h].top, total, sinks, n_tokens, shape, out, parts);
            float2* const to = reinterpret_cast<float2*>(sink.to) + in_group;
#pragma unroll
            for (unsigned n = 0; n < D / 8; ++n) {
                if (8 * n < value_dim) to[4 * n] = {sums[m][n][2 * h] * sink.factor, sums[m][n][2 * h + 1] * sink.factor};
            }
        }
    }
}

// One token and up to 16 query heads with the same KV head; heads of up to `D` elements. `W` warps, and each has its own 16
// positions at a time and reads keys and values directly to the operands of the products: the order of elements in a dot product
// and of columns in a product is free, so that a lane can read 16 bytes at a time. Block: (token, KV head, part of its query heads),
// split. Dynamic shared memory: sums (W, heads, D + 4). Positions and sequences must be complete before the previous kernel starts.
template <unsigned D, unsigned W>
__device__ void attend_one(INPUTS) {
    enum : unsigned { HEADS = 16, STEP = 16 * W, ROW = D / 4 + 1 };
    extern __shared__ float4 shared[];
    __shared__ Softmax states[W][HEADS];
    const Shape shape = SHAPE;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, in_group = lane % 4;
    const unsigned per_kv = n_head / n_head_kv, pieces = (per_kv + heads - 1) / heads;
    const unsigned piece = blockIdx.x % pieces, kv_head = blockIdx.x / pieces % n_head_kv, token = blockIdx.x / pieces / n_head_kv;
    const unsigned first_head = kv_head * per_kv + piece * heads, n_heads = min(heads, per_kv - piece * heads);
    const size_t row_head = (sequences ? sequences[token] * n_head_kv : 0) + kv_head;
    const unsigned position = positions[token];
    unsigned first = first_seen(position, shape), end = position + 1;
    split_range(first, end, blockIdx.y, splits, STEP);
    follow_previous(start);

    // After the end, the last position is read again and masked. Elements that do not exist are zero.
    const auto load = [&](const void* cache, unsigned row, unsigned dim, unsigned stride, unsigned at, unsigned element) {
        const half_t* from = static_cast<const half_t*>(cache) + row_head * row + size_t(min(at, end - 1)) * stride + element;
        const uint4 zero = {0, 0, 0, 0};
        return element < dim ? *reinterpret_cast<const uint4*>(from) : zero;
    };

    // Elements 8 (in_group + 4 i) ..+ 8 of two heads. Heads and elements that do not exist are zero.
    unsigned queries[D / 32][2][4];
#pragma unroll
    for (unsigned i = 0; i < D / 32; ++i) {
#pragma unroll
        for (unsigned h = 0; h < 2; ++h) {
            const unsigned head = group + 8 * h, element = 8 * (in_group + 4 * i);
            float4 low = {0.0f, 0.0f, 0.0f, 0.0f}, high = low;
            if (head < n_heads && element < head_dim) {
                const float4* from = fours_of(q + (size_t(token) * n_head + first_head + head) * head_dim + element);
                low = scaled(from[0], scale), high = scaled(from[1], scale);
            }
            queries[i][0][h] = halves(low.x, low.y), queries[i][0][2 + h] = halves(low.z, low.w);
            queries[i][1][h] = halves(high.x, high.y), queries[i][1][2 + h] = halves(high.z, high.w);
        }
    }

    Softmax softmax[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    float sums[D / 8][4];
#pragma unroll
    for (unsigned n = 0; n < D / 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    for (unsigned at = first + warp * 16; at < end; at += STEP) {
        // Of the keys, positions `group` and `group` + 8; of the values, four positions and elements 8 (group + 8 i) ..+ 8.
        uint4 key[2][D / 32], value[D / 64][4];
#pragma unroll
        for (unsigned t = 0; t < 2; ++t) {
#pragma unroll
            for (unsigned i = 0; i < D / 32; ++i) key[t][i] = load(k, head_dim, head_dim, k_stride, at + 8 * t + group, 8 * (in_group + 4 * i));
        }
#pragma unroll
        for (unsigned p = 0; p < 4; ++p) {
#pragma unroll
            for (unsigned i = 0; i < D / 64; ++i) value[i][p] = load(v, value_row(k, v, shape), value_dim, v_stride, at + p / 2 * 8 + 2 * in_group + p % 2, 8 * (group + 8 * i));
        }
        float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (unsigned i = 0; i < D / 32; ++i) {
#pragma unroll
            for (unsigned t = 0; t < 2; ++t) {
                mma_f16(scores[t], queries[i][0], key[t][i].x, key[t][i].y);
                mma_f16(scores[t], queries[i][1], key[t][i].z, key[t][i].w);
            }
        }
#pragma unroll
        for (unsigned t = 0; t < 2; ++t) {
#pragma unroll
            for (unsigned e = 0; e < 4; ++e) {
                if (at + 8 * t + 2 * in_group + e % 2 >= end) scores[t][e] = -INFINITE;
            }
        }
        const float shrink[2] = {soften<0>(scores, softmax[0]), soften<2>(scores, softmax[1])};
        unsigned weights[4];
        weights_of(weights, scores, 0);
#pragma unroll
        for (unsigned i = 0; i < D / 64; ++i) {
            const auto add = [&](unsigned n, unsigned b0, unsigned b1) {
#pragma unroll
                for (unsigned e = 0; e < 4; ++e) sums[8 * i + n][e] *= shrink[e / 2];
                mma_f16(sums[8 * i + n], weights, b0, b1);
            };
            const uint4 *a = value[i];
            add(0, pair_of<0>(a[0].x, a[1].x), pair_of<0>(a[2].x, a[3].x));
            add(1, pair_of<1>(a[0].x, a[1].x), pair_of<1>(a[2].x, a[3].x));
            add(2, pair_of<0>(a[0].y, a[1].y), pair_of<0>(a[2].y, a[3].y));
            add(3, pair_of<1>(a[0].y, a[1].y), pair_of<1>(a[2].y, a[3].y));
            add(4, pair_of<0>(a[0].z, a[1].z), pair_of<0>(a[2].z, a[3].z));
            add(5, pair_of<1>(a[0].z, a[1].z), pair_of<1>(a[2].z, a[3].z));
            add(6, pair_of<0>(a[0].w, a[1].w), pair_of<0>(a[2].w, a[3].w));
            add(7, pair_of<1>(a[0].w, a[1].w), pair_of<1>(a[2].w, a[3].w));
        }
    }

    // Column `c` of product n is element 8 c + n of each 64.
#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
        const unsigned head = group + 8 * h;
        softmax[h].total = row_sum(softmax[h].total);
        if (head >= n_heads) continue;
        states[warp][head] = softmax[h];
        float4* const to = shared + (warp * heads + head) * ROW + 4 * in_group;
#pragma unroll
        for (unsigned i = 0; i < D / 64; ++i) {
#pragma unroll
            for (unsigned c = 0; c < 2; ++c) {
#pragma unroll
                for (unsigned n = 0; n < 8; n += 4) {
                    const unsigned e = 2 * h + c, at = 8 * i + n;
                    to[16 * i + 2 * c + n / 4] = {sums[at][e], sums[at + 1][e], sums[at + 2][e], sums[at + 3][e]};
                }
            }
        }
    }
    __syncthreads();
    for (unsigned head = warp; head < n_heads; head += W) {
        float top = -INFINITE, total = 0.0f, factor[W];
#pragma unroll
        for (unsigned w = 0; w < W; ++w) top = fmaxf(top, states[w][head].top);
        const float base = top == -INFINITE ? 0.0f : top * LOG2_E;
#pragma unroll
        for (unsigned w = 0; w < W; ++w) {
            factor[w] = power_of_2(fmaf(states[w][head].top, LOG2_E, -base));
            total = fmaf(states[w][head].total, factor[w], total);
        }
        const Sink sink = sink_of(token, first_head + head, blockIdx.y, top, total, sinks, n_tokens, shape, out, parts);
        for (unsigned four = lane; four < value_dim / 4; four += WARP) {
            float4 all = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (unsigned w = 0; w < W; ++w) add_scaled(all, factor[w], shared[(w * heads + head) * ROW + four]);
            sink.to[four] = scaled(all, sink.factor);
        }
    }
}

// `ROWS`: query rows of a block. `MIN`: number of blocks that must fit on a multiprocessor.
#define ATTEND_TILES(ROWS, D, TILE, MIN) \
    extern "C" __global__ void __launch_bounds__(THREADS, MIN) attention_tiles_##ROWS##_##D(INPUTS) { attend_tiles<D, ROWS / 64, TILE>(ARGUMENTS); }
#define ATTEND_ONE(D, W, MIN) \
    extern "C" __global__ void __launch_bounds__(W * WARP, MIN) attention_one_##D(INPUTS) { attend_one<D, W>(ARGUMENTS); }
#endif
