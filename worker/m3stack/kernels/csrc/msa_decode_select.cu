// The exact choice of blocks from the rank keys of every block.
#include "msa_decode_select.cuh"

namespace m3 {

struct SelectArgs {
    const uint32_t* keys;             // [T*G, row_stride]
    const int32_t* query_start;
    const int32_t* seq_lens;
    int32_t* blocks;                  // [G,T,K]
    int64_t row_stride;
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t num_chosen;
    int32_t num_local;
};

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ SelectArgs args) {
    __shared__ SelectShared shared;
    const int row = blockIdx.x, group = blockIdx.y, thread = threadIdx.x;
    // the scoring kernel, which alone may precede this one, has waited for whoever wrote these
    const RowPlace place = find_row(args.query_start, args.seq_lens, args.num_seqs, row, shared.found);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const RowNeeds needs(place, args.num_local, args.num_chosen);
    if (needs.need == needs.ranked || needs.need == 0) {
        if (thread < needs.need) shared.winners[thread] = thread;
        __syncthreads();
    } else {
        const uint32_t* keys = args.keys + (int64_t(row) * args.groups + group) * args.row_stride;
        best_blocks(keys, needs.ranked, needs.need, shared);
    }
    if (thread < 32)
        write_choice(needs, shared.winners, args.num_chosen,
                     args.blocks + (int64_t(group) * args.num_rows + row) * args.num_chosen);
}

}  // namespace m3

extern "C" int m3_select(const m3::SelectArgs* args, cudaStream_t stream) {
    void* params[] = {const_cast<m3::SelectArgs*>(args)};
    return m3::launch(reinterpret_cast<const void*>(&m3::select_kernel), dim3(args->num_rows, args->groups),
                      m3::kSelectThreads, 0, 1, params, stream);
}
