#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(Q3_K)
