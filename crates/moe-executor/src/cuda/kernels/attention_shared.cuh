// Attention of many heads to one row for each position, in F16 on tensor cores: the row is the key of all heads, and its first elements are
// their value (latent attention). Queries and weights are rounded to F16. Rows are aligned to 16 bytes; `head_dim` and `value_dim` are multiples
// of 8. For 8.0 and later.
#pragma once
#include "attention_tiles.cuh"

#if __CUDA_ARCH__ >= 800
// Waits for the other warp with the barrier `id`, 1 or more.
__device__ inline void wait_for_pair(unsigned id) { asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory"); }

// 64 query rows (row r: token r / heads, head r % heads) and tiles of 32 positions; values of up to `V` elements. Two warps share 16 query rows.
// Each multiplies one half of the elements of queries and keys; after they have added their products, each sums one half of the elements of the
// values. Block: (tokens, KV head, part of its query heads), split; with `sequences`, a block has one token. Dynamic shared memory, in rows of
// `head_dim` halves, a multiple of 16, and 8 more: queries (64), two tiles of rows (32 each); then the products of a warp (8, 16, 32) as f32.
template <unsigned V>
__device__ void attend_shared(INPUTS) {
    wait_for_previous(start);
    enum : unsigned { W = 8, PAIRS = W / 2, ROWS = 16 * PAIRS, TILE = 32, N = TILE / 8 };
    extern __shared__ float4 shared[];
    __shared__ unsigned rows[ROWS];  // token * n_head + head; ~0u: does not exist
    __shared__ uint2 seen[ROWS];     // first visible position, and the one after the last
    __shared__ uint4 bounds[W];
    const Shape shape = SHAPE;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4, in_group = lane % 4;
    const unsigned pair = warp % PAIRS, half = warp / PAIRS;
    const unsigned per_kv = n_head / n_head_kv, pieces = (per_kv + heads - 1) / heads;
    // The last tokens attend to most positions, so their blocks start first.
    const unsigned block = gridDim.x - 1 - blockIdx.x;
    const unsigned piece = block % pieces, kv_head = block / pieces % n_head_kv;
    const unsigned first_head = kv_head * per_kv + piece * heads, n_heads = min(heads, per_kv - piece * heads);
    const unsigned tokens = sequences ? 1 : ROWS / heads, first_token = block / pieces / n_head_kv * tokens;
    const size_t row_head = (sequences ? sequences[first_token] * n_head_kv : 0) + kv_head;
    const unsigned steps = (head_dim + 15) / 16, row_size = 16 * steps + 8;
    half_t* const queries = reinterpret_cast<half_t*>(shared);
    const unsigned tiles = shared_address(queries + ROWS * row_size), tile_size = TILE * row_size * 2;
    float4* const products = reinterpret_cast<float4*>(queries + (ROWS + 2 * TILE) * row_size);

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
    for (unsigned w = 0; w < W; ++w) {
        bound.x = min(bound.x, bounds[w].x), bound.y = max(bound.y, bounds[w].y);
        bound.z = max(bound.z, bounds[w].z), bound.w = min(bound.w, bounds[w].w);
    }
    unsigned first = bound.x, end = bound.y;
    split_range(first, end, blockIdx.y, splits, TILE);

    // A warp copies every eighth row. Elements after those of a head and positions after the end are zero.
    const auto copy = [&](unsigned to, unsigned at) {
        const half_t* from = static_cast<const half_t*>(k) + row_head * head_dim;
#pragma unroll
        for (unsigned row = warp; row < TILE; row += W) {
            const half_t* const source = from + size_t(min(at + row, end - 1)) * k_stride;
            for (unsigned chunk = lane; chunk < 2 * steps; chunk += WARP) {
                const bool copied = at + row < end && 8 * chunk < head_dim;
                copy_or_zero(to + (row * row_size + 8 * chunk) * 2, source + (copied ? 8 * chunk : 0), copied ? 16 : 0);
            }
        }
    };
    if (first < end) copy(tiles, first);
    end_batch();

    for (unsigned r = warp; r < ROWS; r += W) {
        for (unsigned four = lane; four < 4 * steps; four += WARP) {
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (rows[r] != ~0u && 4 * four < head_dim) x = fours_of(q + size_t(rows[r]) * head_dim)[four];
            x = scaled(x, scale);
            *reinterpret_cast<uint2*>(queries + r * row_size + 4 * four) = {halves(x.x, x.y), halves(x.z, x.w)};
        }
    }

    // Addresses of this lane for `load_matrices` and `load_transposed`, in the first operands.
    const unsigned left = ((lane % 16) * row_size + lane / 16 * 8) * 2, right = ((lane % 8 + lane / 16 * 8) * row_size + lane / 8 % 2 * 8) * 2;
    const unsigned my_queries = shared_address(queries + pair * 16 * row_size) + left;
    const unsigned first_step = half ? steps / 2 : 0, end_step = half ? steps : steps / 2;
    // The elements of the values that this warp sums.
    const unsigned columns = (value_dim / 2 + 15) / 16 * 16, first_column = half * columns;
    Softmax softmax[2] = {{-INFINITE, 0.0f}, {-INFINITE, 0.0f}};
    float sums[V / 16][4];
#pragma unroll
    for (unsigned n = 0; n < V / 16; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;

    unsigned tile = tiles, other = tiles + tile_size;
    for (unsigned at = first; at < end; at += TILE) {
        // The rows are there, and no warp reads those of the previous tile any more.
        wait_for_batches<0>();
        __syncthreads();
        if (at + TILE < end) copy(other, at + TILE);
        end_batch();

        float scores[N][4];
#pragma unroll
        for (unsigned n = 0; n < N; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll 6
        for (unsigned i = first_step; i < end_step; ++i) {
            unsigned a[4], b[4];
            load_matrices(a, my_queries + 32 * i);
#pragma unroll
            for (unsigned n = 0; n < N; n += 2) {
                load_matrices(b, tile + right + (8 * n * row_size + 16 * i) * 2);
                mma_f16(scores[n], a, b[0], b[1]), mma_f16(scores[n + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (unsigned n = 0; n < N; ++n) products[(warp * N + n) * WARP + lane] = {scores[n][0], scores[n][1], scores[n][2], scores[n][3]};
        wait_for_pair(1 + pair);
#pragma unroll
        for (unsigned n = 0; n < N; ++n) {
            const float4 added = products[((warp ^ PAIRS) * N + n) * WARP + lane];
            scores[n][0] += added.x, scores[n][1] += added.y, scores[n][2] += added.z, scores[n][3] += added.w;
        }

        // Some position of the tile is not visible to some row.
        if (at < bound.z || at + TILE > bound.w) {
#pragma unroll
            for (unsigned e = 0; e < 4; ++e) {
                const uint2 range = seen[pair * 16 + e / 2 * 8 + group];
                // Positions before the first one wrap around.
                const unsigned distance = at + 2 * in_group + e % 2 - range.x;
#pragma unroll
                for (unsigned n = 0; n < N; ++n) {
                    if (distance + 8 * n >= range.y - range.x) scores[n][e] = -INFINITE;
                }
            }
        }
        const float shrink[2] = {soften<0>(scores, softmax[0]), soften<2>(scores, softmax[1])};
        if (__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (unsigned n = 0; n < V / 16; ++n) {
#pragma unroll
                for (unsigned e = 0; e < 4; ++e) sums[n][e] *= shrink[e / 2];
            }
        }
#pragma unroll
        for (unsigned i = 0; i < TILE / 16; ++i) {
            unsigned a[4], b[4];
            weights_of(a, scores, i);
#pragma unroll
            for (unsigned n = 0; n < V / 16; n += 2) {
                if (8 * n >= columns) continue;
                load_transposed(b, tile + left + (16 * i * row_size + first_column + 8 * n) * 2);
                mma_f16(sums[n], a, b[0], b[1]), mma_f16(sums[n + 1], a, b[2], b[3]);
            }
        }
        const unsigned next = other;
        other = tile, tile = next;
    }

#pragma unroll
    for (unsigned h = 0; h < 2; ++h) {
        const unsigned row = rows[pair * 16 + 8 * h + group];
        const float total = row_sum(softmax[h].total);
        if (row == ~0u) continue;
        // The four lanes of a row, in both warps, store the same state.
        const Sink sink = sink_of(row / n_head, row % n_head, blockIdx.y, softmax[h].top, total, sinks, n_tokens, shape, out, parts);
        float2* const to = reinterpret_cast<float2*>(sink.to) + first_column / 2 + in_group;
#pragma unroll
        for (unsigned n = 0; n < V / 16; ++n) {
            if (8 * n < columns && first_column + 8 * n < value_dim) to[4 * n] = {sums[n][2 * h] * sink.factor, sums[n][2 * h + 1] * sink.factor};
        }
    }
}

#define ATTEND_SHARED(V) \
    extern "C" __global__ void __launch_bounds__(8 * WARP, 1) attention_shared_##V(INPUTS) { attend_shared<V>(ARGUMENTS); }
#endif
