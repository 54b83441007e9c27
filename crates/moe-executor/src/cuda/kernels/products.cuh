// Products with one type of weights. Each type has its own file, so that the driver only compiles the types of a model.
#pragma once
#include "mat_mul.cuh"
#include "mat_vec.cuh"

#define ONE_PARAMETERS                                                                                              \
    const byte *weights, const byte *up, const unsigned long long *table, const int *ids, size_t expert_size,       \
        unsigned row_size, const float *bias, const float *up_bias, const float *x, const void *quantized,         \
        unsigned n_source, unsigned rows_per, unsigned n_in, unsigned n_out, unsigned glu, float *out, Start start
#define ONE_ARGUMENTS \
    weights, up, table, ids, expert_size, row_size, bias, up_bias, x, quantized, n_source, rows_per, n_in, n_out, glu, out, start, blockIdx.y

// Up to three products with the same row of activations: queries, keys and values.
#define THREE_PARAMETERS                                                                                              \
    const byte *w_0, const byte *w_1, const byte *w_2, unsigned row_size, const float *bias_0, const float *bias_1,   \
        const float *bias_2, const float *x, const void *quantized, unsigned n_in, unsigned n_0, unsigned n_1,        \
        unsigned n_2, float *out_0, float *out_1, float *out_2, Start start
#define OF_THREE(name) (blockIdx.y == 0 ? name##_0 : blockIdx.y == 1 ? name##_1 : name##_2)

// `converted`: the rows of `x` in the format that the product reads, if it is not f32.
#define MANY_PARAMETERS                                                                                                  \
    const byte *weights, size_t expert_size, unsigned row_size, const float *bias, const float *x, const void *converted, \
        unsigned n_source, const void *list, const unsigned *bounds, bool wide, unsigned k, unsigned rows_per,           \
        unsigned n_rows, unsigned n_in, unsigned n_out, unsigned glu, float *out, Start start
#define MANY_ENTRIES {list, bounds, wide, k, rows_per, n_rows}

#define BOUNDED(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

// `W`: type of the weights (weights.cuh).
#define PRODUCTS(...)                                                                                             \
    using W = __VA_ARGS__;                                                                                        \
    BOUNDED(VEC_THREADS, VEC_BLOCKS) mat_vec_1(ONE_PARAMETERS) { mat_vec_one<W, 1, false>(ONE_ARGUMENTS); }       \
    BOUNDED(VEC_THREADS, VEC_BLOCKS) mat_vec_2(ONE_PARAMETERS) { mat_vec_one<W, 2, false>(ONE_ARGUMENTS); }       \
    BOUNDED(VEC_THREADS, VEC_BLOCKS) mat_vec_glu(ONE_PARAMETERS) { mat_vec_one<W, 2, true>(ONE_ARGUMENTS); }      \
    BOUNDED(VEC_THREADS, VEC_BLOCKS) mat_vec_three(THREE_PARAMETERS) {                                            \
        mat_vec_one<W, 1, false>(                                                                                 \
            OF_THREE(w), nullptr, nullptr, nullptr, 0, row_size, OF_THREE(bias), nullptr, x, quantized, 1, 1,     \
            n_in, OF_THREE(n), 0, OF_THREE(out), start, 0                                                             \
        );                                                                                                        \
    }                                                                                                             \
    BOUNDED(VEC_THREADS) mat_vec_few(MANY_PARAMETERS) {                                                           \
        wait_for_previous(start);                                                                                      \
        mat_vec_several<W, 4>(                                                                                        \
            weights, expert_size, row_size, bias, x, converted, n_source, MANY_ENTRIES, n_in, n_out, glu, out     \
        );                                                                                                        \
    }

// Products of many rows on any GPU.
#define MAT_MUL                                                                                                  \
    BOUNDED(MUL_THREADS) mat_mul(MANY_PARAMETERS) {                                                              \
        wait_for_previous(start);                                                                                \
        if constexpr (W::QUANTIZED) {                                                                            \
            mat_mul_quantized<W>(                                                                                \
                weights, expert_size, row_size, bias, converted, n_source, MANY_ENTRIES, n_in, n_out, glu, out   \
            );                                                                                                   \
        } else {                                                                                                 \
            mat_mul_floating<W>(                                                                                 \
                weights, expert_size, row_size, bias, x, MANY_ENTRIES, n_in, n_out, glu, out                     \
            );                                                                                                   \
        }                                                                                                        \
    }
