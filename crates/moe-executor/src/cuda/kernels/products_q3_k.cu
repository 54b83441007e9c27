#include "products.cuh"

PRODUCTS(Quantized<Q3_K>)
