// The router of a MoE layer: the logits of one token, and the selection of experts.
#include "intrinsics.cuh"

enum : unsigned { TOKENS = 4 };                        // tokens (warps) per block
enum : unsigned { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SIGMOID_OF_CHOSEN };  // the numbers in launch/router.rs

constexpr float MIN_WEIGHT_SUM = 6.1035156e-5f;

// Maps floats to unsigned integers with the order of `f32::total_cmp`. No float is mapped to 0.
__device__ unsigned order(float x) {
    const unsigned bits = __float_as_uint(x);
    const unsigned key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return key > 0 ? key : 1;
}

// The float that `order` maps to `key`.
__device__ float value_of(unsigned key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }

__device__ unsigned smallest(unsigned x) { return ~warp_max(~x); }

enum : unsigned { LOGITS_AHEAD = 4 };  // as in launch/router.rs

// Product of an f32 matrix with a row of `n_in` activations: a block per row of the matrix, and at most LOGITS_AHEAD vectors of four elements
// per thread, which loads the weights before it waits for the previous kernel. `n_in` is a multiple of 4.
KERNEL router_logits(const float* weights, const float* bias, const float* x, unsigned n_in, float* out, Start start) {
    const unsigned n = n_in / 4;
    const uint4* row = (const uint4*)weights + size_t(blockIdx.x) * n;
    uint4 w[LOGITS_AHEAD] = {};
#pragma unroll
    for (unsigned v = 0; v < LOGITS_AHEAD; v++) {
        const unsigned i = v * blockDim.x + threadIdx.x;
        if (i < n) w[v] = load_now(row + i);
    }
    follow_previous(start);
    float sum = 0.0f;
#pragma unroll
    for (unsigned v = 0; v < LOGITS_AHEAD; v++) {
        const unsigned i = v * blockDim.x + threadIdx.x;
        if (i >= n) continue;
        const float4 in = __ldcg((const float4*)x + i);
        sum = fmaf(__uint_as_float(w[v].x), in.x, sum);
        sum = fmaf(__uint_as_float(w[v].y), in.y, sum);
        sum = fmaf(__uint_as_float(w[v].z), in.z, sum);
        sum = fmaf(__uint_as_float(w[v].w), in.w, sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum + (bias ? bias[blockIdx.x] : 0.0f);
}

// Replaces the keys of experts outside the best `n_used` of `n_groups` groups by that of minus infinity. The groups are ranked by the sum of
// their two best values; the lower index wins a tie. Keys of experts that do not exist stay 0. A lane has the groups `lane`, `lane` + 32, ...
// `keys` and `sums`: memory of the warp for the keys of all experts, and of the sums of all groups.
template <unsigned N>
__device__ void keep_best_groups(unsigned (&key)[N], unsigned* keys, unsigned* sums, unsigned size, unsigned n_groups, unsigned n_used) {
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll
    for (unsigned i = 0; i < N; ++i) keys[i * WARP + lane] = key[i];
    __syncwarp();
    for (unsigned group = lane; group < n_groups; group += WARP) {
        // Lanes start at different experts, which are in different banks of the memory.
        unsigned first = 0, second = 0, at = group % size;
        for (unsigned i = 0; i < size; ++i) {
            const unsigned x = keys[group * size + at];
            second = max(second, min(first, x));
            first = max(first, x);
            at = at + 1 == size ? 0 : at + 1;
        }
        sums[group] = order(value_of(first) + value_of(second));
    }
    __syncwarp();
    // From here on, `keys` has whether a group is one of the best.
    for (unsigned group = lane; group < n_groups; group += WARP) {
        const unsigned mine = sums[group];
        unsigned better = 0;
        for (unsigned other = 0; other < n_groups; ++other) {
            const unsigned sum = sums[other];
            better += sum > mine || (sum == mine && other < group);
        }
        keys[group] = better < n_used;
    }
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
        if (key[i] != 0 && !keys[(i * WARP + lane) / size]) key[i] = order(-INFINITE);
    }
    __syncwarp();
}

// Routing of up to 32 · N experts. Lane l has experts l, l + 32, ... `n_groups`: number of expert groups, 0 without groups; experts are
// selected from `groups_used` of them. `log`, unless null, gets copies of ids and weights for the records of the pass: `(n_tokens, k)` ids,
// then as many weights.
template <unsigned N>
__device__ void route(const float* logits, const float* bias, unsigned gating, unsigned norm, float scale, unsigned n_tokens, unsigned n_expert, unsigned k, unsigned n_groups, unsigned groups_used, int* ids, float* weights, int* log, Start start) {
    follow_previous(start);
    __shared__ float chosen[TOKENS][WARP * N];
    __shared__ unsigned sums[TOKENS][WARP * N / 2];  // of groups, which have two experts or more
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned token = blockIdx.x * TOKENS + warp;
    if (token >= n_tokens) return;
    logits += size_t(token) * n_expert;
    ids += size_t(token) * k;
    weights += size_t(token) * k;
    if (log) log += size_t(token) * k;

    float p[N];
#pragma unroll
    for (unsigned i = 0; i < N; ++i) p[i] = i * WARP + lane < n_expert ? logits[i * WARP + lane] : -INFINITE;
    if (gating == SOFTMAX) {
        float top = p[0], sum = 0.0f;
#pragma unroll
        for (unsigned i = 1; i < N; ++i) top = fmaxf(top, p[i]);
        top = warp_max(top);
#pragma unroll
        for (unsigned i = 0; i < N; ++i) sum += p[i] = expf(p[i] - top);
        const float factor = 1.0f / warp_sum(sum);
#pragma unroll
        for (unsigned i = 0; i < N; ++i) p[i] *= factor;
    } else if (gating == SIGMOID) {
#pragma unroll
        for (unsigned i = 0; i < N; ++i) p[i] = 1.0f / (1.0f + expf(-p[i]));
    }

    // Keys for the selection; 0 for experts that do not exist.
    unsigned key[N];
#pragma unroll
    for (unsigned i = 0; i < N; ++i) {
        const unsigned id = i * WARP + lane;
        key[i] = id < n_expert ? order(bias && id < n_expert ? p[i] + bias[id] : p[i]) : 0;
    }
    if (n_groups) keep_best_groups(key, reinterpret_cast<unsigned*>(chosen[warp]), sums[warp], n_expert / n_groups, n_groups, groups_used);
    for (unsigned slot = 0; slot < k; ++slot) {
        unsigned best = key[0], id = lane;
        float value = p[0];
#pragma unroll
        for (unsigned i = 1; i < N; ++i) {
            if (key[i] > best) best = key[i], id = i * WARP + lane, value = p[i];
        }
        const unsigned winner = smallest(best == warp_max(best) ? id : ~0u);
        // The lane of the slot stores the weight: no other lane reads it.
        value = __shfl_sync(ALL_LANES, value, winner % WARP);
        if (lane == slot % WARP) {
            ids[slot] = winner;
            if (log) log[slot] = winner;
            chosen[warp][slot] = value;
        }
#pragma unroll
        for (unsigned i = 0; i < N; ++i) key[i] = i * WARP + lane == winner ? 0 : key[i];
    }

    if (gating == SIGMOID_OF_CHOSEN) {
        for (unsigned slot = lane; slot < k; slot += WARP) chosen[warp][slot] = 1.0f / (1.0f + expf(-chosen[warp][slot]));
    }
    float factor = 1.0f;
    if (gating == SOFTMAX_OF_CHOSEN) {
        float top = -INFINITE, sum = 0.0f;
        for (unsigned slot = lane; slot < k; slot += WARP) top = fmaxf(top, chosen[warp][slot]);
        top = warp_max(top);
        for (unsigned slot = lane; slot < k; slot += WARP) sum += chosen[warp][slot] = expf(chosen[warp][slot] - top);
        factor = 1.0f / warp_sum(sum);
    }
    if (norm) {
        float sum = 0.0f;
        for (unsigned slot = lane; slot < k; slot += WARP) sum += chosen[warp][slot] * factor;
        factor /= fmaxf(warp_sum(sum), MIN_WEIGHT_SUM);
    }
    for (unsigned slot = lane; slot < k; slot += WARP) {
        const float weight = chosen[warp][slot] * factor * scale;
        weights[slot] = weight;
        if (log) log[size_t(n_tokens) * k + slot] = __float_as_int(weight);
    }
}

#define ROUTE(N) \
    KERNEL route_##N(const float* logits, const float* __restrict__ bias, unsigned gating, unsigned norm, float scale, unsigned n_tokens, unsigned n_expert, unsigned k, unsigned n_groups, unsigned groups_used, int* ids, float* weights, int* log, Start start) { \
        route<N>(logits, bias, gating, norm, scale, n_tokens, n_expert, k, n_groups, groups_used, ids, weights, log, start); \
    }
ROUTE(1)
ROUTE(2)
ROUTE(4)
ROUTE(8)
ROUTE(16)
