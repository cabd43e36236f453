// The prefill attention by query tiles over pages of both formats, launchers included, as functions of
// this process.
#include "msa_prefill_union_lists.cu"
#include "msa_prefill_union.cu"
#include "msa_prefill_union_e4m3.cu"

extern "C" int m3_encode_map(void* map, void* address, int element_bytes, int rank, const uint64_t* sizes,
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
    emulator::add(&build_unions<4>);
    emulator::add(&build_unions<8>);
    emulator::add(&attend_unions<PlainForm<1>>);
    emulator::add(&attend_unions<PlainForm<2>>);
    emulator::add(&attend_coded_unions<CodedForm<1>>);
    emulator::add(&attend_coded_unions<CodedForm<2>>);
}
