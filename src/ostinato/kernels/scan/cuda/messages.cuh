// Messages between the blocks of a chain: the aggregate or the inclusive prefix of a tile.
//
// The flag (`mark`) shares one 16-byte word with the data, and 16-byte accesses are single-copy atomic, so no fence is
// needed.  Flags include the epoch of the launch, so those of earlier launches are ignored and memory is never cleared.

// COMPOSED: an aggregate; RESET: an aggregate that does not depend on earlier tiles; KNOWN: an inclusive prefix.
enum Mark : unsigned { ABSENT, COMPOSED, RESET, KNOWN, MARKS };
struct alignas(16) Message {
    union {
        struct { unsigned parts[3], mark; };
        unsigned long long halves[2];
    };

    __device__ Mark since(unsigned epoch) const { return mark - epoch < MARKS ? Mark(mark - epoch) : ABSENT; }
};

__device__ inline void store_message(Message* to, const Message& message) {
    asm volatile("{ .reg .b128 m; mov.b128 m, {%1, %2}; st.relaxed.gpu.global.b128 [%0], m; }" ::"l"(to),
                 "l"(message.halves[0]), "l"(message.halves[1]) : "memory");
}
__device__ inline Message load_message(const Message* from) {
    Message message;
    asm volatile("{ .reg .b128 m; ld.relaxed.gpu.global.b128 m, [%2]; mov.b128 {%0, %1}, m; }"
                 : "=l"(message.halves[0]), "=l"(message.halves[1]) : "l"(from) : "memory");
    return message;
}

