// Causal attention over the KV cache with grouped heads, sliding windows and sinks, in f32. The cache has keys and values of the
// types in cache.cuh.
//
// The online softmax is that of "FlashAttention" (Dao et al., 2022). If few query rows would leave the GPU idle, the positions
// are split among blocks ("Flash-Decoding", Dao et al., 2023). Each block stores a partial result, and `attention_combine`
// combines them.
#pragma once
#include "cache.cuh"

enum : unsigned { THREADS = 128, WARPS = THREADS / WARP };

// The parameters of launch/attention.rs.
struct Shape {
    unsigned n_head, n_head_kv;
    unsigned head_dim;   // of queries and keys; a multiple of 4
    unsigned value_dim;  // of values and results; a multiple of 4
    unsigned window;  // 0: all positions
    unsigned heads;   // query heads per block
    unsigned splits;  // number of parts of the positions
};

// `sequences`: sequence of each token, whose rows follow each other in `k` and `v`; or null, for the first one. Only the kernels for
// single tokens and `attend_shared` read it. `k_stride`, `v_stride`: elements between two positions in `k` and `v`. `types`: type of the keys (low
// 16 bits) and of the values; only the kernels for any type read it. `softcap`: bound of the absolute values of the scores, or 0; the kernels on
// tensor cores do not read it.
#define INPUTS \
    const float *q, const void *k, const void *v, const unsigned *positions, const unsigned *sequences, \
    const float* __restrict__ sinks, unsigned n_tokens, unsigned n_head, unsigned n_head_kv, unsigned head_dim, unsigned value_dim, \
    unsigned window, unsigned heads, unsigned splits, unsigned k_stride, unsigned v_stride, unsigned types, float scale, float softcap, float *out, float *parts, Start start
#define ARGUMENTS \
    q, k, v, positions, sequences, sinks, n_tokens, n_head, n_head_kv, head_dim, value_dim, window, heads, splits, k_stride, v_stride, types, scale, softcap, out, \
        parts, start
#define SHAPE Shape{n_head, n_head_kv, head_dim, value_dim, window, heads, splits}

__device__ inline float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ inline void add_scaled(float4& sum, float factor, float4 x) {
    sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
    sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

__device__ inline float4 scaled(float4 x, float factor) { return {x.x * factor, x.y * factor, x.z * factor, x.w * factor}; }

// A row of a head as vectors of four.
__device__ inline const float4* fours_of(const float* row) { return reinterpret_cast<const float4*>(row); }

// First position that is visible to a token. With the highest bit of `window`, the positions are divided into chunks of the length in the
// other bits, and a token sees those of its own chunk.
__device__ inline unsigned first_seen(unsigned position, const Shape& shape) {
    if (shape.window >> 31) return position - position % (shape.window & 0x7fffffff);
    return shape.window && position + 1 > shape.window ? position + 1 - shape.window : 0;
}

// softcap · tanh(score / softcap). `rate` is 2 log2(e) / softcap.
__device__ inline float bounded(float score, float softcap, float rate) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(score * rate));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return fmaf(-2.0f * softcap, inverse, softcap);
}

// Reduces `first..end` to split `split`, whose size is a multiple of `step` except at the end.
__device__ inline void split_range(unsigned& first, unsigned& end, unsigned split, unsigned splits, unsigned step) {
    const unsigned steps = (end - first + step - 1) / step, each = (steps + splits - 1) / splits * step;
    first = min(end, first + split * each);
    end = min(end, first + each);
}

// Elements between the values of two KV heads or, with one KV head, of two sequences. If `v` is `k`, there is one KV head, and its values are
// the first elements of its keys.
__device__ inline unsigned value_row(const void* k, const void* v, const Shape& shape) { return v == k ? shape.head_dim : shape.value_dim; }

// The factor that normalizes the weighted sum of the values. A sink is a score in the softmax without a value.
__device__ inline float closing_factor(float top, float total, const float* sinks, unsigned head) {
    if (!sinks) return 1.0f / total;
    const float all = fmaxf(top, sinks[head]), shrink = expf(top - all);
    return shrink / (total * shrink + expf(sinks[head] - all));
}

