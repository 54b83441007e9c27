#include "products.cuh"

PRODUCTS(F32)
MAT_MUL
