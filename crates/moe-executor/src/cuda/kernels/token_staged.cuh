// The selected experts of one token (token.cuh) if the rows of a block do not fit into shared memory: every warp prefetches its
// rows in stages into a ring buffer.
#pragma once
#include "entries.cuh"
#include "lanes.cuh"
#include "pipeline.cuh"
#include "row_end.cuh"

// How rows are divided into stages, and the layout of shared memory.
struct Cut {
    unsigned stages;   // stages per row
    unsigned bytes;    // bytes per stage
    unsigned units;    // units per stage
    unsigned segment;  // bytes per stage in shared memory for any alignment, a multiple of 16
    unsigned staged;   // bytes of the activations, which precede the stages, a multiple of 16
    unsigned slots;    // slots of the ring buffer of a warp, SLOTS or 1
};

enum : unsigned { SLOTS = 2, GATE_WARPS = 16, GATE_THREADS = GATE_WARPS * WARP, ROWS_OF_WARP = 2, DOWN_THREADS = 512 };

// Block (g, e) computes rows 32 g to 32 g + 31 of selected expert e in `hidden (k, n_out)`, and the same quantized (see
// `Activations`) unless `codes` is null. `x` is quantized. It must be complete before the kernel that selects the experts starts,
// or else this kernel must be launched in order.
template <class V>
__device__ inline void staged_gate_up(
    const byte* gate, const byte* up, const int* ids, size_t expert_size, unsigned row_size, const float* gate_bias,
    const float* up_bias, const void* x, unsigned n_in, unsigned n_out, unsigned glu, float* hidden, signed char* codes,
    Group* groups, const Cut& cut, Start start
) {
    extern __shared__ int4 shared[];  // x; then the slots of each warp: a stage of the gate row and one of the up row
    __shared__ float results[2][WARP];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned first_row = blockIdx.x * WARP + warp * ROWS_OF_WARP;
    const unsigned n_rows = first_row < n_out ? min(unsigned(ROWS_OF_WARP), n_out - first_row) : 0;
    const unsigned steps = n_rows * cut.stages;
    const unsigned ring = cut.staged + warp * SLOTS * 2 * cut.segment;
    const unsigned slots = unsigned(__cvta_generic_to_shared(shared)) + ring;
    V::stage(x, n_in, shared);
    __syncthreads();

    follow_previous(start);
    const size_t expert = ids[blockIdx.y];
    const byte* next = gate + expert * expert_size + size_t(first_row) * row_size;
    const size_t to_up = up - gate;
    unsigned begin = unsigned(size_t(next)) % 16;
    const auto fill = [&](unsigned slot) {
        const unsigned to = slots + slot * 2 * cut.segment;
        copy_ahead(to, next, cut.bytes);
        copy_ahead(to + cut.segment, next + to_up, cut.bytes);
        next += cut.bytes;
    };
#pragma unroll
    for (unsigned i = 0; i < SLOTS; i++) {
        if (i < steps) fill(i);
        end_batch();
    }
    // The first warp ends the rows, one per lane.
    const unsigned row = blockIdx.x * WARP + lane;
    float bias[2] = {};
    if (warp == 0 && row < n_out) {
        if (gate_bias) bias[0] = gate_bias[expert * n_out + row];
        if (up_bias) bias[1] = up_bias[expert * n_out + row];
    }

    const typename V::Staged staged = V::at(shared, n_in, 0, n_in);
    const V kind;
    const unsigned* words = (const unsigned*)((const byte*)shared + ring);
    float sums[2] = {};
    unsigned at = warp * ROWS_OF_WARP, used = 0;
#pragma unroll 1
    for (unsigned step = 0; step < steps; step++) {
        wait_for_batches<SLOTS - 1>();
        const unsigned* here = words + step % SLOTS * (cut.segment / 2);
#pragma unroll 1
        for (unsigned u = lane; u < cut.units; u += WARP) {
            sums[0] += kind.dot(here, begin, u, staged, used + u);
            sums[1] += kind.dot(here + cut.segment / 4, begin, u, staged, used + u);
        }
        __syncwarp();
        if (step + SLOTS < steps) fill(step % SLOTS);
        end_batch();
        begin = (begin + cut.bytes) % 16;
        used += cut.units;
        if (used < cut.units * cut.stages) continue;
        const float sum = warp_sum_of_two(sums[0], sums[1]);
        if (lane % 16 == 0) results[lane / 16][at] = sum;
        sums[0] = sums[1] = 0;
        used = 0;
        at++;
    }
    __syncthreads();
    if (warp > 0) return;
    end_rows(results, bias, glu, n_out, hidden, codes, groups);
}

