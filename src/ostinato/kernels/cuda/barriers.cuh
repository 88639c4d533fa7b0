// Barriers in shared memory (mbarrier), which count arrivals and the bytes of asynchronous copies; those copies; and
// the barrier of a cluster.

constexpr unsigned MOST_POLLS = 1 << 24;  // polls, about a microsecond each, before a wait traps

// The address, as PTX takes it, of an object in the shared memory of this block, or of its counterpart in the block of
// this rank in the cluster.
__device__ inline unsigned shared_address(const void* here) { return unsigned(__cvta_generic_to_shared(here)); }
__device__ inline unsigned shared_address(const void* here, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(rank));
    return there;
}

// Called by one thread, with a barrier's address: `init_barrier` before any other use; `expect` to arrive once in a
// phase and make it wait for so many bytes of copies, too.
template <int ARRIVALS = 1> __device__ inline void init_barrier(unsigned barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "n"(ARRIVALS) : "memory");
}
__device__ inline void expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity has completed; waits for a while.  OF_CLUSTER makes visible what other blocks of the
// cluster sent.
template <bool OF_CLUSTER = false> __device__ inline unsigned try_wait(unsigned barrier, int parity) {
    unsigned done;
    if constexpr (OF_CLUSTER)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    else
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// Starts a bulk copy of a multiple of 16 bytes to shared memory, which the barrier counts.
__device__ inline void start_copy(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Starts a copy of the box of a tensor map that begins at these coordinates.
struct alignas(64) TensorMap { unsigned char bytes[128]; };
__device__ inline void start_copy(unsigned to, const TensorMap* map, int c0, int c1, int c2, int c3, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier) : "memory");
}

// A barrier as an object.  Its wait acquires what other blocks of the cluster sent, and traps if that never arrives.
struct Barrier {
    unsigned long long state;

    template <int ARRIVALS = 1> __device__ void init() { init_barrier<ARRIVALS>(shared_address(this)); }
    __device__ void expect(int bytes) { ::expect(shared_address(this), bytes); }
    __device__ void wait(int parity) const {
        unsigned done = 0;
        for (unsigned polls = 0; !done;) {
            done = try_wait<true>(shared_address(this), parity);
            if (++polls == MOST_POLLS) __trap();
        }
    }
};

// Called after this thread has initialised barriers, so that asynchronous copies and other blocks see them.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's accesses to shared memory and those of asynchronous copies or wgmma.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
