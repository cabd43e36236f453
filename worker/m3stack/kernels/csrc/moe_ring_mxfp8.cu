// Expert and linear products of MXFP8 weights, see `moe_ring.cuh`.
#include <cstring>

#include "moe_ring.cuh"

// maps: four tensor maps, of tokens, own tokens, weights, own weights; mode: 0 up, 1 down; most: tokens
// of a block, 32, 64 or 288
extern "C" int m3_ring_mxfp8(const m3::RingArgs* a, const void* maps, int mode, int most, int processors,
                             cudaStream_t stream) {
    using namespace m3;
    RingLaunch with;
    std::memcpy(&with, maps, 4 * sizeof(CUtensorMap));
    with.a = *a;
    if (most == 32 && mode == kUp) return launch_form<Form<true, 32, 1, kUp>>(with, processors, stream);
    if (most == 32 && mode == kDown) return launch_form<Form<true, 32, 1, kDown>>(with, processors, stream);
    if (most == 64 && mode == kUp) return launch_form<Form<true, 64, 1, kUp>>(with, processors, stream);
    if (most == 64 && mode == kDown) return launch_form<Form<true, 64, 1, kDown>>(with, processors, stream);
    if (most == 288 && mode == kUp) return launch_form<Form<true, 288, 2, kUp>>(with, processors, stream);
    if (most == 288 && mode == kDown) return launch_form<Form<true, 288, 2, kDown>>(with, processors, stream);
    return cudaErrorInvalidValue;
}
