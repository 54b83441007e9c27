#include "token.cuh"

TOKEN_EXPERTS(LaneFloating<Half>)
