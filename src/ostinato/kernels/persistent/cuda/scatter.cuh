// The backward product of a dense recurrent matrix, for a group whose blocks are one cluster.
//
// Nothing is exchanged before the product.  Each block multiplies the gradients of its own units' gates, from its
// shared memory, with the rows of all units of the transposed matrix, on tensor cores, and sends each sum to the block
// that owns the row; see cluster.cuh.  A warp has whole rows, so its accumulators hold the block's sums.  All weights
// are in registers.

constexpr int ROW_TILES = (ROWS + 15) / 16;
constexpr int WARP_ROWS = (ROW_TILES + WARPS - 1) / WARPS;  // row tiles of a warp, every eighth
constexpr int COLUMN_TILES = (ROW_BYTES + 31) / 32;
constexpr int PAIRS = COLUMN_TILES / 2, ODD = COLUMN_TILES % 2;  // pairs of tiles, 16 bytes of a lane; an odd tile, 8
constexpr int TILES = WARP_ROWS * COLUMN_TILES;
constexpr int CHAINS = WARP_ROWS >= 4 ? 1 : WARP_ROWS >= 2 ? 2 : 4;  // independent accumulators, to hide mma's latency
constexpr int PACKED = BLOCKS * WARPS * TILES * 32;  // calls of pack_weights()

// Packs one lane's registers of one tile.  The order of columns within a tile is free; as in dense.cuh, it is that of a
// lane's 16 bytes of two tiles.
__device__ inline void pack_weights(const Parameters& p, int i) {
    const int lane = i % 32, tile = i / 32 % TILES, warp = i / (32 * TILES) % WARPS, block = i / (32 * TILES * WARPS);
    const int row = (tile / COLUMN_TILES * WARPS + warp) * 16 + lane / 4, column = tile % COLUMN_TILES;
    unsigned registers[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {  // mma's order: upper and lower rows of the first half of the columns, of the second
        const int tile_row = row + r % 2 * 8;
        const int in_pair = column / 2 < PAIRS ? lane % 4 * 16 + column % 2 * 8 : lane % 4 * 8;
        const int first = (column / 2 * 64 + in_pair + r / 2 * 4) / int(sizeof(Scalar));
        registers[r] = operand_bits(widen(weight_at(p, block, tile_row, first)));
        if (sizeof(Scalar) == 2) registers[r] |= operand_bits(widen(weight_at(p, block, tile_row, first + 1))) << 16;
    }
    reinterpret_cast<uint4*>(p.packed)[i] = {registers[0], registers[1], registers[2], registers[3]};
}

struct Product {
    uint4 in_registers[TILES];
    float total[WARP_ROWS][4];  // the sums of this lane's rows and columns, in the order of mma's results

    // shared: two buffers of gradients, whose padding stays zero
    __device__ Product(const Parameters& p, int block, uint4* shared) {
        const uint4* weights = reinterpret_cast<const uint4*>(p.packed) + (block * WARPS + warp_id()) * TILES * 32;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) in_registers[tile] = __ldcs(weights + tile * 32 + lane_id());
        for (int i = threadIdx.x; i < SHARED_STATES / 16; i += THREADS) shared[i] = {};
        __syncthreads();
    }

    __device__ void operator()(const char* gradients) {
        const char* own = gradients + slice_offset(lane_id() % 4 * 16, lane_id() / 4 % COLUMNS);
        float d[CHAINS][WARP_ROWS][4] = {};
#pragma unroll
        for (int i = 0; i < PAIRS + ODD; ++i) {
            const char* address = own + i * COLUMNS * CHUNK;
            ulonglong2 pair;
            if (i < PAIRS) pair = *reinterpret_cast<const ulonglong2*>(address);
            else pair.x = *reinterpret_cast<const Word*>(address - lane_id() % 4 * 8);
#pragma unroll
            for (int c = 2 * i; c < COLUMN_TILES && c < 2 * i + 2; ++c) {
#pragma unroll
                for (int r = 0; r < WARP_ROWS; ++r)
                    multiply(d[c % CHAINS][r], in_registers[r * COLUMN_TILES + c], c % 2 ? pair.y : pair.x);
            }
        }
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = d[0][r][i];
#pragma unroll
                for (int chain = 1; chain < CHAINS; ++chain) sum += d[chain][r][i];
                total[r][i] = i % 2 < COLUMNS ? over_lanes(sum) : 0;
            }
        }
    }

    __device__ Span span(const Parameters &, int, int) const { return {}; }
    // No sum is read from shared memory: a block sends itself its own, too.
    __device__ static Adjacent<float> sum(const float *, Span, int, int) { return {}; }
};

// Sends the sums to the blocks that own their rows, straight from registers.
struct Sender {
    size_t addresses[WARP_ROWS][2];  // where the sums of this lane's rows go, for its first column

    __device__ explicit Sender(const Mailbox& mailbox) {
#pragma unroll
        for (int i = 0; i < 2 * WARP_ROWS; ++i) {
            const int sent_row = min(row(i / 2, i % 2), ROWS - 1);
            addresses[i / 2][i % 2] = mailbox.address(sent_row / UNITS, column(0) * UNITS + sent_row % UNITS);
        }
    }

    __device__ static int row(int tile, int half) { return (tile * WARPS + warp_id()) * 16 + lane_id() / 4 + half * 8; }
    __device__ static int column(int i) { return lane_id() % 4 * 2 + i; }

    __device__ void send(const Product& product, int sequences, int step) const {
#pragma unroll
        for (int i = 0; i < 4 * WARP_ROWS; ++i) {
            const int tile = i / 4, half = i / 2 % 2, second = i % 2;
            if (second >= COLUMNS) continue;
            const bool wanted = row(tile, half) < ROWS && column(second) < sequences;
            const size_t address = addresses[tile][half] + second * unsigned(UNITS * sizeof(Word));
            Mailbox::send(wanted, address, {{product.total[tile][i % 4]}}, step);
        }
    }
};
