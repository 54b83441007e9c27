// The combination of the splits of attention, and stores to the KV cache.
#include "attention.cuh"

// Combines a few splits of each of `n_rows` rows (token, head). Thread: four elements of a row.
KERNEL attention_combine_few(const float* parts, const float* __restrict__ sinks, unsigned n_rows, unsigned n_head, unsigned head_dim, unsigned splits, float* out, Start start) {
    follow_previous(start);
    const unsigned fours = head_dim / 4, i = blockIdx.x * blockDim.x + threadIdx.x, row = i / fours, four = i % fours;
    if (row >= n_rows) return;
    const float4* from = fours_of(parts) + size_t(row) * splits * fours + four;
    const float2* states = reinterpret_cast<const float2*>(parts + size_t(n_rows) * splits * head_dim) + size_t(row) * splits;
    float top = -INFINITE, total = 0.0f;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (unsigned split = 0; split < splits; ++split) top = fmaxf(top, states[split].x);
#pragma unroll 4
    for (unsigned split = 0; split < splits; ++split) {
        const float2 state = states[split];
        const float weight = expf(state.x - top);
        total = fmaf(state.y, weight, total);
        add_scaled(sum, weight, from[size_t(split) * fours]);
    }
    reinterpret_cast<float4*>(out)[i] = scaled(sum, closing_factor(top, total, sinks, row % n_head));
}

// Combines many splits of a row, at most 128. A thread reads four elements of every n-th split, where n is the number of times that a
// row of sums fits in a block. Block: (token, head). Dynamic shared memory: a sum for each thread.
KERNEL attention_combine(const float* parts, const float* __restrict__ sinks, unsigned n_head, unsigned head_dim, unsigned splits, float* out, Start start) {
    follow_previous(start);
    enum : unsigned { STATES = 4, AHEAD = 8 };
    extern __shared__ float4 sums[];
    __shared__ float weights[STATES * WARP];
    const size_t row = blockIdx.x, rows = gridDim.x;
    const unsigned lane = threadIdx.x % WARP, fours = head_dim / 4, four = threadIdx.x % fours, n = blockDim.x / fours;
    const unsigned group = threadIdx.x / fours;
    const float4* from = fours_of(parts + row * splits * head_dim) + four;
    // The first reads do not wait for the weights.
    float4 ahead[AHEAD];
#pragma unroll
    for (unsigned i = 0; i < AHEAD; ++i) {
        const unsigned split = group + i * n;
        ahead[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (group < n && split < splits) ahead[i] = from[size_t(split) * fours];
    }
    // Every warp computes the same largest score and total.
    const float2* states = reinterpret_cast<const float2*>(parts + rows * splits * head_dim) + row * splits;
    float2 state[STATES];
    float top = -INFINITE, total = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < STATES; ++i) {
        state[i] = {-INFINITE, 0.0f};
        if (lane + i * WARP < splits) state[i] = states[lane + i * WARP];
        top = fmaxf(top, state[i].x);
    }
    top = warp_max(top);
#pragma unroll
    for (unsigned i = 0; i < STATES; ++i) {
        const float weight = expf(state[i].x - top);
        total += state[i].y * weight;
        if (threadIdx.x < WARP) weights[lane + i * WARP] = weight;
    }
    total = warp_sum(total);
    __syncthreads();
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (unsigned i = 0; i < AHEAD; ++i) {
        if (group + i * n < splits) add_scaled(sum, weights[group + i * n], ahead[i]);
    }
    for (unsigned split = group + AHEAD * n; group < n && split < splits; split += n) add_scaled(sum, weights[split], from[size_t(split) * fours]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group > 0) return;
    for (unsigned i = 1; i < n; ++i) add_scaled(sum, 1.0f, sums[i * fours + four]);
    reinterpret_cast<float4*>(out + row * head_dim)[four] = scaled(sum, closing_factor(top, total, sinks, row % n_head));
}

// Rounds rows of keys (y = 0) and values (y = 1) to F16: row i of `width` elements, at element i * k_stride or i * v_stride of the cache. Thread: four
// elements.
KERNEL attention_halves(const void* k, const void* v, unsigned types, unsigned n_rows, unsigned width, unsigned k_stride, unsigned v_stride, uint2* out, Start start) {
    wait_for_previous(start);
    const unsigned fours = width / 4;
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x, row = i / fours;
    if (row >= n_rows) return;
    const float4 x = AnyRow(blockIdx.y ? v : k, row * (blockIdx.y ? v_stride : k_stride), blockIdx.y ? types >> 16 : types & 0xffff)[i % fours];
    const auto two = [](float a, float b) { return half_bits(a) | unsigned(half_bits(b)) << 16; };
    out[i + blockIdx.y * (size_t(n_rows) * fours)] = {two(x.x, x.y), two(x.z, x.w)};
}

