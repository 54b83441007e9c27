// Norms, sums, activations, rotary embedding and copies of rows, all f32. If an output may be an input, the same thread reads and
// writes an element.
#include "activations.cuh"

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

// x · sigmoid(alpha x)
__device__ float silu(float x, float alpha) { return x / (1.0f + expf(-alpha * x)); }

KERNEL swiglu(float* gate, const float* up, size_t n, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) gate[i] = silu(gate[i], 1.0f) * up[i];
}

KERNEL swiglu_oai(float* gate, const float* up, size_t n, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    // Comparisons, unlike fminf, propagate NaN.
    const float g = gate[i] > 7.0f ? 7.0f : gate[i];
    const float u = up[i] > 7.0f ? 7.0f : up[i] < -7.0f ? -7.0f : up[i];
    gate[i] = silu(g, 1.702f) * (u + 1.0f);
}

// Stores the time at which all earlier work on the stream is complete.
KERNEL mark(Start start) { follow_previous(start); }