// A warp computes one row of `out (n_out)`: the sum over the `k` selected experts i, at most 32, of router[i] · (product + bias).
// `quantized (k, n_in)`: see `Activations`. `ids` and `router` must be complete before the kernel that computes the activations
// starts. The size of a matrix is a multiple of 16 bytes.
template <class V>
__device__ inline void staged_down(
    const byte* weights, const int* ids, const float* router, unsigned k, size_t expert_size, unsigned row_size,
    const float* bias, const void* quantized, unsigned n_in, unsigned n_out, float* out, const Cut& cut, Start start
) {
    extern __shared__ int4 shared[];  // activations; then the slots of each warp: a stage of the row of each expert
    __shared__ float by[WARP];
    const unsigned warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned row = blockIdx.x * warps + warp;
    const int id = lane < k ? __ldcg(ids + lane) : 0;
    const float weight = lane < k ? __ldcg(router + lane) : 0;
    const unsigned steps = row < n_out ? cut.stages : 0;
    const unsigned ring = cut.staged + warp * cut.slots * k * cut.segment;
    const unsigned slots = unsigned(__cvta_generic_to_shared(shared)) + ring;
    const byte* next = weights + size_t(row) * row_size;
    const unsigned begin = unsigned(size_t(next)) % 16;
    const auto fill = [&](unsigned slot) {
#pragma unroll 1
        for (unsigned e = 0; e < k; e++) {
            const size_t expert = __shfl_sync(ALL_LANES, id, e);
            copy_ahead(slots + (slot * k + e) * cut.segment, next + expert * expert_size, cut.bytes);
        }
        next += cut.bytes;
    };
#pragma unroll
    for (unsigned i = 0; i < SLOTS; i++) {
        if (i < steps) fill(i);
        end_batch();
    }
    if (threadIdx.x < k) by[threadIdx.x] = weight;
    float sum = lane < k && bias && row < n_out ? weight * bias[size_t(id) * n_out + row] : 0;
    // The units of the rows of all experts are one sequence: a lane processes every 32nd unit.
    unsigned first_expert = lane / cut.units, first_unit = lane % cut.units;
    compute_now(first_expert);
    compute_now(first_unit);

    follow_previous(start);
    V::stage(quantized, k * n_in, shared);
    __syncthreads();

    const V kind;
    const unsigned* words = (const unsigned*)((const byte*)shared + ring);
#pragma unroll 1
    for (unsigned step = 0; step < steps; step++) {
        wait_for_batches<SLOTS - 1>();
        const unsigned* here = words + step % SLOTS * k * (cut.segment / 4);
        const unsigned shift = (begin + step * cut.bytes) % 16;
        unsigned e = first_expert, u = first_unit;
#pragma unroll 1
        while (e < k) {
            const typename V::Staged x = V::at(shared, k * n_in, e, n_in);
            sum += by[e] * kind.dot(here + e * (cut.segment / 4), shift, u, x, step * cut.units + u);
            u += WARP;
            while (u >= cut.units) u -= cut.units, e++;
        }
        __syncwarp();
        if (step + SLOTS < steps) fill(step % SLOTS);
        end_batch();
    }
    sum = warp_sum(sum);
    if (lane == 0 && row < n_out) out[row] = sum;
}
