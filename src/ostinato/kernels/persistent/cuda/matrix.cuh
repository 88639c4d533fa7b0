// The part of the recurrent matrix that a block multiplies.
//
// Forward, row g * UNITS + u of a block's part of the recurrent matrix is gate g of its unit u, and its columns are
// the units of the previous state.  Backward, the rows are the units of the block's cluster and the columns a slice of
// the gates of all units, with SCATTERS the gates of the block's own: the matrix transposed.
//
// A weight that does not exist is not branched around, but another loaded in its place: so the loads of a thread are
// in flight together.

// An element of a block's part of the matrix; zero out of bounds.
__device__ inline Scalar weight_at(const Parameters& p, int block, int row, int column) {
    int gate = row / UNITS, unit = block * UNITS + row % UNITS, other = column;
    if (BACKWARD) {
        const int k = block % CLUSTER * SLICE + column;
        gate = k / PITCH, unit = k % PITCH, other = block / CLUSTER * ROWS + row;
        if (SCATTERS) gate = column / UNITS, unit = block * UNITS + column % UNITS;
    }
    const bool exists = row < ROWS && column < SLICE && gate < GATES && unit < HIDDEN && other < HIDDEN;
    // In 32 bits: of an offset in 64 that may be zero CUDA 13.0 made code that sometimes loaded from another address.
    static_assert(size_t(GATES) * HIDDEN * HIDDEN <= ~0u);
    const Scalar weight = p.weight[exists ? unsigned(gate * HIDDEN + unit) * HIDDEN + other : 0];
    return exists ? weight : Scalar(0.0f);
}

// A weight of a pruned matrix, by its 1-based index; 0 is padding.
__device__ inline unsigned indexed_weight(const Parameters& p, int index) {
    const unsigned weight = operand_bits(widen(p.weight[max(index - 1, 0)]));
    return index ? weight : 0;
}
