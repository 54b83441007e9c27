#include "products.cuh"

PRODUCTS(Quantized<Q5_K>)
