#include "token.cuh"

TOKEN_EXPERTS(LaneMXFP4)
