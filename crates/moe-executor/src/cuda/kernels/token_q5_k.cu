#include "token.cuh"

TOKEN_EXPERTS(LaneQ5_K)
