// Norms, sums, activations, rotary embedding and copies of rows, all f32. If an output may be an input, the same thread reads and
// writes an element.
#include "activations.cuh"
#include "entries.cuh"

// x / sqrt(mean(x²) + eps) · weight. One block per group of `width` elements; blocks are complete warps.
KERNEL rms_norm(const float* x, const float* __restrict__ weight, float eps, unsigned width, float* out, Start start) {
    follow_previous(start);
    x += size_t(blockIdx.x) * width;
    out += size_t(blockIdx.x) * width;
    float squares = 0.0f;
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < width; i += blockDim.x) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(block_sum(squares) / width + eps);
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < width; i += blockDim.x) out[i] = x[i] * scale * weight[i];
}

enum : unsigned { ROW_VECTORS = 2 };  // as in launch/rows.rs

// `rms_norm` of one row whose width is a multiple of 32. A thread has up to ROW_VECTORS vectors of four elements, in registers. `follow`
// waits for the previous kernel, then `at(i)` loads vector i. The result is also quantized (see `Activations`) unless `codes` is null.
template <class Follow, class At>
__device__ void norm_row(
    Follow follow, At at, const float* weight, float eps, unsigned width, float* out, signed char* codes, Group* groups
) {
    const unsigned n = width / 4;
    uint4 w[ROW_VECTORS] = {};
    float4 x[ROW_VECTORS] = {};
#pragma unroll
    for (unsigned v = 0; v < ROW_VECTORS; v++) {
        const unsigned i = v * blockDim.x + threadIdx.x;
        if (i < n) w[v] = load_now((const uint4*)weight + i);
    }
    follow();
    float squares = 0.0f;
#pragma unroll
    for (unsigned v = 0; v < ROW_VECTORS; v++) {
        const unsigned i = v * blockDim.x + threadIdx.x;
        if (i < n) x[v] = at(i);
        // Explicit, so that all kernels round in the same way.
        squares = fmaf(x[v].x, x[v].x, fmaf(x[v].y, x[v].y, fmaf(x[v].z, x[v].z, fmaf(x[v].w, x[v].w, squares))));
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / width + eps);
#pragma unroll
    for (unsigned v = 0; v < ROW_VECTORS; v++) {
        const unsigned i = v * blockDim.x + threadIdx.x;
        float4& y = x[v];
        y.x = y.x * scale * __uint_as_float(w[v].x);
        y.y = y.y * scale * __uint_as_float(w[v].y);
        y.z = y.z * scale * __uint_as_float(w[v].z);
        y.w = y.w * scale * __uint_as_float(w[v].w);
        if (i < n) ((float4*)out)[i] = y;
        // The lanes of a warp quantize together.
        if (!codes || i - threadIdx.x % WARP >= n) continue;
        const FourOfGroup four = quantize_four(y);
        if (i >= n) continue;
        ((int*)codes)[i] = four.codes;
        if (i % 8 == 0) groups[i / 8] = four.group;
    }
}

KERNEL rms_norm_row(
    const float* x, const float* weight, float eps, unsigned width, float* out, signed char* codes, Group* groups, Start start
) {
    const auto at = [&](unsigned i) { return __ldcg((const float4*)x + i); };
    norm_row([&] { follow_previous(start); }, at, weight, eps, width, out, codes, groups);
}

// `add`, then `rms_norm_row` of the sum, which may be one of the operands.
KERNEL add_rms_norm(
    const float* a, const float* b, float* sum, const float* weight, float eps, unsigned width, float* out, signed char* codes,
    Group* groups, Start start_of_add, Start start
) {
    const auto at = [&](unsigned i) {
        const float4 x = __ldcg((const float4*)a + i), y = __ldcg((const float4*)b + i);
        const float4 z = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
        ((float4*)sum)[i] = z;
        return z;
    };
    norm_row([&] { follow_previous(StartsOf<2>{{start_of_add, start}}); }, at, weight, eps, width, out, codes, groups);
}

