// Kernels before and after the products of selected experts: quantization, sorting by expert, and the weighted sum.
#include "weights.cuh"

// Quantizes `n` activations, a multiple of 32. `codes` and `groups`: see `Activations`.
KERNEL quantize(const float* x, size_t n, int4* codes, Group* groups, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const HalfGroup half = quantize_sixteen_of(x, i, n / 16);
    if (i >= n / 16) return;
    codes[i] = {half.codes[0], half.codes[1], half.codes[2], half.codes[3]};
    store_group(half, i, groups);
}

// Converts `n` activations to 16-bit elements; `n` is a multiple of 8.
template <class E>
__device__ inline void convert(const float4* x, size_t n, uint4* out) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n / 8) return;
    const auto pair = [](float low, float high) { return E::bits(low) | E::bits(high) << 16; };
    const float4 a = x[2 * i], b = x[2 * i + 1];
    out[i] = {pair(a.x, a.y), pair(a.z, a.w), pair(b.x, b.y), pair(b.z, b.w)};
}
KERNEL convert_f16(const float4* x, size_t n, uint4* out, Start start) {
    follow_previous(start);
    convert<Half>(x, n, out);
}
KERNEL convert_bf16(const float4* x, size_t n, uint4* out, Start start) {
    follow_previous(start);
    convert<Brain>(x, n, out);
}

enum : unsigned { GROUP_WARPS = 8 };

// Sorts the entries (token, slot) by expert; the sort is stable. Block e stores the entries of expert e. `bounds (n_expert + 1)`:
// index of the first entry of each expert. An entry of the list has 22 bits for the token and 10 for the slot, or 32 and 32 if
// `wide`.
extern "C" __global__ void __launch_bounds__(GROUP_WARPS* WARP) group_entries(
    const int* ids, unsigned n, unsigned k, bool wide, unsigned* bounds, void* list, Start start
) {
    follow_previous(start);
    __shared__ unsigned below[GROUP_WARPS], same[GROUP_WARPS];
    const int expert = blockIdx.x;
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // Each warp processes a part of the ids, a multiple of 32.
    const unsigned piece = (n + GROUP_WARPS * WARP - 1) / (GROUP_WARPS * WARP) * WARP;
    const unsigned first = min(warp * piece, n), end = min(first + piece, n);

    unsigned n_below = 0, n_same = 0;
#pragma unroll 4
    for (unsigned at = first + lane; at < end; at += WARP) {
        const int id = ids[at];
        n_below += id < expert;
        n_same += id == expert;
    }
#pragma unroll
    for (unsigned step = WARP / 2; step > 0; step /= 2) {
        n_below += __shfl_xor_sync(ALL_LANES, n_below, step);
        n_same += __shfl_xor_sync(ALL_LANES, n_same, step);
    }
    if (lane == 0) {
        below[warp] = n_below;
        same[warp] = n_same;
    }
    __syncthreads();
    unsigned begin = 0, place = 0, count = 0;
    for (unsigned w = 0; w < GROUP_WARPS; w++) {
        begin += below[w];
        count += same[w];
        if (w < warp) place += same[w];
    }
    if (threadIdx.x == 0) {
        bounds[expert] = begin;
        if (blockIdx.x == gridDim.x - 1) bounds[expert + 1] = begin + count;
    }
    if (same[warp] == 0) return;
    place += begin;
#pragma unroll 4
    for (unsigned from = first; from < end; from += WARP) {
        const unsigned at = from + lane;
        const bool hit = at < end && ids[at] == expert;
        const unsigned hits = __ballot_sync(ALL_LANES, hit);
        if (hit) {
            const unsigned to = place + __popc(hits & ((1u << lane) - 1));
            const unsigned token = at / k, slot = at % k;
            if (wide) ((uint2*)list)[to] = {token, slot};
            else ((unsigned*)list)[to] = token | slot << 22;
        }
        place += __popc(hits);
    }
}

// Finds the slots of the experts `ids (k)` of one token; one warp. `table (n_expert)`: slot of each expert, or -1. `slots (k)`: slot of
// each selected expert, `dummy` for one without a slot. The CPU reads `mail`: the number of experts without a slot, then `ids`; both are
// complete when `*mailed` is `number`. If all experts have slots, the kernel sets `*go` to `number`; otherwise the CPU does it later.
KERNEL find_slots(const int* ids, const int* table, unsigned k, unsigned dummy, unsigned number, int* slots, unsigned* mail, unsigned* mailed, unsigned* go, Start start) {
    follow_previous(start);
    unsigned missing = 0;
    for (unsigned first = 0; first < k; first += WARP) {
        const unsigned i = first + threadIdx.x;
        const int id = i < k ? ids[i] : 0, slot = i < k ? table[id] : 0;
        missing += __popc(__ballot_sync(ALL_LANES, slot < 0));
        if (i >= k) continue;
        slots[i] = slot < 0 ? int(dummy) : slot;
        ((volatile unsigned*)mail)[1 + i] = unsigned(id);
    }
    if (threadIdx.x == 0) *(volatile unsigned*)mail = missing;
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x > 0) return;
    if (missing == 0) *(volatile unsigned*)go = number;
    __threadfence_system();
    *(volatile unsigned*)mailed = number;
}

// `out (tokens, width)`: the sum of `experts (tokens, k, width)` times `weights (tokens, k)`, unless they are null, in the order of the
// slots. Every product and every sum is rounded, like on the CPU.
KERNEL merge(const float* experts, const float* weights, unsigned k, unsigned width, size_t n, float* out, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const size_t token = i / width, column = i % width;
    experts += token * k * width + column;
    if (weights) weights += token * k;
    const auto term = [&](unsigned slot) {
        const float x = experts[size_t(slot) * width];
        return weights ? __fmul_rn(x, weights[slot]) : x;
    };
    float sum = term(0);
#pragma unroll 8
    for (unsigned slot = 1; slot < k; slot++) sum = __fadd_rn(sum, term(slot));
    out[i] = sum;
}

// The activation of experts without a gate: max(x, 0)². A comparison, unlike fmaxf, propagates NaN.
KERNEL squared_relu(float* x, size_t n, Start start) {
    follow_previous(start);
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float positive = x[i] < 0.0f ? 0.0f : x[i];
    x[i] = positive * positive;
}
