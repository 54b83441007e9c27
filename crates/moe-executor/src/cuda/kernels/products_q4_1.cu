#include "products.cuh"

PRODUCTS(Quantized<Q4_1>)
