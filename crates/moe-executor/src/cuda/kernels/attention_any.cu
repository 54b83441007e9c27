#include "attention.cuh"

ATTENTION(AnyRow)
