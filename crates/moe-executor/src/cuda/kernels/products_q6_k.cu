#include "products.cuh"

PRODUCTS(Quantized<Q6_K>)