KERNEL add(const float* a, const float* b, size_t n, float* out, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

// Block of the kernels below: (row, part of its columns).
__device__ unsigned column() { return blockIdx.y * blockDim.x + threadIdx.x; }

KERNEL scale_rows_by_sigmoid(float* x, const float* score, unsigned width, Start start) {
    follow_previous(start);
    const unsigned i = column();
    const float factor = 1.0f / (1.0f + expf(-score[blockIdx.x]));
    if (i < width) x[size_t(blockIdx.x) * width + i] *= factor;
}

KERNEL get_rows(const float* x, const unsigned* rows, unsigned width, float* out, Start start) {
    follow_previous(start);
    const unsigned i = column();
    if (i < width) out[size_t(blockIdx.x) * width + i] = x[size_t(rows[blockIdx.x]) * width + i];
}

// Rotates each pair of elements of a head by its angle (cos, sin) of the row. Pair i of a head has elements `stride` · i and
// `stride` · i + `step`.
__device__ void rotate(float* x, const float* angles, unsigned row_width, unsigned head_dim, unsigned n_dims, unsigned step, unsigned stride) {
    const unsigned pairs = n_dims / 2, head = column() / pairs, pair = column() % pairs;
    if (head >= row_width / head_dim) return;
    float* a = x + size_t(blockIdx.x) * row_width + head * head_dim + pair * stride;
    const float* angle = angles + size_t(blockIdx.x) * n_dims + 2 * pair;
    const float first = a[0], second = a[step], cosine = angle[0], sine = angle[1];
    a[0] = first * cosine - second * sine;
    a[step] = first * sine + second * cosine;
}

KERNEL rope_halves(float* x, const float* angles, unsigned row_width, unsigned head_dim, unsigned n_dims, Start start) {
    follow_previous(start);
    rotate(x, angles, row_width, head_dim, n_dims, n_dims / 2, 1);
}

KERNEL rope_neighbours(float* x, const float* angles, unsigned row_width, unsigned head_dim, unsigned n_dims, Start start) {
    follow_previous(start);
    rotate(x, angles, row_width, head_dim, n_dims, 1, 2);
}

enum : unsigned { SCALE, CLAMP, AT_MOST, SIGMOID, SILU, TANH };  // the numbers in launch/rows.rs

__device__ float map_one(unsigned function, float x, float a) {
    switch (function) {
    case SCALE: return x * a;
    // Comparisons, unlike fminf, propagate NaN.
    case CLAMP: return x > a ? a : x < -a ? -a : x;
    case AT_MOST: return x > a ? a : x;
    case SIGMOID: return 1.0f / (1.0f + expf(-x));
    case SILU: return x / (1.0f + expf(-x));
    default: return tanhf(x);
    }
}

KERNEL map(float* x, unsigned function, float a, size_t n, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = map_one(function, x[i], a);
}

// Row r of `out` is row r / rows_per of `x`, whose element i is multiplied by factor f · per_row + i / group. Here f is `ids[r]`, or r if
// `ids` is null.
KERNEL multiply(const float* x, const float* factors, const int* ids, unsigned rows_per, unsigned width, unsigned group, unsigned per_row, float* out, Start start) {
    follow_previous(start);
    const unsigned row = blockIdx.x, i = column();
    if (i >= width) return;
    const size_t factor = size_t(ids ? ids[row] : row) * per_row + i / group;
    out[size_t(row) * width + i] = x[size_t(row / rows_per) * width + i] * factors[factor];
}

// Copies columns `first` ..+ `width` of rows of `row_width` elements.
KERNEL copy_columns(const float* x, unsigned row_width, unsigned first, unsigned width, float* out, Start start) {
    follow_previous(start);
    const unsigned i = column();
    if (i < width) out[size_t(blockIdx.x) * width + i] = x[size_t(blockIdx.x) * row_width + first + i];
}

// The norms that `rms_norm` does not compute: layer norms, and norms without weights, with biases `(width)`, or with weights
// `(n_weights, width)` that repeat after `n_weights` groups. Null: no weights or no biases. One block per group; blocks are complete warps.
KERNEL group_norm(
    const float* x, const float* __restrict__ weight, const float* __restrict__ bias, bool is_layer_norm, float eps, unsigned width,
    unsigned n_weights, float* out, Start start
) {
    follow_previous(start);
    x += size_t(blockIdx.x) * width;
    out += size_t(blockIdx.x) * width;
    if (weight) weight += size_t(blockIdx.x % n_weights) * width;
    float mean = 0.0f;
    if (is_layer_norm) {
        for (unsigned i = threadIdx.x; i < width; i += blockDim.x) mean += x[i];
        mean = block_sum(mean) / width;
        __syncthreads();
    }
    float squares = 0.0f;
    for (unsigned i = threadIdx.x; i < width; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / sqrtf(block_sum(squares) / width + eps);
    for (unsigned i = threadIdx.x; i < width; i += blockDim.x) {
        const float value = (x[i] - mean) * scale;
        out[i] = (weight ? value * weight[i] : value) + (bias ? bias[i] : 0.0f);
    }
}

// The gated activation of `n` elements. `glu`: see `activate_any`.
KERNEL glu(float* gate, const float* up, unsigned glu, size_t n, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) gate[i] = activate_any(glu, gate[i], up[i]);
}

// Stores the time at which all earlier work on the stream is complete.
KERNEL mark(Start start) { follow_previous(start); }

// Heads of `n_start` elements of `starts` and `n_end` elements of `ends`: `out` has rows of `n_head` heads. `..._row`, `..._head`: elements
// between two rows, and between two heads; 0 if all heads are the same. The ends are rotated unless `angles` is null; `neighbours`: whether
// pairs are adjacent elements.
KERNEL join_heads(
    const float* starts, unsigned starts_row, unsigned starts_head, const float* ends, unsigned ends_row, unsigned ends_head,
    const float* angles, unsigned neighbours, unsigned n_start, unsigned n_end, unsigned n_head, float* out, Start start
) {
    follow_previous(start);
    const unsigned width = n_start + n_end, i = column(), head = i / width, element = i % width;
    if (head >= n_head) return;
    const size_t row = blockIdx.x;
    float x;
    if (element < n_start) {
        x = starts[row * starts_row + head * starts_head + element];
    } else {
        const float* end = ends + row * ends_row + head * ends_head;
        const unsigned at = element - n_start;
        if (angles) {
            const unsigned half = n_end / 2, step = neighbours ? 1 : half;
            const unsigned pair = neighbours ? at / 2 : at % half, low = neighbours ? 2 * pair : pair;
            const float* angle = angles + row * n_end + 2 * pair;
            const float first = end[low], second = end[low + step], cosine = angle[0], sine = angle[1];
            x = at == low ? first * cosine - second * sine : first * sine + second * cosine;
        } else {
            x = end[at];
        }
    }
    out[row * n_head * width + i] = x;
}
