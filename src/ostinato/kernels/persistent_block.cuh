// A recurrent matrix pruned in blocks, on tensor cores: of each strip of 16 rows only the columns that are not zero.
//
// A tile is 16 rows by 32 bytes of such columns, wherever they are; their state is gathered from shared memory, one
// address for each column.  All tiles of a block, strip by strip, are dealt to its warps in equal numbers: where a
// strip ends, or the warp's share, the sums are stored.  HELD of a warp's TILES tiles stay in registers, spread
// evenly, the others in shared memory.  The columns of a strip are ordered such that a gather meets all banks.

constexpr int SUM_PITCH = ROWS + 4;  // stores of the accumulators fall in different banks
constexpr int SUMS = WARPS * COLUMNS * SUM_PITCH;
constexpr int CHAINS = TILES >= 8 ? 4 : 2;  // hide latency
constexpr int TILE_COLUMNS = 32 / sizeof(Scalar);
constexpr int GATHERS = (TILES * TILE_COLUMNS + 31) / 32;  // places that a lane holds, two in a register
constexpr int ENDS = (TILES + 31) / 32;

__device__ constexpr int held_before(int tile) { return tile * HELD / TILES; }
__device__ constexpr bool is_held(int tile) { return held_before(tile + 1) > held_before(tile); }

struct Product {
    uint4 held[HELD + 1];  // no array is empty
    unsigned places[(GATHERS + 1) / 2];
    unsigned ends[ENDS];   // bit t: after tile t the sums are stored
    int strip;             // of the first tile
    uint4 *kept;           // this lane's part of the tiles in shared memory
    SharedState state;

    // weights: (BLOCKS, WARPS, TILES, 32 lanes) of 16 bytes
    // places:  (BLOCKS, WARPS, rounded up to even: GATHERS, 32 lanes), of the columns of consecutive tiles
    // ends:    (BLOCKS, WARPS, 1 + ENDS): the first strip, then bits
    __device__ Product(const Parameters &p, int block, uint4 *shared)
        : kept(shared + STATE_PIECES + threadIdx.x), state(shared) {
        const int warp = block * WARPS + warp_id();
        const uint4 *weights = reinterpret_cast<const uint4 *>(p.weights) + warp * TILES * 32 + lane_id();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4 a = load_weights(weights + tile * 32);
            if (is_held(tile)) held[held_before(tile)] = a;
            else kept[(tile - held_before(tile)) * THREADS] = a;
        }
        constexpr int PAIRS = (GATHERS + 1) / 2;
        const unsigned short *mine = p.places + warp * 2 * PAIRS * 32 + lane_id();
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) places[i] = mine[2 * i * 32] | unsigned(mine[(2 * i + 1) * 32]) << 16;
        strip = p.ends[warp * (1 + ENDS)];
#pragma unroll
        for (int i = 0; i < ENDS; ++i) ends[i] = p.ends[warp * (1 + ENDS) + 1 + i];
    }

    __device__ int place(int gather) const {
        unsigned both = places[gather / 2];
        asm volatile("" : "+r"(both));  // taken apart at every step anew, not kept in parts
        return gather % 2 ? both >> 16 : both & 0xffffu;
    }

    __device__ static void store(float *sums, int strip, const float (&d)[CHAINS][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = lane_id() % 4 * 2 + i % 2;
            if (column >= COLUMNS) continue;
            float sum = d[0][i];
#pragma unroll
            for (int chain = 1; chain < CHAINS; ++chain) sum += d[chain][i];
            sums[(warp_id() * COLUMNS + column) * SUM_PITCH + strip * 16 + lane_id() / 4 + i / 2 * 8] = sum;
        }
    }

    // sums[warp][sequence][row] = this warp's share, if it has one, of the matrix times the state `from`.
    __device__ void operator()(const char *from, int columns, float *sums, Patience &patience) {
        state.bring(from, columns, patience);
        __syncthreads();
        float d[CHAINS][4] = {};
        int current = strip;
        unsigned b[4];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if constexpr (sizeof(Scalar) == 2) {
                if (tile % 2 == 0) {  // the state of two tiles, which is transposed on its way
                    const unsigned address = __cvta_generic_to_shared(state.places + place(tile / 2) * STATE_BYTES);
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
                }
            } else {
                const int lane = tile % 4 * 8 + lane_id() % 4;
                const unsigned sequence = lane_id() / 4 % STATE_COLUMNS;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int there = __shfl_sync(~0u, place(tile / 4), lane + i * 4);
                    b[tile % 2 * 2 + i] = reinterpret_cast<const unsigned *>(state.places + there * STATE_BYTES)[sequence];
                }
            }
            const uint4 a = is_held(tile) ? held[held_before(tile)] : kept[(tile - held_before(tile)) * THREADS];
            mma(d[tile % CHAINS], a, b[tile % 2 * 2], b[tile % 2 * 2 + 1], Scalar());
            if (ends[tile / 32] >> tile % 32 & 1) {
                store(sums, current++, d);
#pragma unroll
                for (int chain = 0; chain < CHAINS; ++chain) d[chain][0] = d[chain][1] = d[chain][2] = d[chain][3] = 0;
            }
        }
    }

    __device__ Span span(const Parameters &p, int block, int row) const { return load_span(p, block, row); }

    __device__ static float sum(const float *sums, Span span, int row, int sequence) {
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp)
            if (warp >= span.first && warp <= span.last) total += sums[(warp * COLUMNS + sequence) * SUM_PITCH + row];
        return total;
    }
};
