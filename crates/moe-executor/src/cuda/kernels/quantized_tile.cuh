// A step of a matrix-matrix product with quantized weights.
#pragma once
#include "weights.cuh"

// 128 elements of `M` rows of weights and `N` rows of activations, as signed bytes with their scales.
template <class F, unsigned M, unsigned N>
struct QuantizedTile {
    static constexpr unsigned STEP = 128;
    // Bytes per row of codes, with padding so that eight rows are in different banks.
    static constexpr unsigned ROW = STEP + 16;
    // Number of weights with the same scale, and number of such parts per row.
    static constexpr unsigned PART = F::SCALES == Scales::Quarters ? 16 : 32;
    static constexpr unsigned PARTS = STEP / PART;

    int4 weights[M * ROW / 16];
    int4 inputs[N * ROW / 16];
    float scales[PARTS][M];
    float mins[F::MIN ? PARTS : 1][M];
    alignas(8) float input_scales[STEP / 32][N];
    alignas(8) float input_sums[F::MIN ? PARTS : 1][N];  // scaled

    // Stores the decoded unit `u` of the step for row `r`, with codes as signed bytes.
    __device__ void put_weights(unsigned r, unsigned u, const Unit& unit) {
        const unsigned first[2] = {F::first(u) % STEP, F::first(u) % STEP + F::STRIDE};
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            int codes[4];
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned code = unit.codes[4 * half + i];
                // Bytes do not borrow from each other: each is at least 128 before the subtraction.
                codes[i] = F::OFFSET == 0 ? code : ((code | 0x80808080) - F::OFFSET * 0x01010101) ^ 0x80808080;
            }
            weights[(r * ROW + first[half]) / 16] = {codes[0], codes[1], codes[2], codes[3]};
        }
        // With one scale per 32 weights, two units of K-quants contain the same two scales. The first unit stores them.
        if (first[0] % PART != 0) return;
#pragma unroll
        for (unsigned half = 0; half < (F::SCALES == Scales::One ? 1 : 2); half++) {
            scales[first[half] / PART][r] = unit.scale[half];
            if (F::MIN) mins[first[half] / PART][r] = unit.min[half];
        }
    }

    __device__ void put_group(unsigned t, unsigned g, const Group& group) {
        input_scales[g][t] = group.scale;
        if (F::MIN && PART == 32) input_sums[g][t] = group.scale * (group.sum(0) + group.sum(1));
        if (F::MIN && PART == 16) {
            input_sums[2 * g % PARTS][t] = group.scale * group.sum(0);
            input_sums[(2 * g + 1) % PARTS][t] = group.scale * group.sum(1);
        }
    }
};
