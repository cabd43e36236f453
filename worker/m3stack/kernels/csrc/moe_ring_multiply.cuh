// What reads the ring: products of a tile, bf16 weights where they stand, MXFP8 ones by registers.
#pragma once
#include "moe_ring_tiles.cuh"
#include "moe_weights.cuh"

namespace m3 {

// A stage has been read: by a lane for each block of the cluster.
template <typename F>
__device__ __forceinline__ void release(RingShared<F>& shared, int stage) {
    const int lane = threadIdx.x % 32;
    if constexpr (F::kCluster == 1) {
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
    } else {
        if (lane < F::kCluster) barrier_arrive_at(&shared.empty[stage], lane);
    }
}

// products wider than 256 tokens are two halves
template <int N, int SIZE>
__device__ __forceinline__ void multiply_shared(float (&d)[SIZE], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (N <= 256) {
        mma_shared<0, N>(d, a, b, accumulate);
    } else {
        mma_shared<0, N / 2>(d, a, b, accumulate);
        mma_shared<N / 4, N / 2>(d, a, b + (N / 2 * kChunk * 2 >> 4), accumulate);
    }
}

template <int N, int SIZE>
__device__ __forceinline__ void multiply_registers(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    if constexpr (N <= 256) {
        mma_registers<0, N>(d, a, b, accumulate);
    } else {
        mma_registers<0, N / 2>(d, a, b, accumulate);
        mma_registers<N / 4, N / 2>(d, a, b + (N / 2 * kChunk * 2 >> 4), accumulate);
    }
}

// bf16: both operands stand in shared memory.
template <typename F, int N>
__device__ __forceinline__ void multiply_plain(float (&d)[N / 2], int chunks, RingShared<F>& shared,
                                               Ring<F::kStages>& ring) {
    const int group = threadIdx.x / kWarpgroup - 1;
    int before = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        const uint32_t at = shared_address(shared.stages[ring.stage]);
        const uint64_t a = describe_rows(at + group * 64 * kChunk * 2), b = describe_rows(at + F::kWeightBytes);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_shared<N>(d, a + 2 * k, b + 2 * k, 1);
        mma_commit();
        // the next products are queued before these end
        mma_wait<1>();
        if (chunk > 0) release<F>(shared, before);
        before = ring.stage;
        ring.advance();
    }
    mma_wait<0>();
    release<F>(shared, before);
    mma_settle<N / 2>(d);
}

// A lane's scales of its two rows, a word for 128 columns, loaded two words ahead.
struct Scales {
    const uint8_t *low, *high;
    uint32_t low_words[2], high_words[2];
    int words;

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low_words[i] = i < words ? load_scales(low + 4 * i) : 0;
            high_words[i] = i < words ? load_scales(high + 4 * i) : 0;
        }
    }

    __device__ __forceinline__ void next(int word, uint32_t& low_word, uint32_t& high_word) {
        low_word = low_words[0], high_word = high_words[0];
        low_words[0] = low_words[1], high_words[0] = high_words[1];
        if (word + 2 < words) {
            low_words[1] = load_scales(low + 4 * (word + 2));
            high_words[1] = load_scales(high + 4 * (word + 2));
        }
    }
};

// Two 64 x 16 left operands, half of a stage's.
struct Operands {
    uint32_t a[2][4];

    __device__ __forceinline__ void take(uint32_t low0, uint32_t low1, uint32_t high0, uint32_t high1,
                                         uint32_t low_factor, uint32_t high_factor) {
        const uint32_t low[2] = {low0, low1}, high[2] = {high0, high1};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            a[k][0] = times(widened_even(low[k]), low_factor);
            a[k][1] = times(widened_even(high[k]), high_factor);
            a[k][2] = times(widened_odd(low[k]), low_factor);
            a[k][3] = times(widened_odd(high[k]), high_factor);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) mma_settle_operand(a[k]);
    }
};

// MXFP8: a lane decodes 16 bytes of each of its rows.
template <typename F, int N>
__device__ __forceinline__ void multiply_coded(float (&d)[N / 2], int chunks, uint32_t low_at, uint32_t high_at,
                                               Scales scales, RingShared<F>& shared, Ring<F::kStages>& ring) {
    scales.start();
    Operands left[2];
    int before = 0;
    for (int base = 0; base < chunks; base += 2) {
        uint32_t low_word, high_word;
        scales.next(base / 2, low_word, high_word);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t selector = byte_selector(threadIdx.x % 4 / 2 + 2 * i);
            const uint32_t low_factor = factor_of(__byte_perm(low_word, 0, selector));
            const uint32_t high_factor = factor_of(__byte_perm(high_word, 0, selector));
            const bool is_new = i == 0 || !F::kIsWide;
            if (is_new) barrier_wait(&shared.full[ring.stage], ring.parity);
            const uint32_t at = shared_address(shared.stages[ring.stage]);
            // the other half of a swizzled row is 64 bytes off, in either direction
            const uint32_t half_row = F::kIsWide ? i * 64 : 0;
            const uint4 low = load_shared(at + (low_at ^ half_row)), high = load_shared(at + (high_at ^ half_row));
            const uint64_t b = describe_rows(at + F::kWeightBytes + (F::kIsWide ? i * F::kTokenBytes : 0));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // products of these registers have ended; those of the other two run on
                left[half].take(half ? low.z : low.x, half ? low.w : low.y, half ? high.z : high.x,
                                half ? high.w : high.y, low_factor, high_factor);
                mma_fence();
#pragma unroll
                for (int k = 0; k < 2; ++k) multiply_registers<N>(d, left[half].a[k], b + 4 * half + 2 * k, 1);
                mma_commit();
                mma_wait<1>();
                if (half == 0 && is_new && base + i > 0) release<F>(shared, before);
            }
            if (i == 1 || !F::kIsWide) {
                before = ring.stage;
                ring.advance();
            }
        }
    }
    mma_wait<0>();
    release<F>(shared, before);
    mma_settle<N / 2>(d);
}

}  // namespace m3
