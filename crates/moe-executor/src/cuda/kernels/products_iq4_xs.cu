#include "products.cuh"

PRODUCTS(Quantized<IQ4_XS>)
