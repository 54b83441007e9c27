#include "products.cuh"

PRODUCTS(F32)
