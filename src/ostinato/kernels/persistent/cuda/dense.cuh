// The product of a dense recurrent matrix, on tensor cores.
//
// Each warp multiplies its part of the columns with all rows of the block, or with half of them.  The order of columns
// within a tile is free, and chosen such that a word of the state in memory is a lane's fragment of the B operand; see
// operand.cuh.
//
// weights.cuh keeps the TILES tiles of a warp.  If the last row tile has at most 8 rows (HALF), one tile holds these
// rows for two column tiles, in its upper and its lower half: it is multiplied with the state of both, and only one
// half of each product is used.

constexpr int ROW_TILES = (ROWS + 15) / 16 / SHARING;  // of a warp
constexpr bool HALF = (ROWS - 1) % 16 < 8;
constexpr int FULL = ROW_TILES - HALF;  // whole row tiles of a warp
constexpr int TILES = FULL * COLUMN_TILES + HALF * ((COLUMN_TILES + 1) / 2);
// In ping-pong, tiles in shared memory are read two tiles ahead if there are many.  With more sequences there are no
// registers for that, and a tile that two column tiles share would be taken twice.
constexpr bool READS_AHEAD = BLOCK_GROUPS > 1 && SEQUENCE_TILES == 1 && !HALF && TILES - IN_REGISTERS >= 8;
constexpr int MOST_EARLY = STREAMED ? 0 : BLOCK_GROUPS == 1 ? 4 : READS_AHEAD ? 2 : 0;
constexpr int EARLY = TILES - IN_REGISTERS < MOST_EARLY ? TILES - IN_REGISTERS : MOST_EARLY;  // read while waiting
constexpr int PRODUCTS = ROW_TILES * SEQUENCE_TILES;
constexpr int CHAINS = PRODUCTS >= 4 ? 1 : PRODUCTS >= 2 ? 2 : 4;  // independent accumulators, to hide mma's latency
constexpr int SUM_PITCH = 16 * ROW_TILES * SHARING + 4;  // padded: stores of the accumulators have no bank conflicts
constexpr int SUMS = PARTS * COLUMNS * SUM_PITCH;
constexpr bool BY_FOUR = SHARES_WORK;  // four sums of a row are loaded at once, as all threads wait for these few loads
constexpr int ROW_PITCH = BY_FOUR ? WARPS : 1;

// The index of the tile in a column and row of tiles.  Tiles are ordered by column; one that two columns share follows
// the others of the first column.
__device__ constexpr int tile_at(int column, int row) {
    return row < FULL ? column * FULL + HALF * ((column + 1) / 2) + row : column / 2 * (2 * FULL + 1) + FULL;
}

// The first row of a warp, among the block's rows.
__device__ inline int first_row(int warp) { return warp % SHARING * ROW_TILES * 16; }

constexpr int PACKED = BLOCKS * WARPS * TILES * 32;  // calls of pack_weights()

