#include "token.cuh"

TOKEN_EXPERTS(LaneQ4_K)
