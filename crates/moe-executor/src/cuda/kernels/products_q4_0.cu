#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(Q4_0)
