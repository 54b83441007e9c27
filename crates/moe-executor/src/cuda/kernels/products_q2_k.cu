#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(Q2_K)
