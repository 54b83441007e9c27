#include "products.cuh"

PRODUCTS(Quantized<Q2_K>)
