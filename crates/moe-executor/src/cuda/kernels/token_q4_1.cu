#include "token.cuh"

TOKEN_EXPERTS(LaneBlock<Q4_1>)
