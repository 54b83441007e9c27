#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(Q8_0)
