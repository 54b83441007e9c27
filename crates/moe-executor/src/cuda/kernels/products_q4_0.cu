#include "products.cuh"

PRODUCTS(Quantized<Q4_0>)
