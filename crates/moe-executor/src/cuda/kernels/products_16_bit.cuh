// All products with weights in F16 or BF16.
#pragma once
#include "mat_mul_16_bit.cuh"
#include "products.cuh"

#if __CUDA_ARCH__ >= 800
// Tiles of `M` rows of weights and `N` rows of activations. `MIN`: number of blocks that must fit on a multiprocessor.
#define MAT_MUL_TILES(M, N, WM, WN, STAGES, MIN)                                                                          \
    BOUNDED(WM * WN * WARP, MIN) mat_mul_##M##_##N(MANY_PARAMETERS) {                                                     \
        wait_for_previous(start);                                                                                         \
        mat_mul_16_bit<W, M, N, WM, WN, STAGES>(                                                                          \
            weights, expert_size, row_size, bias, (const byte*)converted, MANY_ENTRIES, n_in, n_out, glu, out             \
        );                                                                                                                \
    }
#define PRODUCTS_16_BIT(...) \
    PRODUCTS(__VA_ARGS__)    \
    MAT_MUL                  \
    MAT_MUL_TILES(64, 16, 4, 1, 6, 4) MAT_MUL_TILES(64, 64, 2, 2, 4, 3) MAT_MUL_TILES(128, 64, 2, 2, 3, 3)
#else
#define PRODUCTS_16_BIT(...) PRODUCTS(__VA_ARGS__) MAT_MUL
#endif
