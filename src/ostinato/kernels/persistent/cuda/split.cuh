// Sends the partial sums of the units of a cluster's other blocks, which Product has left in shared memory.

struct Sender {
    static constexpr int COUNT = (CLUSTER - 1) * UNITS * COLUMNS;  // sums that the block sends
    static constexpr int SENDS = (COUNT + OWNERS * ADJACENT - 1) / (OWNERS * ADJACENT);  // of a thread

    const Mailbox& mailbox;
    Span spans[SENDS + 1] = {};  // no array is empty

    __device__ Sender(const Parameters& p, const Product& product, const Mailbox& mailbox, int block)
        : mailbox(mailbox) {
#pragma unroll
        for (int i = 0; i < SENDS; ++i)
            if (exists(i)) spans[i] = product.span(p, block, row(i));
    }

    __device__ static int number(int i) { return (i * OWNERS + own_thread()) * ADJACENT; }
    __device__ static bool exists(int i) { return number(i) < COUNT; }
    __device__ static int item(int i) { return number(i) % (UNITS * COLUMNS); }
    __device__ int peer(int i) const { return (mailbox.rank + 1 + number(i) / (UNITS * COLUMNS)) % CLUSTER; }
    __device__ int row(int i) const { return peer(i) * UNITS + item(i) % UNITS; }

    __device__ void send(const Product& product, const float* sums, int sequences, int step) const {
        Adjacent<float> sum[SENDS + 1];
#pragma unroll
        for (int i = 0; i < SENDS; ++i) sum[i] = product.sum(sums, spans[i], row(i), item(i) / UNITS);
#pragma unroll
        for (int i = 0; i < SENDS; ++i) {
            const bool wanted = exists(i) && item(i) / UNITS < sequences;
            Mailbox::send(wanted, mailbox.address(peer(i), item(i)), sum[i], step);
        }
    }
};

