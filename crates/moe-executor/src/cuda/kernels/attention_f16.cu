#include "attention.cuh"

ATTENTION(F16Row)
