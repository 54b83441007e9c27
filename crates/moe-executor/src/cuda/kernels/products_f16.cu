#include "products_16_bit.cuh"

PRODUCTS_16_BIT(F16)
