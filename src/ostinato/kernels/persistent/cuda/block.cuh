// The product of a block-sparse recurrent matrix, on tensor cores: only the nonzero columns of each strip of 16 rows
// are multiplied.
//
// A tile is 16 rows by 32 bytes of a strip's nonzero columns, in any order; their state is gathered from shared memory,
// by one address per column.  The tiles of each strip are split into SHARES, which are assigned to the warps
// round-robin.  In each round all warps have the same number of tiles; LAST_TILES marks the last tile of each share.
// weights.cuh keeps the TILES tiles of a warp.  The columns of a strip are ordered such that gathers are free of bank
// conflicts.

__device__ constexpr bool ends_share(int tile) {
    constexpr unsigned long long last[] = {LAST_TILES};  // one bit per tile
    return last[tile / 64] >> tile % 64 & 1;
}

constexpr int AT_ONCE_SHARED = WARPS / SHARES;  // strips that the warps multiply in one round
constexpr int SUM_ROWS = (ROWS / 16 + AT_ONCE_SHARED - 1) / AT_ONCE_SHARED * AT_ONCE_SHARED * 16;
constexpr int SUM_PITCH = SUM_ROWS + 4;  // padded: stores of the accumulators have no bank conflicts
constexpr int PARTS = SHARES * (HALVES ? 2 : 1);  // partial sums per row
constexpr int SUMS = PARTS * COLUMNS * SUM_PITCH;
constexpr int CHAINS = 4;            // independent accumulators, to hide the latency of mma
constexpr int AT_ONCE_GATHERED = 8;  // tiles whose gathers are in flight together
constexpr int TILE_COLUMNS = 32 / sizeof(Scalar);
constexpr int GATHERS = (TILES * TILE_COLUMNS + 31) / 32;  // places of columns that a lane holds, two per register

constexpr int PACKED = BLOCKS * WARPS * TILES * 32;  // calls of pack_weights()

// Packs one lane's registers of one tile.
__device__ inline void pack_weights(const Parameters& p, int i) {
    constexpr int NUMBERS = 16 / sizeof(Scalar);
    alignas(16) int index[NUMBERS];
#pragma unroll
    for (int j = 0; j < NUMBERS / 4; ++j)
        reinterpret_cast<int4*>(index)[j] = reinterpret_cast<const int4*>(p.index)[size_t(i) * (NUMBERS / 4) + j];
    unsigned registers[4] = {};
#pragma unroll
    for (int j = 0; j < NUMBERS; ++j)
        registers[j * 4 / NUMBERS] |= indexed_weight(p, index[j]) << j * 32 / (NUMBERS / 4) % 32;
    reinterpret_cast<uint4*>(p.packed)[i] = {registers[0], registers[1], registers[2], registers[3]};
}

struct Product {
    Weights<TILES> weights;
    unsigned places[(GATHERS + 1) / 2];
    SharedState state;

    // p.index:   (BLOCKS, WARPS, TILES, 32 lanes, elements in 16 bytes), 1-based indices into the matrix, 0 for padding
    // p.places:  (BLOCKS, WARPS, GATHERS rounded up to even, 32 lanes), of the columns of consecutive tiles
    __device__ Product(const Parameters& p, int block, uint4* shared)
        : weights(tiles_of_lane<TILES>(p, block, shared + STATE_PIECES)), state(shared) {
        constexpr int PAIRS = (GATHERS + 1) / 2;
        const unsigned short* mine = p.places + (block * WARPS + warp_id()) * 2 * PAIRS * 32 + lane_id();
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) places[i] = mine[2 * i * 32] | unsigned(mine[(2 * i + 1) * 32]) << 16;
    }

    __device__ int place(int gather) const {
        unsigned both = places[gather / 2];
        asm volatile("" : "+r"(both));  // keeps the pair packed: the compiler would hoist the unpacking
        return gather % 2 ? both >> 16 : both & 0xffffu;
    }

    // Gathers the B operands of AT_ONCE_GATHERED tiles, beginning with tile `first`.
    __device__ void gather(int first, unsigned (&b)[AT_ONCE_GATHERED][2]) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE_GATHERED; ++i) {
            const int tile = first + i;
            if (tile >= TILES) continue;
            if constexpr (sizeof(Scalar) == 2) {
                if (i % 2) continue;  // one ldmatrix loads two tiles, transposed
                const unsigned address = __cvta_generic_to_shared(state.places + place(tile / 2) * STATE_BYTES);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(b[i][0]), "=r"(b[i][1]), "=r"(b[i + 1][0]), "=r"(b[i + 1][1])
                             : "r"(address) : "memory");
            } else {
                const int lane = tile % 4 * 8 + lane_id() % 4;
                const unsigned sequence = lane_id() / 4 % STATE_COLUMNS;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int unit_place = __shfl_sync(~0u, place(tile / 4), lane + k * 4);
                    b[i][k] = reinterpret_cast<const unsigned*>(state.places + unit_place * STATE_BYTES)[sequence];
                }
            }
        }
    }

    __device__ void start_load(const char* from, unsigned step) { state.start_load(from, step); }

    // Multiplies this warp's shares of strips with the state that is being loaded, and stores the partial sums to
    // sums[part][sequence][row].  With HALVES, columns whose places hold the sequences in their lower half and those
    // that hold them in their upper half have separate partial sums, which are separate columns of the mma's result.
    __device__ void operator()(float* sums, Timeout& timeout) {
        state.wait_and_store(timeout);
        __syncthreads();
        unsigned b[2][AT_ONCE_GATHERED][2];  // the next tiles' are gathered while these are multiplied
        gather(0, b[0]);
        float d[CHAINS][4] = {};
        const int column = lane_id() % 4 * 2, sequence = HALVES ? column % 4 : column;
        const int part = warp_id() % SHARES + (HALVES ? column / 4 * SHARES : 0);
        float* mine = sums + (part * COLUMNS + sequence) * SUM_PITCH + warp_id() / SHARES * 16 + lane_id() / 4;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int turn = tile / AT_ONCE_GATHERED % 2, at = tile % AT_ONCE_GATHERED;
            if (at == 0) gather(tile + AT_ONCE_GATHERED, b[1 - turn]);
            const uint4 a = weights.take(tile);
            mma(d[tile % CHAINS], a, b[turn][at][0], b[turn][at][1], Scalar());
            if (!ends_share(tile)) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = d[0][i];
#pragma unroll
                for (int chain = 1; chain < CHAINS; ++chain) sum += d[chain][i];
                store_if(sequence + i % 2 < COLUMNS, mine + i % 2 * SUM_PITCH + i / 2 * 8, sum);
#pragma unroll
                for (int chain = 0; chain < CHAINS; ++chain) d[chain][i] = 0;
            }
            mine += AT_ONCE_SHARED * 16;
        }
    }

    __device__ Span span(const Parameters &, int, int) const { return {}; }

    __device__ static Adjacent<float> sum(const float* sums, Span, int row, int sequence) {
        return add<PARTS>(sums + sequence * SUM_PITCH + row, COLUMNS * SUM_PITCH);
    }
};
