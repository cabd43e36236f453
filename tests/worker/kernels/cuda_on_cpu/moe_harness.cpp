// The expert kernels of the ring, of sorting and of routing, their launchers included, as functions of
// this process.
#include "moe_order.cu"
#include "moe_ring_bf16.cu"
#include "moe_ring_mxfp8.cu"

extern "C" int m3_expert_map(void* map, void* address, int element_bytes, int rank, const uint64_t* sizes,
                             const uint64_t* strides, const uint32_t* box) {
    CUtensorMap made = {static_cast<const uint8_t*>(address), element_bytes, rank};
    for (int i = 0; i < rank; ++i) made.sizes[i] = sizes[i], made.box[i] = box[i];
    for (int i = 0; i + 1 < rank; ++i) made.strides[i] = strides[i];
    std::memcpy(map, &made, sizeof made);
    return 0;
}

extern "C" void start_emulator(unsigned seed) {
    using namespace m3;
    emulator::seed = seed;
    emulator::add(&sort_kernel);
    emulator::add(&gather_kernel);
    emulator::add(&ring_kernel<Form<false, 288, 2, kUp>>);
    emulator::add(&ring_kernel<Form<false, 288, 2, kDown>>);
    emulator::add(&ring_kernel<Form<true, 32, 1, kUp>>);
    emulator::add(&ring_kernel<Form<true, 32, 1, kDown>>);
    emulator::add(&ring_kernel<Form<true, 64, 1, kUp>>);
    emulator::add(&ring_kernel<Form<true, 64, 1, kDown>>);
    emulator::add(&ring_kernel<Form<true, 288, 2, kUp>>);
    emulator::add(&ring_kernel<Form<true, 288, 2, kDown>>);
}