// Destination of the result of a block for a row (token, head): `out` without splits. With splits, the sums (row, split,
// value_dim), and after those of all rows the largest score and the total weight (row, split, 2).
struct Sink {
    float4* to;
    float factor;
};

__device__ inline Sink sink_of(unsigned token, unsigned head, unsigned split, float top, float total, const float* sinks, unsigned n_tokens, const Shape& shape, float* out, float* parts) {
    const size_t row = size_t(token) * shape.n_head + head, rows = size_t(n_tokens) * shape.n_head;
    if (shape.splits == 1) return {reinterpret_cast<float4*>(out + row * shape.value_dim), closing_factor(top, total, sinks, head)};
    const size_t part = row * shape.splits + split;
    float* state = parts + rows * shape.splits * shape.value_dim + 2 * part;
    state[0] = top;
    state[1] = total;
    return {reinterpret_cast<float4*>(parts + part * shape.value_dim), 1.0f};
}

// One token and up to `H` query heads with the same KV head; heads of up to `D` elements, and values of up to `V`. Block: (token, KV head,
// part of its query heads), split.
template <class Row, unsigned H, unsigned D, unsigned V>
__device__ void attend_token(INPUTS) {
    follow_previous(start);
    enum : unsigned { CHUNK = 64, LANES = 8 };  // positions per rescaling; lanes per dot product
    constexpr unsigned UNROLLED = D > 256 ? 1 : 64;  // of wide heads, the code would be long
    __shared__ float4 queries[H][D / 4];
    __shared__ float scores[H][CHUNK];  // then weights
    __shared__ float shrinks[H], tops[H], totals[H];
    __shared__ float4 sums[WARPS][H][V / 4];
    const Shape shape = SHAPE;
    const float rate = 2.8853901f / softcap;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned per_kv = n_head / n_head_kv, pieces = (per_kv + heads - 1) / heads;
    const unsigned piece = blockIdx.x % pieces, kv_head = blockIdx.x / pieces % n_head_kv, token = blockIdx.x / pieces / n_head_kv;
    const unsigned first_head = kv_head * per_kv + piece * heads, n_heads = min(heads, per_kv - piece * heads);
    const unsigned fours = head_dim / 4, value_fours = value_dim / 4;
    const size_t row_head = (sequences ? sequences[token] * n_head_kv : 0) + kv_head;

    // Heads and elements that do not exist are zero.
    for (unsigned i = threadIdx.x; i < H * (D / 4); i += THREADS) {
        const unsigned head = i / (D / 4), four = i % (D / 4);
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
        if (head < n_heads && four < fours) x = fours_of(q + (size_t(token) * n_head + first_head + head) * head_dim)[four];
        queries[head][four] = scaled(x, scale);
    }
    const unsigned position = positions[token];
    unsigned first = first_seen(position, shape), end = position + 1;
    split_range(first, end, blockIdx.y, splits, CHUNK);

    float4 sum[H][V / 128];
#pragma unroll
    for (unsigned h = 0; h < H; ++h) {
#pragma unroll
        for (unsigned i = 0; i < V / 128; ++i) sum[h][i] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
    if (threadIdx.x < H) tops[threadIdx.x] = -INFINITE, totals[threadIdx.x] = 0.0f;
    __syncthreads();

    for (unsigned start = first; start < end; start += CHUNK) {
        const unsigned n = min(unsigned(CHUNK), end - start);
        // Scores: eight lanes per position. After the end, the last position is read again and masked.
#pragma unroll UNROLLED
        for (unsigned step = 0; step < CHUNK; step += THREADS / LANES) {
            const unsigned at = step + threadIdx.x / LANES, part = threadIdx.x % LANES;
            const Row key(k, row_head * head_dim + size_t(start + min(at, n - 1)) * k_stride, types & 0xffff);
            float score[H];
#pragma unroll
            for (unsigned h = 0; h < H; ++h) score[h] = 0.0f;
#pragma unroll UNROLLED
            for (unsigned i = part; i < D / 4; i += LANES) {
                if (i >= fours) continue;
                const float4 x = key[i];
#pragma unroll
                for (unsigned h = 0; h < H; ++h) score[h] = dot(x, queries[h][i], score[h]);
            }
#pragma unroll
            for (unsigned h = 0; h < H; ++h) {
#pragma unroll
                for (unsigned distance = LANES / 2; distance > 0; distance /= 2) score[h] += __shfl_xor_sync(ALL_LANES, score[h], distance);
                if (part == h % LANES) scores[h][at] = at < n ? score[h] : -INFINITE;
            }
        }
        __syncthreads();
        // Weights: one warp per head.
        for (unsigned h = warp; h < H; h += WARPS) {
            float x[CHUNK / WARP], top = tops[h], total = 0.0f;
            const float before = top;
#pragma unroll
            for (unsigned i = 0; i < CHUNK / WARP; ++i) {
                x[i] = scores[h][lane + i * WARP];
                if (softcap > 0.0f && x[i] != -INFINITE) x[i] = bounded(x[i], softcap, rate);
                top = fmaxf(top, x[i]);
            }
            top = warp_max(top);
#pragma unroll
            for (unsigned i = 0; i < CHUNK / WARP; ++i) {
                x[i] = expf(x[i] - top);
                total += x[i];
                scores[h][lane + i * WARP] = x[i];
            }
            total = warp_sum(total);
            __syncwarp();  // all lanes have read tops[h]
            if (lane == 0) {
                const float shrink = expf(before - top);
                shrinks[h] = shrink;
                tops[h] = top;
                totals[h] = totals[h] * shrink + total;
            }
        }
        __syncthreads();
        // Values: every fourth position per warp, four elements per lane.
#pragma unroll
        for (unsigned h = 0; h < H; ++h) {
#pragma unroll
            for (unsigned i = 0; i < V / 128; ++i) sum[h][i] = scaled(sum[h][i], shrinks[h]);
        }
#pragma unroll 4
        for (unsigned at = warp; at < n; at += WARPS) {
            const Row value(v, row_head * value_row(k, v, shape) + size_t(start + at) * v_stride, types >> 16);
#pragma unroll
            for (unsigned i = 0; i < V / 128; ++i) {
                if (lane + i * WARP >= value_fours) continue;
                const float4 x = value[lane + i * WARP];
#pragma unroll
                for (unsigned h = 0; h < H; ++h) add_scaled(sum[h][i], scores[h][at], x);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (unsigned h = 0; h < H; ++h) {
#pragma unroll
        for (unsigned i = 0; i < V / 128; ++i) sums[warp][h][lane + i * WARP] = sum[h][i];
    }
    __syncthreads();
    for (unsigned h = warp; h < n_heads; h += WARPS) {
        const Sink sink = sink_of(token, first_head + h, blockIdx.y, tops[h], totals[h], sinks, n_tokens, shape, out, parts);
        for (unsigned i = lane; i < value_fours; i += WARP) {
            float4 all = sums[0][h][i];
#pragma unroll
            for (unsigned w = 1; w < WARPS; ++w) add_scaled(all, 1.0f, sums[w][h][i]);
            sink.to[i] = scaled(all, sink.factor);
        }
    }
}

// Many tokens: 16 · R query rows (row r: token r / heads, head r % heads) and tiles of 8 · C positions. Thread (y, x) computes
// rows y + 16 i, positions x + 8 j, and elements 4 (x + 8 j) of the sums; eight threads share a row. Block: (tokens, KV head,
// part of its query heads), split. Dynamic shared memory: queries (16 R), a tile of keys and then of values (8 C), in rows of
// max(head_dim, value_dim) + 4; weights (16 R, 8 C + 4).
template <class Row, unsigned R, unsigned C, unsigned D>
__device__ void attend_tokens(INPUTS) {
    wait_for_previous(start);
    enum : unsigned { X = 8, Y = THREADS / X, ROWS = Y * R, TILE = X * C, WEIGHTS = TILE / 4 + 1 };
    extern __shared__ float4 shared[];
    __shared__ unsigned seen[2];
    const Shape shape = SHAPE;
    const float rate = 2.8853901f / softcap;
    const unsigned x = threadIdx.x % X, y = threadIdx.x / X;
    const unsigned per_kv = n_head / n_head_kv, pieces = (per_kv + heads - 1) / heads;
    // The last tokens attend to most positions, so their blocks start first.
    const unsigned block = gridDim.x - 1 - blockIdx.x;
    const unsigned piece = block % pieces, kv_head = block / pieces % n_head_kv;
    const unsigned first_head = kv_head * per_kv + piece * heads, n_heads = min(heads, per_kv - piece * heads);
    const unsigned tokens = ROWS / heads, first_token = block / pieces / n_head_kv * tokens;
    const unsigned fours = head_dim / 4, value_fours = value_dim / 4, row = max(fours, value_fours) + 1;
    float4* queries = shared;
    float4* tile = queries + ROWS * row;
    float4* weights = tile + TILE * row;

    if (threadIdx.x == 0) seen[0] = ~0u, seen[1] = 0;
    __syncthreads();
    if (threadIdx.x < tokens && first_token + threadIdx.x < n_tokens) {
        const unsigned position = positions[first_token + threadIdx.x];
        atomicMin(&seen[0], first_seen(position, shape));
        atomicMax(&seen[1], position + 1);
    }
    for (unsigned i = threadIdx.x; i < ROWS * fours; i += THREADS) {
        const unsigned r = i / fours, four = i % fours, token = first_token + r / heads, head = r % heads;
        float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
        if (r / heads < tokens && token < n_tokens && head < n_heads) {
            value = fours_of(q + (size_t(token) * n_head + first_head + head) * head_dim)[four];
        }
        queries[r * row + four] = scaled(value, scale);
    }
    // The positions that are visible to each row; none for rows that do not exist.
    unsigned from[R], to[R];
    float top[R], total[R];
    float4 sum[R][D / 32];
#pragma unroll
    for (unsigned i = 0; i < R; ++i) {
        const unsigned r = y + Y * i, token = first_token + r / heads;
        const bool there = r / heads < tokens && token < n_tokens && r % heads < n_heads;
        const unsigned position = there ? positions[token] : 0;
        from[i] = there ? first_seen(position, shape) : 0;
        to[i] = there ? position + 1 : 0;
        top[i] = -INFINITE;
        total[i] = 0.0f;
#pragma unroll
        for (unsigned j = 0; j < D / 32; ++j) sum[i][j] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
    __syncthreads();
    unsigned first = seen[0], end = seen[1];
    split_range(first, end, blockIdx.y, splits, TILE);

    for (unsigned start = first; start < end; start += TILE) {
        // Positions after the end are zero and masked.
        const auto fill = [&](const void* cache, unsigned dim, unsigned stride, unsigned type) {
            const unsigned fours = dim / 4;
            for (unsigned i = threadIdx.x; i < TILE * fours; i += THREADS) {
                const unsigned at = i / fours, four = i % fours;
                float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
                if (start + at < end) value = Row(cache, size_t(kv_head) * dim + size_t(start + at) * stride, type)[four];
                tile[at * row + four] = value;
            }
        };
        fill(k, head_dim, k_stride, types & 0xffff);
        __syncthreads();

        float score[R][C];
#pragma unroll
        for (unsigned i = 0; i < R; ++i) {
#pragma unroll
            for (unsigned j = 0; j < C; ++j) score[i][j] = 0.0f;
        }
#pragma unroll 1
        for (unsigned four = 0; four < fours; ++four) {
            float4 a[R], b[C];
#pragma unroll
            for (unsigned i = 0; i < R; ++i) a[i] = queries[(y + Y * i) * row + four];
#pragma unroll
            for (unsigned j = 0; j < C; ++j) b[j] = tile[(x + X * j) * row + four];
#pragma unroll
            for (unsigned i = 0; i < R; ++i) {
#pragma unroll
                for (unsigned j = 0; j < C; ++j) score[i][j] = dot(a[i], b[j], score[i][j]);
            }
        }
        __syncthreads();
        fill(v, value_dim, v_stride, types >> 16);

        if (softcap > 0.0f) {
#pragma unroll
            for (unsigned i = 0; i < R; ++i) {
#pragma unroll
                for (unsigned j = 0; j < C; ++j) score[i][j] = bounded(score[i][j], softcap, rate);
            }
        }

#pragma unroll
        for (unsigned i = 0; i < R; ++i) {
            float best = top[i], added = 0.0f;
#pragma unroll
            for (unsigned j = 0; j < C; ++j) {
                const unsigned at = start + x + X * j;
                if (at < from[i] || at >= to[i]) score[i][j] = -INFINITE;
                best = fmaxf(best, score[i][j]);
            }
#pragma unroll
            for (unsigned distance = X / 2; distance > 0; distance /= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, distance));
            // Without a visible position so far, there is no largest score.
            const float base = best == -INFINITE ? 0.0f : best;
            float* weight = reinterpret_cast<float*>(weights + (y + Y * i) * WEIGHTS);
#pragma unroll
            for (unsigned j = 0; j < C; ++j) {
                const float w = expf(score[i][j] - base);
                added += w;
                weight[x + X * j] = w;
            }
#pragma unroll
            for (unsigned distance = X / 2; distance > 0; distance /= 2) added += __shfl_xor_sync(ALL_LANES, added, distance);
            const float shrink = expf(top[i] - base);
            top[i] = best;
            total[i] = total[i] * shrink + added;
#pragma unroll
            for (unsigned j = 0; j < D / 32; ++j) sum[i][j] = scaled(sum[i][j], shrink);
        }
        __syncthreads();

        for (unsigned four = 0; four < TILE / 4; ++four) {
            float4 w[R];
#pragma unroll
            for (unsigned i = 0; i < R; ++i) w[i] = weights[(y + Y * i) * WEIGHTS + four];
#pragma unroll
            for (unsigned u = 0; u < 4; ++u) {
#pragma unroll
                for (unsigned j = 0; j < D / 32; ++j) {
                    if (x + X * j >= value_fours) continue;
                    const float4 value = tile[(4 * four + u) * row + x + X * j];
#pragma unroll
                    for (unsigned i = 0; i < R; ++i) add_scaled(sum[i][j], u == 0 ? w[i].x : u == 1 ? w[i].y : u == 2 ? w[i].z : w[i].w, value);
                }
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (unsigned i = 0; i < R; ++i) {
        const unsigned r = y + Y * i, token = first_token + r / heads, head = r % heads;
        if (r / heads >= tokens || token >= n_tokens || head >= n_heads) continue;
        // The eight threads of a row store the same state.
        const Sink sink = sink_of(token, first_head + head, blockIdx.y, top[i], total[i], sinks, n_tokens, shape, out, parts);
#pragma unroll
        for (unsigned j = 0; j < D / 32; ++j) {
            if (x + X * j < value_fours) sink.to[x + X * j] = scaled(sum[i][j], sink.factor);
        }
    }
}

#define ATTEND_TOKEN(ROW, H, D) \
    KERNEL attention_token_##H##_##D(INPUTS) { attend_token<ROW, H, D, D>(ARGUMENTS); }
#define ATTEND_TOKENS(ROW, R, C, D) \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) attention_tokens_##D(INPUTS) { attend_tokens<ROW, R, C, D>(ARGUMENTS); }

// The kernels for a cache whose rows have the reader `ROW`.
#define ATTENTION(ROW) \
    ATTEND_TOKEN(ROW, 1, 128) \
    ATTEND_TOKEN(ROW, 4, 128) \
    ATTEND_TOKEN(ROW, 8, 128) \
    ATTEND_TOKEN(ROW, 1, 256) \
    ATTEND_TOKEN(ROW, 4, 256) \
    ATTEND_TOKENS(ROW, 4, 4, 128) \
    ATTEND_TOKENS(ROW, 2, 2, 256)
