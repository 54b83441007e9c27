#include "token.cuh"

TOKEN_EXPERTS(LaneBlock<Q5_1>)
