#include "products.cuh"

PRODUCTS(BF16)
