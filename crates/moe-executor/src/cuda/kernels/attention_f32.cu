#include "attention.cuh"

ATTENTION(F32Row)
