#include "products.cuh"

PRODUCTS(Quantized<Q8_0>)