// Packs one lane's registers of one tile.
__device__ inline void pack_weights(const Parameters& p, int i) {
    const int lane = i % 32, tile = i / 32 % TILES, warp = i / (32 * TILES) % WARPS, block = i / (32 * TILES * WARPS);
    int row, column = tile / ROW_TILES, beside = 0;  // 1 if the tile's lower half is from the next column tile
    if (!HALF) {
        row = tile % ROW_TILES * 16;
    } else {
        const int pair = tile / (2 * FULL + 1), rest = tile % (2 * FULL + 1);
        row = (rest <= FULL ? rest : rest - FULL - 1) * 16;
        column = 2 * pair + (rest > FULL);
        beside = rest == FULL;
    }
    row += first_row(warp) + lane / 4;
    unsigned registers[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {  // mma's order: upper and lower rows of the first half of the columns, of the second
        const int c = column + r % 2 * beside, tile_row = row + (beside ? 0 : r % 2 * 8);
        const int in_pair = c / 2 < PAIRS ? lane % 4 * 16 + c % 2 * 8 : lane % 4 * 8;
        const int first = (first_byte(warp / SHARING, c / 2) + in_pair + r / 2 * 4) / int(sizeof(Scalar));
        const bool exists = c < COLUMN_TILES;
        registers[r] = exists ? operand_bits(widen(weight_at(p, block, tile_row, first))) : 0;
        if (sizeof(Scalar) == 2 && exists)
            registers[r] |= operand_bits(widen(weight_at(p, block, tile_row, first + 1))) << 16;
    }
    reinterpret_cast<uint4*>(p.packed)[i] = {registers[0], registers[1], registers[2], registers[3]};
}

struct Accumulators {
    // Of whole tiles; and of tiles that two column tiles share, for each of these.
    float d[CHAINS][FULL + 1][SEQUENCE_TILES][4], halves[2][SEQUENCE_TILES][4];
};

// The place of four sums of a row, in units of 16 bytes; those of eight consecutive rows are in different banks.
__device__ inline int place_of_four(int row, int four, int sequence) {
    const int place = row * (WARPS / 4) + four;
    return sequence * 16 * ROW_TILES * (WARPS / 4) + (place ^ (place / 8 % (32 / WARPS)));
}

struct Product {
    Weights<TILES, EARLY> weights;
    uint4 early[EARLY + 1];
    Operand operand;
    // The thread's index, hidden behind a shuffle.  With resets, the compiler would otherwise read it from a special
    // register again at every step, to compute where sums are stored, while all threads wait for them.
    static constexpr bool KEEPS_NUMBER = RESETS && SHARES_WORK;
    unsigned number = KEEPS_NUMBER ? __shfl_sync(~0u, threadIdx.x, lane_id()) : 0;

    Product() = default;  // of a thread that only adds sums
    __device__ Product(const Parameters& p, int block, uint4* shared)
        : weights(tiles_of_lane<TILES>(p, block, shared + Operand::SHARED / 16)), operand(p, shared) {}

    // Returns a tile.  If some tiles are read early, none is streamed.
    __device__ uint4 take(int tile) {
        if (READS_AHEAD && !weights.is_in_registers(tile)) {
            const int k = tile - weights.registers_before(tile);
            const uint4 a = early[k % 2];
            if (k + 2 < TILES - IN_REGISTERS) early[k % 2] = weights.memory.in_shared(k + 2);
            return a;
        }
        return tile < EARLY ? early[tile] : weights.take(tile);
    }

    __device__ unsigned lane() const { return KEEPS_NUMBER ? number % 32 : lane_id(); }
    __device__ unsigned warp() const { return KEEPS_NUMBER ? number / 32 : warp_id(); }

    // Starts to load the `state`, whether it has arrived or not.
    __device__ void start_load(const char* state, unsigned step) { operand.start_load(state, step); }

    // Multiplies this warp's share of the recurrent matrix with the state that is being loaded, and stores the partial
    // sums to sums[part][sequence][row] after free(), which waits until these may be overwritten.  With BY_FOUR, the
    // partial sums of sums[sequence][row] are stored in fours; a warp's place in a four differs between the sequences
    // that are stored together, which would otherwise be in the same bank.
    template <typename Free> __device__ void operator()(float* sums, Timeout& timeout, Free free) {
        timeout.restart();
        Accumulators accumulators;
        auto &[d, halves] = accumulators;
        do {
#pragma unroll
            for (int tile = 0; tile < EARLY; ++tile) early[tile] = weights.memory.in_shared(tile);
            operand.wait(timeout);
            accumulators = {};
            uint4 half;  // the last tile shared by two column tiles
            WordPair pair[SEQUENCE_TILES];
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
                for (int s = 0; s < SEQUENCE_TILES; ++s)
                    if (c % 2 == 0) pair[s] = operand.pair(s, c / 2);
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    const int tile = tile_at(c, r);
                    const bool taken = r == FULL && c % 2 && weights.is_streamed(tile);
                    const uint4 a = taken ? half : take(tile);
                    if (r == FULL) half = a;
#pragma unroll
                    for (int s = 0; s < SEQUENCE_TILES; ++s)
                        multiply(r < FULL ? d[c % CHAINS][r][s] : halves[c % 2][s], a, pair[s].word[c % 2]);
                }
            }
        } while (operand.lacked_any(timeout));
        free();
        if (SHARING > 1) sums += first_row(warp_id());
#pragma unroll
        for (int s = 0; s < SEQUENCE_TILES; ++s) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = s * 8 + lane() % 4 * 2 + i % 2;
                const bool wanted = COLUMNS % 8 == 0 || column < COLUMNS;
                float* mine = sums + (warp() / SHARING * COLUMNS + column) * SUM_PITCH + lane() / 4 + i / 2 * 8;
                if constexpr (BY_FOUR) {
                    const int place = place_of_four(lane() / 4 + i / 2 * 8, warp() / 4, column);
                    mine = sums + place * 4 + (warp() ^ lane()) % 4;
                }
#pragma unroll
                for (int r = 0; r < FULL; ++r) {
                    float sum = d[0][r][s][i];
#pragma unroll
                    for (int chain = 1; chain < CHAINS; ++chain) sum += d[chain][r][s][i];
                    store_if(wanted, mine + r * 16 * ROW_PITCH, over_lanes(sum));
                }
                const float half = halves[0][s][i % 2] + halves[1][s][i % 2 + 2];
                if (HALF && i < 2) store_if(wanted, mine + FULL * 16 * ROW_PITCH, over_lanes(half));
            }
        }
    }

    __device__ void operator()(float* sums, Timeout& timeout) {
        (*this)(sums, timeout, [] { if (SUM_BUFFERS == 1) __syncthreads(); });  // the last step's sums have been read
    }

    __device__ Span span(const Parameters &, int, int) const { return {}; }

    __device__ static Adjacent<float> sum(const float* sums, Span, int row, int sequence) {
        if constexpr (!BY_FOUR) return add<PARTS>(sums + sequence * SUM_PITCH + row, COLUMNS * SUM_PITCH);
        float of_four[WARPS / 4];
#pragma unroll
        for (int i = 0; i < WARPS / 4; ++i) {
            const float4 x = reinterpret_cast<const float4*>(sums)[place_of_four(row, i, sequence)];
            of_four[i] = (x.x + x.y) + (x.z + x.w);
        }
        return {{of_four[0] + of_four[1]}};
    }
};
