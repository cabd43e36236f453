// Expert products of bf16 weights and many tokens, see `moe_ring.cuh`.
#include <cstring>

#include "moe_ring.cuh"

// maps: four tensor maps, of tokens, own tokens, weights, own weights; mode: 0 up, 1 down
extern "C" int m3_ring_bf16(const m3::RingArgs* a, const void* maps, int mode, int processors, cudaStream_t stream) {
    using namespace m3;
    RingLaunch with;
    std::memcpy(&with, maps, 4 * sizeof(CUtensorMap));
    with.a = *a;
    if (mode == kUp) return launch_form<Form<false, 288, 2, kUp>>(with, processors, stream);
    if (mode == kDown) return launch_form<Form<false, 288, 2, kDown>>(with, processors, stream);
    return cudaErrorInvalidValue;
}
