#include "products.cuh"

PRODUCTS(F16)
