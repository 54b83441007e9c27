#include "attention.cuh"

ATTENTION(Q8Row)
