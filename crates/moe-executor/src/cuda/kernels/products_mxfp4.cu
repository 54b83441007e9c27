#include "products_quantized.cuh"

QUANTIZED_PRODUCTS(MXFP4)
LARGE_TILES
