#include "products_16_bit.cuh"

PRODUCTS_16_BIT(BF16)
