// Barriers in shared memory, which count the bytes that copies put beside them.

__device__ inline unsigned shared_address(const void* here) { return unsigned(__cvta_generic_to_shared(here)); }

// After this thread has opened barriers.
__device__ inline void announce_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Before a copy by a tensor map writes where this thread did.
__device__ inline void yield_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

struct Barrier {
    unsigned long long state;

    // One thread's call, before all others.
    __device__ void open() {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(this)) : "memory");
    }
    // One thread's call in each phase.
    __device__ void expect(int bytes) {
        asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                     "r"(bytes) : "memory");
    }
    // Wait for the bytes of a phase, of which this is the parity.
    __device__ void wait(int parity) const {
        unsigned done = 0;
        for (unsigned looks = 0; !done;) {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
                         " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared_address(this)), "r"(parity) : "memory");
            if (++looks == PATIENCE) __trap();
        }
    }
};
