// The kernel that runs before the loop over time: packs the weights and the resets, and fills the exchange buffers with
// ABSENT, except for the first buffer of a forward pass, which gets the initial state.

// The initial word at a byte offset of a buffer: forward, of the initial state; backward, ABSENT, or zero in padding.
__device__ inline Word initial_word(const Parameters& p, size_t byte) {
    const int place = byte % SLICE_BYTES, line = place / CHUNK;
    const int k = (line / COLUMNS * CHUNK + place % CHUNK) / int(sizeof(Scalar));
    const int unit = byte % GROUP_BYTES / SLICE_BYTES * SLICE + k;
    if (BACKWARD) return unit < WIDTH ? ABSENT : 0;
    const int sequence = int(byte / GROUP_BYTES) * p.columns + line % COLUMNS;
    const Rows rows(p, step_of(p, 0));
    if (RESETS && sequence < rows.live && p.resets[rows.first + sequence]) return 0;
    Word word = 0;
    for (int j = 0; p.h0 && sequence < p.batch && j < WORD && unit + j < HIDDEN; ++j) {
        const unsigned initial = operand_bits(widen(p.h0[size_t(sequence) * CHANNELS + unit + j]));
        word |= Word(initial & ~TAG) << (j * 8 * sizeof(Scalar));
    }
    return word;
}

// Whether the state of a sequence is reset before the step of an iteration.
__device__ inline bool is_reset(const Parameters& p, int iteration, int sequence) {
    if (iteration >= p.steps) return false;
    const Rows rows(p, step_of(p, iteration));
    return sequence < rows.live && p.resets[rows.first + sequence];
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare(const Launch launch) {
    const Parameters& p = launch.own();
    const size_t stride = size_t(gridDim.x) * THREADS, thread = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (p.weight) {  // else an earlier launch has packed the weights
        for (size_t i = thread; i < PACKED; i += stride) pack_weights(p, int(i));
    }
    const size_t marks = RESETS ? size_t(p.steps + 31) / 32 * p.batch : 0;
    for (size_t i = thread / 32; i < marks; i += stride / 32) {  // a lane for each step
        const unsigned word = __ballot_sync(~0u, is_reset(p, int(i / p.batch) * 32 + lane_id(), int(i % p.batch)));
        if (lane_id() == 0) p.marks[i] = word;
    }

    constexpr bool PADDED = BACKWARD && WIDTH < CLUSTER * SLICE;
    const size_t row = size_t(p.groups) * GROUP_BYTES / 16;
    const size_t buffers = STATE_BUFFERS ? STATE_BUFFERS : p.steps + size_t(1);
    const size_t pairs = SCATTERS ? 0 : buffers * row;
    for (size_t i = thread; i < pairs; i += stride) {
        WordPair pair = {ABSENT, ABSENT};
        if (PADDED || (!BACKWARD && i < row)) {
            const size_t byte = i % row * 16;
            pair = {initial_word(p, byte), initial_word(p, byte + 8)};
        }
        reinterpret_cast<ulonglong2*>(p.states)[i] = {pair.word[0], pair.word[1]};
    }
}
