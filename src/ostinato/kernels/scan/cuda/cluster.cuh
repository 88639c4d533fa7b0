// The exchange of compositions between the blocks of a cluster, through distributed shared memory.
//
// In every round each block sends the composition of its tile to all others.  Messages through global memory would be
// delayed by microseconds while it is busy with copies; these are not.  A block sends its message of round n + 2 only
// after it has received all messages of round n + 1, which the others sent after they had read those of round n: so two
// boxes, used in turn, are enough.

struct Inbox {
    Message message[2][CLUSTER][VEC][MESSAGES][LANES];  // from each rank
    Barrier lower[2], higher[2];  // for the messages from lower and from higher ranks

    // Called by one thread; no block may send before all blocks of the cluster have called it.
    __device__ void init() {
#pragma unroll
        for (int box = 0; box < 2; ++box) lower[box].init(), higher[box].init();
        fence_barrier_init();
    }
    // Send the composition of this block's tile to the other ones of the first `count` blocks, and expect theirs.
    // Called by the first segment, whose earlier writes to shared memory are then visible to all threads that wait.
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
    // Carry a state over the tiles of lower ranks, once they have arrived; then over those of ranks up to `count`.
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

// A barrier of all threads of a cluster in two calls: when the second returns, all blocks of the cluster have begun.
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
