// What blocks tell each other of tiles.
//
// A message carries its own readiness: a mark in the same 16 bytes, which arrive whole, so nothing need be ordered and
// no fence waited for.  The epoch of the launch in each mark tells it from those of earlier launches, so the memory need
// not be cleared.

enum Mark : unsigned { ABSENT, COMPOSED, RESET, KNOWN, MARKS };  // RESET: the tiles before do not matter
struct alignas(16) Message {
    union {
        struct { unsigned parts[3], mark; };
        unsigned long long halves[2];
    };

    __device__ Mark since(unsigned epoch) const { return mark - epoch < MARKS ? Mark(mark - epoch) : ABSENT; }
};
constexpr unsigned PATIENCE = 1 << 24;  // looks, of a microsecond each, before a wait ends in an error

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

