// The product of a recurrent matrix with unstructured sparsity: (place, weight) pairs, by FMA instructions.
//
// A thread works on one row of the block; a row has as many consecutive threads as its weights need, so that the load
// is about even.  For each weight, a thread gathers the state of one unit in all sequences from shared memory, in one
// load; weights are ordered such that the gathers of a warp are free of bank conflicts.
//
// A thread has ENTRIES entries of two weights each.  The first IN_REGISTERS stay in registers, the next IN_SHARED in
// shared memory.  The last STREAMED do not fit on chip and are read from L2 at every step; these loads are issued AHEAD
// entries in advance, the first ones while the block waits for the state.  Only the entries in registers are unrolled:
// instructions for all would not fit into the instruction cache.

constexpr int IN_SHARED = ENTRIES - IN_REGISTERS - STREAMED;
constexpr int UNROLLED = 16;  // entries in shared memory per iteration of their loop
constexpr int EACH = IN_SHARED / (STREAMED + !STREAMED);
constexpr int BESIDE = !STREAMED ? 0 : EACH < 2 ? EACH : 2;  // entries in shared memory added with each streamed one
constexpr int SUMS = COLUMNS * THREADS;
constexpr int PARTS = sizeof(Scalar) == 2 ? 2 : 3;  // of an entry, 4 bytes each

// Two weights and their units' places in the state.  With 16-bit weights each part is a (place, weight) pair; with
// 32-bit weights the first part holds both places, and the others one weight each.
struct Entry {
    unsigned part[PARTS];

    __device__ unsigned place(int i) const {
        if (sizeof(Scalar) == 2) return part[i] & 0xffffu;
        return i ? part[0] >> 16 : part[0] & 0xffffu;
    }
    __device__ float weight(int i) const {
        if (sizeof(Scalar) == 4) return __uint_as_float(part[PARTS - 2 + i]);
        return upper(part[i]);
    }
    __device__ static float upper(unsigned both) {
        if (BFLOAT16) return __uint_as_float(both & 0xffff0000u);
        return Half::of_bits(both >> 16);
    }
    __device__ static float lower(unsigned both) {
        if (BFLOAT16) return __uint_as_float(both << 16);
        return Half::of_bits(both & 0xffffu);
    }
};

// The first and the last thread that have partial sums of a row.
struct Span { unsigned char first, last; };

__device__ inline Span load_span(const Parameters& p, int block, int row) {
    const unsigned short both = p.spans[block * ROWS + row];
    return {static_cast<unsigned char>(both), static_cast<unsigned char>(both >> 8)};
}

constexpr int PACKED = BLOCKS * ENTRIES * THREADS;  // calls of pack_weights()

// Packs one entry of one thread.
__device__ inline void pack_weights(const Parameters& p, int i) {
    const size_t entry = i / THREADS, thread = i % THREADS, first = 2 * entry * THREADS + thread;
    const unsigned place[2] = {p.places[first], p.places[first + THREADS]};
    const unsigned weight[2] = {indexed_weight(p, p.index[first]), indexed_weight(p, p.index[first + THREADS])};
    unsigned* packed = p.packed + PARTS * entry * THREADS + thread;
    if (sizeof(Scalar) == 4) packed[0] = place[0] | place[1] << 16;
#pragma unroll
    for (int j = 0; j < 2; ++j)
        packed[(PARTS - 2 + j) * THREADS] = sizeof(Scalar) == 4 ? weight[j] : place[j] | weight[j] << 16;
}

// Calls f(i, index within the chunk) for 0 <= i < COUNT, in a loop over chunks; only the iterations of a CHUNK are
// unrolled.
template <int COUNT, int CHUNK, typename Function> __device__ inline void in_chunks(Function f) {
#pragma unroll 1
    for (int first = 0; first + CHUNK <= COUNT; first += CHUNK)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) f(first + i, i);
#pragma unroll
    for (int i = 0; i < COUNT % CHUNK; ++i) f(COUNT - COUNT % CHUNK + i, i);
}

struct Product {
    const unsigned* packed;  // (BLOCKS, ENTRIES, PARTS, THREADS), from this thread's first
    unsigned* shared;        // (IN_SHARED, PARTS, THREADS), from this thread's first
    Entry in_registers[IN_REGISTERS + 1], ahead[AHEAD];  // no array is empty
    SharedState state;

