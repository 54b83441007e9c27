#include "attention.cuh"

// Wide heads, of caches of any types. Kernels on tensor cores are faster.
KERNEL attention_token_4_576(INPUTS) { attend_token<AnyRow, 4, 576, 512>(ARGUMENTS); }
