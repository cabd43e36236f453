// Block choice over index keys that ranks hold in parts: a rank's candidates from rank keys, and the
// merge of all ranks' candidates.
//
// A candidate is (rank key, complement of the block id) as one signed integer: the 64-bit total order
// of the rank keys with its top bit flipped. The smallest one means "no candidate".
#include "msa_decode_select.cuh"

namespace m3 {

constexpr int kMaxMerged = 256;  // candidates of a line over all ranks
constexpr int kMergeWarps = 4;

__device__ __forceinline__ int64_t as_signed(uint64_t order) { return int64_t(order ^ (uint64_t(1) << 63)); }
__device__ __forceinline__ uint64_t as_unsigned(int64_t candidate) {
    return uint64_t(candidate) ^ (uint64_t(1) << 63);
}

struct CandidateArgs {
    const uint32_t* keys;        // [T*G, row_stride], of the shortened sequences
    const int32_t* query_start;
    const int32_t* seq_lens;     // of the shortened sequences
    const int32_t* ids;          // [S, ids_stride], id in the whole sequence; negative where another rank's
    int64_t* candidates;         // [G,T,K], descending
    int64_t row_stride;
    int64_t ids_stride;
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t num_chosen;
    int32_t num_local;
};

__global__ void __launch_bounds__(kSelectThreads) candidates_kernel(const __grid_constant__ CandidateArgs args) {
    __shared__ SelectShared shared;
    const int row = blockIdx.x, group = blockIdx.y, thread = threadIdx.x;
    // the scoring kernel, which alone may precede this one, has waited for whoever wrote these
    const RowPlace place = find_row(args.query_start, args.seq_lens, args.num_seqs, row, shared.found);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const RowNeeds needs(place, args.num_local, args.num_chosen);
    const uint32_t* keys = args.keys + (int64_t(row) * args.groups + group) * args.row_stride;
    if (needs.need == needs.ranked || needs.need == 0) {
        if (thread < needs.need) shared.winners[thread] = thread;
        __syncthreads();
    } else {
        best_blocks(keys, needs.ranked, needs.need, shared);
    }
    if (thread >= 32) return;
    uint64_t value = 0;
    if (thread < needs.need) {
        const int entry = shared.winners[thread];
        const int id = args.ids[place.sequence * args.ids_stride + entry];
        if (id >= 0) value = total_order(keys[entry], id);
    }
    int rank = 0;
#pragma unroll 8
    for (int hop = 0; hop < 32; ++hop) {
        const uint64_t other = __shfl_sync(~0u, value, hop);
        rank += other > value || (other == value && hop < thread);
    }
    if (rank < args.num_chosen)
        args.candidates[(int64_t(group) * args.num_rows + row) * args.num_chosen + rank] = as_signed(value);
}

struct MergeArgs {
    const int64_t* candidates;   // [R,G,T,K]
    const int32_t* query_start;
    const int32_t* seq_lens;     // of the whole sequences
    int32_t* blocks;             // [G,T,K]
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t num_ranks;
    int32_t num_chosen;
    int32_t num_local;
};

// a row's place found by one warp
__device__ __forceinline__ RowPlace find_row_in_warp(const MergeArgs& args, int row) {
    const int lane = threadIdx.x % 32;
    RowPlace mine = {-1, -1};
    for (int s = lane; s < args.num_seqs; s += 32) {
        const int first = args.query_start[s], last = args.query_start[s + 1], len = args.seq_lens[s];
        if (first <= row && row < last && len > 0) mine = {s, len - (last - row)};
    }
    const uint32_t mask = __ballot_sync(~0u, mine.sequence >= 0);
    if (mask == 0) return {-1, -1};
    const int source = __ffs(mask) - 1;
    return {__shfl_sync(~0u, mine.sequence, source), __shfl_sync(~0u, mine.position, source)};
}

// a warp a line: every candidate's rank by counting the better ones
__global__ void __launch_bounds__(kMergeWarps * 32) merge_kernel(const __grid_constant__ MergeArgs args) {
    __shared__ __align__(16) uint64_t all[kMergeWarps][kMaxMerged + 2];
    __shared__ int winners[kMergeWarps][kMaxChosen];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t line = int64_t(blockIdx.x) * kMergeWarps + warp, num_lines = int64_t(args.groups) * args.num_rows;
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (line >= num_lines) return;
    const int count = args.num_ranks * args.num_chosen;
    for (int i = lane; i < count; i += 32) {
        const int rank = i / args.num_chosen, place = i % args.num_chosen;
        all[warp][i] = as_unsigned(args.candidates[(rank * num_lines + line) * args.num_chosen + place]);
    }
    if (lane == 0) all[warp][count] = 0;
    RowNeeds needs(find_row_in_warp(args, int(line % args.num_rows)), args.num_local, args.num_chosen);
    __syncwarp();
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(all[warp]);
    int num_real = 0;
    for (int base = 0; base < count; base += 32) {
        const int mine = base + lane;
        const uint64_t value = mine < count ? all[warp][mine] : 0;
        int better = 0;
#pragma unroll 4
        for (int other = 0; other < (count + 1) / 2; ++other) {
            const ulonglong2 pair = pairs[other];
            better += (pair.x > value) + (pair.y > value);
        }
        // ids are distinct, and so are candidates
        if (value != 0 && better < needs.need) winners[warp][better] = int(~uint32_t(value));
        num_real += __popc(__ballot_sync(~0u, value != 0));
    }
    needs.need = min(needs.need, num_real);
    __syncwarp();
    write_choice(needs, winners[warp], args.num_chosen, args.blocks + line * args.num_chosen);
}

}  // namespace m3

extern "C" int m3_candidates(const m3::CandidateArgs* args, cudaStream_t stream) {
    void* params[] = {const_cast<m3::CandidateArgs*>(args)};
    return m3::launch(reinterpret_cast<const void*>(&m3::candidates_kernel), dim3(args->num_rows, args->groups),
                      m3::kSelectThreads, 0, 1, params, stream);
}

extern "C" int m3_merge_candidates(const m3::MergeArgs* args, cudaStream_t stream) {
    if (args->num_ranks * args->num_chosen > m3::kMaxMerged || args->num_chosen > m3::kMaxChosen)
        return cudaErrorInvalidValue;
    const int lines = args->groups * args->num_rows;
    void* params[] = {const_cast<m3::MergeArgs*>(args)};
    return m3::launch(reinterpret_cast<const void*>(&m3::merge_kernel),
                      dim3((lines + m3::kMergeWarps - 1) / m3::kMergeWarps), m3::kMergeWarps * 32, 0, 1, params,
                      stream);
}
