#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(IQ4_XS)
