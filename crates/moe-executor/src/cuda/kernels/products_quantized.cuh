// All products with quantized weights.
#pragma once
#include "mat_mul_quantized.cuh"
#include "products.cuh"

#if __CUDA_ARCH__ >= 800
// Tiles of `M` rows of weights and `N` rows of activations. `MIN`: number of blocks that must fit on a multiprocessor.
#define MAT_MUL_TILES(M, N, WM, WN, MIN)                                                                                  \
    BOUNDED(WM * WN * WARP, MIN) mat_mul_##M##_##N(MANY_PARAMETERS) {                                                     \
        wait_for_previous(start);                                                                                         \
        mat_mul_quantized_tiles<W, M, N, WM, WN>(                                                                         \
            weights, expert_size, row_size, bias, converted, n_source, MANY_ENTRIES, n_in, n_out, glu, out                \
        );                                                                                                                \
    }
#define QUANTIZED_PRODUCTS(...)      \
    PRODUCTS(Quantized<__VA_ARGS__>) \
    MAT_MUL_TILES(64, 16, 4, 1, 6) MAT_MUL_TILES(64, 64, 2, 2, 4)
#define LARGE_TILES MAT_MUL_TILES(128, 64, 4, 2, 2)
#else
#define QUANTIZED_PRODUCTS(...) PRODUCTS(Quantized<__VA_ARGS__>) MAT_MUL
#define LARGE_TILES
#endif
