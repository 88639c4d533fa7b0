// The carry into a tile, computed from the aggregates and inclusive prefixes that other blocks have published.

// The published messages of the tiles of one chain.
struct Published {
    Message* messages;
    unsigned epoch;

    __device__ Published(const Parameters& p, int chain, int chunks)
        : messages(p.published + Index(chain) * chunks * MESSAGES * GROUP), epoch(p.epoch) {}

    __device__ Message* at(int chunk, int k, int v) const {
        return messages + ((Index(chunk) * MESSAGES + k) * VEC + v) * LANES + threadIdx.x % LANES;
    }
    __device__ void write(int chunk, const Composition& tile) const {
        const unsigned mark = epoch + (tile.reset ? RESET : COMPOSED);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
#pragma unroll
            for (int k = 0; k < MESSAGES; ++k) store_message(at(chunk, k, v), tile.message(v, k, mark));
        }
    }
    __device__ void write(int chunk, const Channels& after) const {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const unsigned* const parts = reinterpret_cast<const unsigned*>(&after.value[v]);
            store_message(at(chunk, 0, v), {parts[0], MESSAGES == 1 ? 0 : parts[1], 0, epoch + KNOWN});
        }
    }
    // Publish a tile's inclusive prefix, the state after it, from the carry into it.
    __device__ void write_after(int chunk, const Composition& tile, Channels state) const {
        tile.carry(state);
        if (threadIdx.x < LANES) write(chunk, state);
    }
    // Read a tile, and return its flag: ABSENT until all its messages have the same one; if KNOWN, b is the prefix.
    __device__ unsigned read(int chunk, Known& tile) const {
        unsigned every = COMPOSED | KNOWN, any = 0;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            Compute numbers[3];
            unsigned* const parts = reinterpret_cast<unsigned*>(numbers);
#pragma unroll
            for (int k = 0; k < MESSAGES; ++k) {
                const Message message = load_message(at(chunk, k, v));
#pragma unroll
                for (int i = 0; i < 4 - MESSAGES; ++i) parts[2 * k + i] = message.parts[i];
                if (k > 0 && every == KNOWN) continue;  // a prefix has no a: the second message of a double is unused
                const unsigned mark = message.since(epoch);
                every &= mark, any |= mark;
            }
            tile.b.value[v] = numbers[0], tile.a.value[v] = numbers[1], tile.low.value[v] = numbers[2];
        }
        return every == any ? every : ABSENT;
    }
};

// The messages of a few consecutive tiles, loaded long before they are needed.
struct Prefetched {
    static constexpr int MOST = (POLLERS < 256 && KEPT_ROWS < ROWS ? 4 : 2) / MESSAGES / VEC;
    static constexpr int SIZE = MOST > 0 ? MOST : 1;
    Message message[SIZE][VEC][MESSAGES];

    __device__ void load(const Published& published, int first, int end) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i)
            if (first + i < end)
#pragma unroll
                for (int k = 0; k < MESSAGES; ++k)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) message[i][v][k] = load_message(published.at(first + i, k, v));
    }
    // Wait for the tiles and append them to `whole`, or replace it by them if `alone`.
    __device__ void compose(const Published& published, int first, int end, Composition& whole, bool alone) {
        // All missing messages are loaded again together: one after the other, each would take as long as all.
        bool missing = true;
        for (unsigned polls = 0; missing;) {
            missing = false;
#pragma unroll
            for (int i = 0; i < SIZE; ++i)
#pragma unroll
                for (int k = 0; k < MESSAGES; ++k)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) {
                        Message& got = message[i][v][k];
                        if (first + i >= end || got.mark - published.epoch - 1 < MARKS - 1) continue;
                        got = load_message(published.at(first + i, k, v));
                        missing = true;
                    }
            if (++polls == MOST_POLLS) __trap();
        }
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (first + i >= end) break;
            Composition tile;
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                tile.take(v, message[i][v]);
                tile.reset = FORGETS && message[i][v][0].mark - published.epoch == RESET;
            }
            whole = i == 0 && alone ? tile : tile.after(whole);
        }
    }
};

// The carry into this tile, by decoupled look-back.  Publishes the tile's inclusive prefix unless that has been done
// (`settled`).  Called by all threads of the block.
__device__ inline Channels look_back(
    const Place& at, Shared& shared, const Published& published, int chunk, const Composition& tile, bool settled
) {
    const int slot = at.lane % LANES, poller = at.warp * SEGMENTS + at.segment;
    // Whether a predicate holds in all lanes of this segment; called by all lanes of the warp.
    const unsigned lanes = (LANES == 32 ? ~0u : (1u << LANES) - 1) << (at.segment * LANES);
    const auto all = [&](bool ready) { return (__ballot_sync(~0u, ready) & lanes) == lanes; };
    unsigned seen = ABSENT;
    int nearest = -1;  // distance to the nearest earlier tile with an inclusive prefix
    unsigned polls = 0;
    for (int first = 0;;) {
        const int other = chunk - 1 - first - poller;
        Known there;
        // One poll per tile and round, and none once its prefix is known: under load polls queue behind the copies.
        const unsigned mark = other >= 0 && seen != KNOWN ? published.read(other, there) : ABSENT;
        const bool composed = all(mark == COMPOSED), known = all(mark == KNOWN);
        if (known || (composed && seen == ABSENT)) {
            shared.window[first + poller][slot] = there;
            seen = mark;
        }
        shared.seen[poller] = seen;
        __syncthreads();
        // Find the nearest tile with an inclusive prefix, if every tile in between has published its aggregate.
        bool gap = false;
#pragma unroll
        for (int i = 0; i < POLLERS; i += 32) {
            const unsigned other = i + at.lane < POLLERS ? shared.seen[i + at.lane] : COMPOSED;
            const unsigned known = __ballot_sync(~0u, other == KNOWN), missing = __ballot_sync(~0u, other == ABSENT);
            if (known && !(missing & ((known & -known) - 1))) nearest = first + i + __ffs(known) - 1;
            gap = known || missing;
            if (gap) break;
        }
        if (nearest >= 0) break;
        if (!gap && first + 2 * POLLERS <= WINDOW) first += POLLERS, seen = ABSENT;
        if (++polls == MOST_POLLS) __trap();
        __syncthreads();
    }
    if (at.warp == 0) {  // more warps would only contend for shared memory
        Channels state = shared.window[nearest][slot].b;
#pragma unroll 4
        for (int back = nearest - 1; back >= 0; --back) shared.window[back][slot].carry(state);
        if (!settled) published.write_after(chunk, tile, state);
        if (at.segment == 0) shared.found[slot] = state;
    }
    __syncthreads();
    return shared.found[slot];
}
