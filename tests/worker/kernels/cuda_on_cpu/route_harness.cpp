// The routing of many tokens, its launcher included, as a function of this process.
#include "moe_route_many.cu"

extern "C" int m3_expert_map(void* map, void* address, int element_bytes, int rank, const uint64_t* sizes,
                             const uint64_t* strides, const uint32_t* box) {
    CUtensorMap made = {static_cast<const uint8_t*>(address), element_bytes, rank};
    for (int i = 0; i < rank; ++i) made.sizes[i] = sizes[i], made.box[i] = box[i];
    for (int i = 0; i + 1 < rank; ++i) made.strides[i] = strides[i];
    std::memcpy(map, &made, sizeof made);
    return 0;
}

extern "C" void start_emulator(unsigned seed) {
    emulator::seed = seed;
    emulator::add(&m3::split_kernel);
    emulator::add(&m3::score_kernel);
    emulator::add(&m3::choose_kernel);
}