// Stores of rows of keys or values as rows `at` of `out`, which has `width` columns. Block: (row, part of its columns).
__device__ size_t stored_at(const unsigned* at, unsigned width, unsigned column) { return size_t(at[blockIdx.x]) * width + column; }

// A warp converts a block of 32 elements like the CPU: codes are rounded to the nearest integer, ties to even. All lanes have an element
// of the block; that of this lane is element `i` of `out`.
__device__ void store_q8_0(byte* out, size_t i, float value) {
    const unsigned lane = threadIdx.x % WARP;
    // As integers, so that NaN is the largest value and propagates.
    const unsigned most = warp_max(__float_as_uint(value) & 0x7fffffff);
    const float amax = __uint_as_float(most);
    byte* block = out + i / 32 * 34;
    if (lane == 0) *(unsigned short*)block = half_bits(__fdiv_rn(amax, 127));
    block[2 + lane] = byte(__float2int_rn(value * (most == 0 ? 0 : __fdiv_rn(127, amax))));
}

KERNEL store_rows_f32(const float* x, const unsigned* at, unsigned width, float* out, Start start) {
    follow_previous(start);
    const unsigned i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < width) out[stored_at(at, width, i)] = x[size_t(blockIdx.x) * width + i];
}

KERNEL store_rows_f16(const float* x, const unsigned* at, unsigned width, unsigned short* out, Start start) {
    follow_previous(start);
    const unsigned i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < width) out[stored_at(at, width, i)] = half_bits(x[size_t(blockIdx.x) * width + i]);
}

// `width` is a multiple of 32, so that either all or no lanes of a warp have an element.
KERNEL store_rows_q8_0(const float* x, const unsigned* at, unsigned width, byte* out, Start start) {
    follow_previous(start);
    const unsigned i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    store_q8_0(out, stored_at(at, width, i), x[size_t(blockIdx.x) * width + i]);
}

// Stores an element of a row as element `i` of `cache`. For Q8_0, the lanes of a warp have the elements of a block.
__device__ void store_element(void* cache, unsigned type, size_t i, float value) {
    if (type == CACHE_F32) ((float*)cache)[i] = value;
    else if (type == CACHE_F16) ((unsigned short*)cache)[i] = half_bits(value);
    else store_q8_0((byte*)cache, i, value);
}

// For a token: the norms of queries and keys unless their weights are null, the rotary embedding unless `angles` is null, and the stores of
// keys and values. The results are those of `rms_norm`, `rope_halves` or `rope_neighbours`, and `store_rows_...`. `type`: type of the cache.
// One block per head, first of queries, then of keys, then of values; one thread per element, at most 128.
KERNEL attention_inputs(
    const float* q, const float* k, const float* v, float* q_out, float* k_out, const float* __restrict__ q_weight,
    const float* __restrict__ k_weight, float eps, const float* angles, unsigned n_head, unsigned n_head_kv, unsigned head_dim,
    unsigned n_dims, unsigned neighbours, const unsigned* at, void* k_cache, void* v_cache, unsigned type, Start start_0, Start start_1,
    Start start_2, Start start_3, Start start_4, Start start_5, Start start_6, Start start_7
) {
    follow_previous(StartsOf<8>{{start_0, start_1, start_2, start_3, start_4, start_5, start_6, start_7}});
    __shared__ float head[128];
    __shared__ float scale;
    const unsigned i = threadIdx.x;
    const bool is_query = blockIdx.x < n_head, is_value = blockIdx.x >= n_head + n_head_kv;
    const unsigned column = (blockIdx.x - (is_query ? 0 : is_value ? n_head + n_head_kv : n_head)) * head_dim + i;
    float x = (is_query ? q : is_value ? v : k)[column];
    const size_t stored = size_t(at[0]) * n_head_kv * head_dim + column;
    if (is_value) {
        store_element(v_cache, type, stored, x);
        return;
    }
    const float* weight = is_query ? q_weight : k_weight;
    if (weight) {
        head[i] = x;
        __syncthreads();
        if (i < WARP) {
            float squares = 0.0f;
            for (unsigned j = i; j < head_dim; j += WARP) squares += head[j] * head[j];
            squares = warp_sum(squares);
            if (i == 0) scale = 1.0f / sqrtf(squares / head_dim + eps);
        }
        __syncthreads();
        x = x * scale * weight[i];
    }
    if (angles) {
        __syncthreads();
        head[i] = x;
        __syncthreads();
        if (i < n_dims) {
            const unsigned half = n_dims / 2, step = neighbours ? 1 : half, pair = neighbours ? i / 2 : i % half;
            const unsigned low = neighbours ? 2 * pair : pair;
            const float first = head[low], second = head[low + step], cosine = angles[2 * pair], sine = angles[2 * pair + 1];
            x = i == low ? first * cosine - second * sine : first * sine + second * cosine;
        }
    }
    if (is_query) {
        q_out[column] = x;
        return;
    }
    k_out[column] = x;
    store_element(k_cache, type, stored, x);
}
