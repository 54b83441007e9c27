#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(Q5_K)
