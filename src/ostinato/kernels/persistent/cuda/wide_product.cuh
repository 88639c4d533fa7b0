// The product of wide batches, by wgmma: weights in registers or shared memory with states in the ring.

using Descriptor = unsigned long long;

// The descriptor of an operand in shared memory; `along_k`: the bytes from its first 8 columns to the next 8.  Within a
// cluster, the upper bits of an address are the block's rank.
__device__ inline Descriptor descriptor(unsigned address, int along_k) {
    return Descriptor((address & 0x3ffff) >> 4) | Descriptor(along_k >> 4) << 16 | Descriptor(128 >> 4) << 32;
}
// The descriptor of an operand that many bytes after another, whose descriptor's lower half is given.  It is made where
// it is used: if the compiler hoisted all of them, they would take registers.
__device__ inline Descriptor after(unsigned descriptor, int bytes) {
    return Descriptor(128 >> 4) << 32 | (descriptor + (bytes >> 4));
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define SUMS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#if COLUMNS == 32
#define SHAPE "m64n32k16"
#define SUMS "{" SUMS_16 "}"
#define SUM_OPERANDS D16(0)
#define FROM_REGISTERS "{%16,%17,%18,%19}, %20, p, 1, 1, 0"
#define FROM_MEMORY "%16, %17, p, 1, 1, 0, 0"
#else
#define SHAPE "m64n64k16"
#define SUMS "{" SUMS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define SUM_OPERANDS D16(0), D16(16)
#define FROM_REGISTERS "{%32,%33,%34,%35}, %36, p, 1, 1, 0"
#define FROM_MEMORY "%32, %33, p, 1, 1, 0, 0"
#endif
#define WGMMA(type, from, ...)                                                                                       \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." type "." type    \
                 " " SUMS ", " from "; }" : SUM_OPERANDS : __VA_ARGS__)

// Adds the product of a tile's weights, in registers or in shared memory, and its states.
__device__ inline void multiply(float (&d)[COLUMNS / 2], const uint4& a, Descriptor b) {
    if (BFLOAT16) WGMMA("bf16", FROM_REGISTERS, "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
    else WGMMA("f16", FROM_REGISTERS, "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
__device__ inline void multiply(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b) {
    if (BFLOAT16) WGMMA("bf16", FROM_MEMORY, "l"(a), "l"(b));
    else WGMMA("f16", FROM_MEMORY, "l"(a), "l"(b));
}

// The part of the recurrent matrix that a warpgroup multiplies.
struct Product {
    uint4 in_registers[IN_REGISTERS];
    char* shared;
    unsigned kept, ring;  // lower halves of the descriptors of the weights in shared memory and of the ring
    Slot slot;

    __device__ Product(const Parameters& p, const Place& place, char* shared) : shared(shared) {
        const int group = threadIdx.x / 128, row = warp_id() % 4 * 16 + lane_id() / 4, column = lane_id() % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (!is_in_registers(tile)) continue;
            const auto at = [&](int down, int across) {
                return two_weights(p, place, group, row + down, tile, column + across);
            };
            in_registers[registers_before(tile)] = {at(0, 0), at(8, 0), at(0, 8), at(8, 8)};
            if (tile % 4 == 3) asm volatile("" ::: "memory");  // limits the loads in flight
        }
        kept = unsigned(descriptor(shared_address(shared) + group * IN_SHARED * WEIGHT_BYTES, WEIGHT_BYTES / 2));
        ring = unsigned(descriptor(shared_address(shared) + AT_RING, STATE_BYTES / 2));
    }

    // Keeps the sums in the registers to which wgmma writes.
    __device__ static void pin(float (&d)[COLUMNS / 2]) {
#pragma unroll
        for (float& sum : d) asm volatile("" : "+f"(sum) :: "memory");
    }

    __device__ void operator()(float (&d)[COLUMNS / 2]) {
        unsigned last = 0;  // the barrier of the slot that was multiplied last
#pragma unroll
        for (int part = 0; part < COPIES; ++part) {
            wait_for(slot.filled(shared), slot.parity);
            if (part == 0) {
#pragma unroll
                for (float& sum : d) sum = 0;
            }
            pin(d);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const unsigned states = ring + slot.number * (COPY_BYTES >> 4);
            unsigned weights = kept;
            asm volatile("" : "+r"(weights));
#pragma unroll
            for (int i = 0; i < COPIED; ++i) {
                const int tile = part * COPIED + i;
                if (tile >= TILES) break;
                const Descriptor b = after(states, i * STATE_BYTES);
                if (is_in_registers(tile)) multiply(d, in_registers[registers_before(tile)], b);
                else multiply(d, after(weights, (tile - registers_before(tile)) * WEIGHT_BYTES), b);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (part) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (lane_id() == 0) arrive(last);
            }
            last = slot.emptied(shared);
            slot.next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin(d);
        if (lane_id() == 0) arrive(last);
    }
};
