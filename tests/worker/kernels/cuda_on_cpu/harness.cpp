// The decode kernels, their launchers included, as functions of this process.
#include "msa_decode_score.cu"
#include "msa_decode_select.cu"
#include "msa_decode_settle.cu"
#include "msa_decode_attend_block.cu"

extern "C" void start_emulator(unsigned seed) {
    emulator::seed = seed;
    emulator::add(&m3::score_kernel<false, 1>);
    emulator::add(&m3::score_kernel<false, 2>);
    emulator::add(&m3::score_kernel<false, 4>);
    emulator::add(&m3::score_kernel<true, 1>);
    emulator::add(&m3::score_kernel<true, 2>);
    emulator::add(&m3::score_kernel<true, 4>);
    emulator::add(&m3::score_kernel<true, 8>);
    emulator::add(&m3::select_kernel);
    emulator::add(&m3::settle_kernel);
    emulator::add(&m3::attend_block_kernel);
}
