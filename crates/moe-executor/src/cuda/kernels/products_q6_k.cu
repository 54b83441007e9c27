#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(Q6_K)
