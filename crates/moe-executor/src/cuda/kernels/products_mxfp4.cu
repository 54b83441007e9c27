#include "products.cuh"

PRODUCTS(Quantized<MXFP4>)
