// The selected experts of one token (token.cuh) if all rows of a block fit into shared memory: all loads are issued at once.
// Small experts end before a ring buffer would wrap around, and blocks of both kernels fit on a multiprocessor at the same time.
#pragma once
#include "entries.cuh"
#include "lanes.cuh"
#include "pipeline.cuh"
#include "row_end.cuh"

// A warp computes four rows of gate and up in two stages, or two rows of down.
enum : unsigned { WHOLE_WARPS = 8, WHOLE_THREADS = WHOLE_WARPS * WARP, PAIR = 2, DOWN_ROWS = WHOLE_WARPS * PAIR };

// As `staged_gate_up`; `n_out` is a multiple of 4. A pair of rows has `segment` bytes, x `staged` bytes; both are multiples of
// 16.
template <class V>
__device__ inline void whole_gate_up(
    const byte* gate, const byte* up, const int* ids, size_t expert_size, unsigned row_size, const float* gate_bias,
    const float* up_bias, const void* x, unsigned n_in, unsigned n_out, unsigned glu, float* hidden, signed char* codes,
    Group* groups, unsigned segment, unsigned staged, Start start
) {
    extern __shared__ int4 shared[];  // x; then for each warp and stage a pair of gate rows and a pair of up rows
    __shared__ float results[2][WARP];
    __shared__ Arrival arrivals[WHOLE_WARPS][2];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned first_row = blockIdx.x * WARP + warp * 2 * PAIR;
    const unsigned memory = staged + warp * 4 * segment;
    Arrival* arrival = arrivals[warp];
    if (lane < 2) arrival[lane].begin();
    V::stage(x, n_in, shared);
    __syncthreads();

    follow_previous(start);
    const size_t expert = ids[blockIdx.y];
    const byte* from = gate + expert * expert_size + size_t(first_row) * row_size;
    unsigned begin = unsigned(size_t(from)) % 16;
    if (first_row < n_out) {
        const unsigned bytes = PAIR * row_size;
        unsigned to = unsigned(__cvta_generic_to_shared(shared)) + memory;
        const size_t to_up = up - gate;
#pragma unroll
        for (unsigned stage = 0; stage < 2; stage++) {
            // The copy engine copies the gate rows and threads the up rows, because either alone has less bandwidth.
            if (!HAS_ENGINE) copy_ahead(to, from, bytes);
            else if (lane == 0) {
                arrival[stage].expect(Arrival::around(from, bytes));
                arrival[stage].copy(to, from, bytes);
            }
            copy_ahead(to + segment, from + to_up, bytes);
            end_batch();
            to += 2 * segment;
            from += bytes;
        }
    }
    // The first warp ends the rows, one per lane.
    const unsigned row = blockIdx.x * WARP + lane;
    float bias[2] = {};
    if (warp == 0 && row < n_out) {
        if (gate_bias) bias[0] = gate_bias[expert * n_out + row];
        if (up_bias) bias[1] = up_bias[expert * n_out + row];
    }

    const typename V::Staged staged_x = V::at(shared, n_in, 0, n_in);
    const V kind;
    const unsigned* here = (const unsigned*)((const byte*)shared + memory);
    if (first_row < n_out) {
#pragma unroll 1
        for (unsigned stage = 0; stage < 2; stage++) {
            if (stage == 0) wait_for_batches<1>();
            else wait_for_batches<0>();
            arrival[stage].wait();
#pragma unroll 1
            for (unsigned r = 0; r < PAIR; r++) {
                float sums[2] = {};
#pragma unroll 1
                for (unsigned u = lane; u < n_in / V::UNIT; u += WARP) {
                    sums[0] += kind.dot(here, begin + r * row_size, u, staged_x, u);
                    sums[1] += kind.dot(here + segment / 4, begin + r * row_size, u, staged_x, u);
                }
                const float sum = warp_sum_of_two(sums[0], sums[1]);
                if (lane % 16 == 0) results[lane / 16][(warp * 2 + stage) * PAIR + r] = sum;
            }
            here += segment / 2;
            begin = (begin + PAIR * row_size) % 16;
        }
    }
    __syncthreads();
    if (warp > 0) return;
    end_rows(results, bias, glu, n_out, hidden, codes, groups);
}

// As `staged_down`; `n_out` is even. The sixteen rows of an expert in a block have `segment` bytes, the activations `staged`
// bytes; both are multiples of 16.
template <class V>
__device__ inline void whole_down(
    const byte* weights, const int* ids, const float* router, unsigned k, size_t expert_size, unsigned row_size,
    const float* bias, const void* quantized, unsigned n_in, unsigned n_out, float* out, unsigned segment, unsigned staged, Start start
) {
    extern __shared__ int4 shared[];  // activations; then the rows of the block for each expert
    __shared__ float by[WARP];
    __shared__ Arrival arrival;
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned first_row = blockIdx.x * DOWN_ROWS, row = first_row + warp * PAIR;
    const byte* from = weights + size_t(first_row) * row_size;
    const unsigned begin = unsigned(size_t(from)) % 16, mine = begin + warp * PAIR * row_size;
    const unsigned to = unsigned(__cvta_generic_to_shared(shared)) + staged;
    const bool chosen = lane < k;
    int id = 0;
    float weight = 0;
    if (chosen && (warp == 0 || bias || !HAS_ENGINE)) {
        id = __ldcg(ids + lane);
        weight = __ldcg(router + lane);
    }
    if (warp == 0) by[lane] = weight;
    if (!HAS_ENGINE) {
        // Each warp copies its own rows.
        for (unsigned e = 0; row < n_out && e < k; e++) {
            const size_t expert = __shfl_sync(ALL_LANES, id, e);
            copy_ahead(to + e * segment + mine / 16 * 16, from + expert * expert_size + warp * PAIR * row_size, PAIR * row_size);
        }
        end_batch();
    } else if (warp == 0) {
        const unsigned bytes = min(unsigned(DOWN_ROWS), n_out - first_row) * row_size;
        if (lane == 0) {
            arrival.begin();
            arrival.expect(k * Arrival::around(from, bytes));
        }
        __syncwarp();
        if (chosen) arrival.copy(to + lane * segment, from + size_t(id) * expert_size, bytes);
    }
    float sums[PAIR] = {};
    if (chosen && bias && row < n_out) {
        const float* at = bias + size_t(id) * n_out + row;
        sums[0] = weight * at[0];
        sums[1] = weight * at[1];
    }
    // The units of the rows of all experts are one sequence: a lane processes every 32nd unit.
    const unsigned units = n_in / V::UNIT;
    unsigned e = lane / units, u = lane % units;
    compute_now(e);
    compute_now(u);

    follow_previous(start);
    V::stage(quantized, k * n_in, shared);
    __syncthreads();

    wait_for_batches<0>();
    arrival.wait();
    if (row >= n_out) return;
    const V kind;
    const unsigned* words = (const unsigned*)((const byte*)shared + staged);
#pragma unroll 1
    while (e < k) {
        const typename V::Staged x = V::at(shared, k * n_in, e, n_in);
        const unsigned* rows = words + e * (segment / 4);
#pragma unroll
        for (unsigned r = 0; r < PAIR; r++) sums[r] += by[e] * kind.dot(rows, mine + r * row_size, u, x, u);
        u += WARP;
        while (u >= units) u -= units, e++;
    }
    const float sum = warp_sum_of_two(sums[0], sums[1]);
    if (lane % 16 == 0) out[row + lane / 16] = sum;
}
