// The products of one token. Its selected experts have one kernel for gate, up and their activation, another one for down and the weighted
// sum.
// Rows are prefetched into shared memory in their file format, so that loads in flight need no registers for any block size.
#pragma once
#include "token_rows.cuh"
#include "token_staged.cuh"
#include "token_whole.cuh"

#define GATE_UP_PARAMETERS                                                                                              \
    const byte *gate, const byte *up, const int *ids, size_t expert_size, unsigned row_size, const float *gate_bias,    \
        const float *up_bias, const void *x, unsigned n_in, unsigned n_out, unsigned glu, float *hidden,                \
        signed char *codes, Group *groups
#define GATE_UP_ARGUMENTS \
    gate, up, ids, expert_size, row_size, gate_bias, up_bias, x, n_in, n_out, glu, hidden, codes, groups

#define DOWN_PARAMETERS                                                                                                 \
    const byte *weights, const int *ids, const float *router, unsigned k, size_t expert_size, unsigned row_size,        \
        const float *bias, const void *quantized, unsigned n_in, unsigned n_out, float *out
#define DOWN_ARGUMENTS weights, ids, router, k, expert_size, row_size, bias, quantized, n_in, n_out, out

#define CUT_PARAMETERS \
    unsigned stages, unsigned bytes, unsigned units, unsigned segment, unsigned staged, unsigned slots, Start start
#define CUT {stages, bytes, units, segment, staged, slots}

#define ROWS_PARAMETERS                                                                                                   \
    const byte *w_0, const byte *w_1, const byte *w_2, unsigned row_size, const float *bias_0, const float *bias_1,       \
        const float *bias_2, const float *x, const void *quantized, unsigned n_in, unsigned n_0, unsigned n_1,            \
        unsigned n_2, unsigned segment, unsigned staged, float *out_0, float *out_1, float *out_2, Start start
#define MATRICES {{w_0, bias_0, out_0, n_0}, {w_1, bias_1, out_1, n_1}, {w_2, bias_2, out_2, n_2}}

#define TWO_OF(threads) extern "C" __global__ void __launch_bounds__(threads, 2)

// `V`: type of the weights (lanes.cuh).
#define TOKEN_EXPERTS(...)                                                                                   \
    using V = __VA_ARGS__;                                                                                   \
    TWO_OF(GATE_THREADS) gate_up(GATE_UP_PARAMETERS, CUT_PARAMETERS) {                                       \
        staged_gate_up<V>(GATE_UP_ARGUMENTS, CUT, start);                                                           \
    }                                                                                                        \
    TWO_OF(WHOLE_THREADS) gate_up_whole(GATE_UP_PARAMETERS, unsigned segment, unsigned staged, Start start) { \
        whole_gate_up<V>(GATE_UP_ARGUMENTS, segment, staged, start);                                                \
    }                                                                                                        \
    TWO_OF(DOWN_THREADS) down(DOWN_PARAMETERS, CUT_PARAMETERS) { staged_down<V>(DOWN_ARGUMENTS, CUT, start); }      \
    TWO_OF(WHOLE_THREADS) down_whole(DOWN_PARAMETERS, unsigned segment, unsigned staged, Start start) { \
        whole_down<V>(DOWN_ARGUMENTS, segment, staged, start);                                                      \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024) rows_of_one(ROWS_PARAMETERS) {                        \
        rows_of_token<V>(MATRICES, row_size, x, quantized, n_in, segment, staged, start);                    \
    }
