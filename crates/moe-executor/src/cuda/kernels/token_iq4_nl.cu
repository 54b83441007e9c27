#include "token.cuh"

TOKEN_EXPERTS(LaneBlock<IQ4_NL>)
