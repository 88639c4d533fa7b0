// The place of a thread in its chain, and the addresses of its rows.

// Narrow sequences have tiles so small that most instructions would compute addresses: the compiler recomputes these to
// save registers.  Where a block has registers to spare, the origin of the addresses is hidden from the compiler.
constexpr bool KEEPS_ADDRESSES = NARROW && !CHAINED;
template <typename T> __device__ inline T* keep_address(T* x) {
    asm("" : "+l"(x));
    __builtin_assume(__isGlobal(x));
    return x;
}

// A thread's coordinates: its sequence, channels and position along time, and the direction of the scan.
struct Place {
    const Parameters& p;
    int batch, direction, group, warp, lane, segment, channel;
    bool inside;      // whether this lane's first channel exists, and with it all channels of a vector
    bool descending;  // whether the scan runs backward in time
    const unsigned char* resets;  // the sequence's part of the mask, with MASK and KEEPS_ADDRESSES

    __device__ Place(const Parameters& p, int chain) : p(p) {
        const int groups = NARROW ? 1 : (p.channels + GROUP - 1) / GROUP;
        group = chain % groups;
#ifdef DESCENDING
        batch = SINGLE ? 0 : chain / groups, direction = 0;
#else
        batch = chain / groups % p.batch, direction = chain / groups / p.batch;
#endif
        warp = threadIdx.x / ABREAST, lane = threadIdx.x % ABREAST;
        asm("" : "+r"(warp), "+r"(lane));  // otherwise the compiler re-reads the slow special register at every use
        // A constant saves registers.  With STAYS, the compiler of CUDA 13.0 generates illegal instructions for it.
        if (KEEPS_ADDRESSES && WARPS == 1) warp = 0;
        segment = lane / LANES;
        channel = group * GROUP + lane % LANES * NEXT_LANE;
        inside = channel < (NARROW ? NARROW : p.channels);
#ifdef DESCENDING
        descending = DESCENDING;
#else
        descending = (p.reverse != (direction == 1)) != BACKWARD;
#endif
        if (MASK && KEEPS_ADDRESSES) resets = keep_address(resets_of_sequence());
    }
    // Whether this lane's channel v exists.
    __device__ bool has(int v) const { return PITCHED && v > 0 ? channel + v * NEXT < p.channels : inside; }
    __device__ int chain() const {
        return (direction * p.batch + batch) * (NARROW ? 1 : (p.channels + GROUP - 1) / GROUP) + group;
    }
    // The first step in time of the warp's steps of a tile, shifted by `ahead` steps in scan order.
    __device__ int start(int chunk, int ahead = 0) const {
        const int i = chunk * TILE + warp * STRIP + ahead;
        return descending ? p.steps - i - STRIP : i;
    }
    __device__ int time(int i) const { return descending ? p.steps - 1 - i : i; }
    __device__ bool exists(int i) const {
        if (PACKING != OFFSETS) return i < p.steps;
        if (i >= p.steps) return false;
        const int t = time(i);
        return p.bounds[t] + batch < p.bounds[t + 1];
    }
    // Whether all steps of the tile exist.
    __device__ bool whole(int chunk) const { return PACKING != OFFSETS && (chunk + 1) * TILE <= p.steps; }
    // Whether all that is copied for the tile is within its tensors, including what alignment adds after the tile.
    __device__ bool inner(int chunk) const {
        if (NARROW && !CHAINED && batch >= p.outer && batch < p.batch - p.outer) return true;
        const bool last = descending ? chunk == 0 : (chunk + 1) * TILE + 16 >= p.steps;  // in time
        const bool exact = ALIGNED && (descending || !BACKWARD);  // then no piece ends after the tile
        if ((NARROW || PITCHED) && last && !exact) return false;
        return PACKING != OFFSETS && (chunk + 1) * TILE + BACKWARD <= p.steps;
    }
    __device__ int first(int chunk) const { return chunk * TILE + warp * STRIP + segment * ROWS; }
    // A bit for each of this thread's steps that exist.
    __device__ unsigned existing(int chunk) const {
        const int left = p.steps - first(chunk);
        return left >= ROWS ? OF_ROWS : left > 0 ? ~(~0u << left) : 0;
    }
    __device__ const unsigned char* resets_of_sequence() const {
        return p.resets + batch * p.resets_batch + direction * p.resets_direction;
    }
    __device__ Scalar* sequence(const Tensor& x) const { return x.data + batch * x.batch + direction * x.direction; }
    // The index of this thread's first channel in the states; n is the index of a packed or joined sequence, else 0.
    __device__ Index state(int n) const {
        const int before = JOINED ? batch * (p.steps / p.period) : direction * p.batch + batch;
        return Index(PACKING == CU_SEQLENS ? n : before + n) * p.channels + channel;
    }
};

// The addresses of this thread's rows of a tensor, shifted by `ahead` steps.  With KEEPS_ADDRESSES they are those of
// its warp: `first` is where the strip begins, plus 16 bytes for each lane before this one.
struct Rows {
    const char* first;  // the first row in the first tile; with OFFSETS, packed row 0
    Offset stride;
    int local;  // the step of the first row within a tile
    bool inside;

    __device__ Rows() {}
    __device__ Rows(const Place& at, const Tensor& x, int ahead, int row = 0)
        : local(at.first(0) + ahead + row), inside(at.inside) {
        const Index step = KEEPS_ADDRESSES ? at.start(0, ahead) : PACKING == OFFSETS ? 0 : at.time(local);
        // Lanes without channels may read the group's first channel.
        const int channel = KEEPS_ADDRESSES ? 0 : inside ? at.channel : at.group * GROUP;
        const Index apart = KEEPS_ADDRESSES ? NARROW : x.time;
        first = reinterpret_cast<const char*>(at.sequence(x) + channel + step * apart);
        stride = Offset(PACKING != OFFSETS && at.descending ? -apart : apart) * Offset(sizeof(Scalar));
        if (KEEPS_ADDRESSES) first = keep_address(first + 16 * at.lane);
    }
    __device__ bool exists(const Place& at, int chunk, int u) const {
        return inside && at.exists(chunk * TILE + local + u);
    }
    __device__ char* tile(int chunk) const {
        return const_cast<char*>(first) + (PACKING == OFFSETS ? 0 : Index(chunk) * Offset(TILE * stride));
    }
    // Row u of the tile.
    __device__ Scalar* row(const Place& at, int chunk, char* tile, int u) const {
        const Index row = PACKING == OFFSETS ? at.p.bounds[at.time(chunk * TILE + local + u)] : u;
        return reinterpret_cast<Scalar*>(tile + row * stride);
    }
};

// The addresses of a thread's rows of all tensors, computed once for all tiles.
struct Memory {
    Rows input[INPUTS], output[OUTPUTS];

    __device__ explicit Memory(const Place& at) {
        Place piece = at;
        if (COPIED_PACKS > 1) {  // a lane copies 16 bytes of any of its warp's rows, not its own steps
            constexpr int PER_ROW = LANES / COPIED_PACKS;
            piece.segment = at.lane / PER_ROW % SEGMENTS;
            piece.channel = at.group * GROUP + at.lane % PER_ROW * (COPIED_PACKS * VEC);
            piece.inside = piece.channel < at.p.channels;
        }
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
            input[k] =
                Rows(piece, at.p.input(k), BACKWARD && k == PREVIOUS, at.lane / (LANES / COPIED_PACKS * SEGMENTS));
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) output[k] = Rows(at, at.p.output(k), 0);
    }
};