    // p.index, p.places: (BLOCKS, ENTRIES, 2, THREADS); indices are 1-based into the matrix, 0 for padding
    __device__ Product(const Parameters& p, int block, uint4* memory)
        : packed(p.packed + block * ENTRIES * PARTS * THREADS + threadIdx.x),
          shared(reinterpret_cast<unsigned*>(memory + STATE_PIECES) + threadIdx.x),
          state(memory) {
#pragma unroll
        for (int i = 0; i < IN_REGISTERS; ++i) in_registers[i] = load(i);
#pragma unroll 4
        for (int i = 0; i < IN_SHARED; ++i) {
            const Entry entry = load(IN_REGISTERS + i);
#pragma unroll
            for (int j = 0; j < PARTS; ++j) shared[(i * PARTS + j) * THREADS] = entry.part[j];
        }
#pragma unroll
        for (int i = 0; i < AHEAD && i < STREAMED; ++i) ahead[i] = load(IN_REGISTERS + IN_SHARED + i);
    }

    __device__ Entry load(int entry) const {
        Entry loaded;
#pragma unroll
        for (int j = 0; j < PARTS; ++j) loaded.part[j] = __ldcg(packed + (entry * PARTS + j) * THREADS);
        return loaded;
    }

    __device__ Entry in_shared(int i) const {
        Entry entry;
#pragma unroll
        for (int j = 0; j < PARTS; ++j) entry.part[j] = shared[(i * PARTS + j) * THREADS];
        return entry;
    }

    __device__ void add(float (&d)[STATE_COLUMNS], const Entry& entry) const {
        add(d, entry.place(0), entry.weight(0));
        add(d, entry.place(1), entry.weight(1));
    }

    __device__ void add(float (&d)[STATE_COLUMNS], unsigned place, float weight) const {
        constexpr int LOADED = STATE_BYTES / 4;
        unsigned h[LOADED];
        const char* address = state.places + place * STATE_BYTES;
        if constexpr (STATE_BYTES == 8) {
            const uint2 both = *reinterpret_cast<const uint2*>(address);
            h[0] = both.x, h[1] = both.y;
        } else {
#pragma unroll
            for (int i = 0; i < LOADED; i += 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(address + i * 4);
                h[i] = four.x, h[i + 1] = four.y, h[i + 2] = four.z, h[i + 3] = four.w;
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const float x = sizeof(Scalar) == 4 ? __uint_as_float(h[c])
                            : c % 2             ? Entry::upper(h[c / 2])
                                                : Entry::lower(h[c / 2]);
            d[c] += weight * x;
        }
    }

    // Adds a streamed entry, whose slot it refills with a later one, of this step or the next, and the BESIDE entries
    // in shared memory that go with it.
    __device__ void add_streamed(float (&d)[STATE_COLUMNS], int i, int slot) {
        const Entry entry = ahead[slot];
        const int next = i + AHEAD;
        ahead[slot] = load(IN_REGISTERS + IN_SHARED + (next < STREAMED ? next : slot));
        add(d, entry);
#pragma unroll
        for (int k = 0; k < BESIDE; ++k) add(d, in_shared(i * BESIDE + k));
    }

    __device__ void start_load(const char* from, unsigned step) { state.start_load(from, step); }

    // Multiplies this thread's weights with the state that is being loaded, and stores the partial sums of its row to
    // sums[sequence][thread].
    __device__ void operator()(float* sums, Timeout& timeout) {
        state.wait_and_store(timeout);
        __syncthreads();
        float d[STATE_COLUMNS] = {};
#pragma unroll
        for (int i = 0; i < IN_REGISTERS; ++i) {
            Entry entry = in_registers[i];
#pragma unroll
            for (int j = 0; j < PARTS; ++j) asm volatile("" : "+r"(entry.part[j]));  // else unpacked once for all steps
            add(d, entry);
        }
        in_chunks<STREAMED, AHEAD>([&](int i, int slot) { add_streamed(d, i, slot); });
        constexpr int BESIDE_ALL = STREAMED * BESIDE;
        in_chunks<IN_SHARED - BESIDE_ALL, UNROLLED>([&](int i, int) { add(d, in_shared(BESIDE_ALL + i)); });
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sums[c * THREADS + threadIdx.x] = d[c];
    }

    __device__ Span span(const Parameters& p, int block, int row) const { return load_span(p, block, row); }

    __device__ static Adjacent<float> sum(const float* sums, Span span, int, int sequence) {
        float total = 0;
        for (int thread = span.first; thread <= span.last; ++thread) total += sums[sequence * THREADS + thread];
        return {total};
    }
};
