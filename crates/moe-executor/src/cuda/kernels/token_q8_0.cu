#include "token.cuh"

TOKEN_EXPERTS(LaneBlock<Q8_0>)
