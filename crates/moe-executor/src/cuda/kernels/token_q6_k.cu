#include "token.cuh"

TOKEN_EXPERTS(LaneQ6_K)
