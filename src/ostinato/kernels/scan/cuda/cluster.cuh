// The compositions that the blocks of a cluster send each other, through distributed shared memory.
//
// At every round each block sends its tile's to all others.  Memory that is busy with copies delays messages through it
// by microseconds, and these not.  A block sends the next but one only after it has got all others of the next round,
// which they sent after they had read this one's: so two boxes, used in turn, are enough.

struct Inbox {
    Message message[2][CLUSTER][VEC][MESSAGES][LANES];  // of each rank
    Barrier lower[2], higher[2];  // of the messages from lower and from higher ranks

    // One thread's call; no block may send before all of the cluster have done this.
    __device__ void init() {
#pragma unroll
        for (int box = 0; box < 2; ++box) lower[box].init(), higher[box].init();
        fence_barrier_init();
    }
    // Send the composition of this block's tile to the others of the first `count` blocks, and expect theirs.  Called
    // by the first segment, whose writes to shared memory before are then visible to all who wait.
    __device__ void send(int box, int rank, int count, const Composition& tile) {
#pragma unroll
        for (int peer = 0; peer < CLUSTER; ++peer) {
            if (peer == rank || peer >= count) continue;
            const unsigned barrier = shared_address(peer > rank ? &lower[box] : &higher[box], peer);
#pragma unroll
            for (int v = 0; v < VEC; ++v)
#pragma unroll
                for (int k = 0; k < MESSAGES; ++k) {
                    const Message sent = tile.message(v, k, FORGETS && tile.reset ? RESET : COMPOSED);
                    asm volatile(
                        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];"
                        ::"r"(shared_address(&message[box][rank][v][k][threadIdx.x], peer)), "l"(sent.halves[0]),
                        "l"(sent.halves[1]), "r"(barrier) : "memory");
                }
        }
        __syncwarp(~0u >> 32 - LANES);
        if (threadIdx.x > 0) return;
        lower[box].expect(rank * int(sizeof(message[0][0])));
        higher[box].expect((count - 1 - rank) * int(sizeof(message[0][0])));
    }
    // Carry a state over the tiles of the lower ranks, when they are there; then over those of the others of `count`.
    __device__ void carry_over_lower(int box, int parity, int rank, Channels& state) const {
        lower[box].wait(parity);
        carry(box, 0, rank, state);
    }
    __device__ void carry_over_higher(int box, int parity, int rank, int count, Channels& state) const {
        higher[box].wait(parity);
        carry(box, rank + 1, count, state);
    }

private:
    __device__ void carry(int box, int first, int end, Channels& state) const {
#pragma unroll 1
        for (int rank = first; rank < end; ++rank) {
            Composition tile;
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Message got[MESSAGES];
#pragma unroll
                for (int k = 0; k < MESSAGES; ++k) got[k] = message[box][rank][v][k][threadIdx.x % LANES];
                tile.take(v, got);
                tile.reset = FORGETS && got[0].mark == RESET;
            }
            tile.carry(state);
        }
    }
};

// Between these two calls of all threads of a cluster each of its blocks begins.
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
