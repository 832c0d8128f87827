/* Kernels for CPUs: int8 linear layers, feed-forward networks and whole encoder layers; in fp32 or bf16 attention and
 * activations, also with gradients, dropout, and cross-entropy. */

#include "layer.h"
#include "loss.h"
#include "training.h"

/* the memory order of weights, which the caller packs */
const int32_t bertblocks_panel = PANEL, bertblocks_group = GROUP, bertblocks_inputs = INPUTS;

/* Asks the system for the right to use the instructions; 0 if it refuses. */
int bertblocks_prepare(void) { return prepare(); }

/* The others that return an int return 0 if memory is short. */

/* out = x W^T + bias */
int bertblocks_linear(const Layer *layer, const float *x, int64_t count, float *out, int threads) {
    Rows rows;
    Memory memory = {NULL, 0};
    take_rows(&memory, &rows, count, layer->inputs);
    if (!allocate(&memory)) return 0;
    take_rows(&memory, &rows, count, layer->inputs);
#pragma omp parallel num_threads(threads)
    {
        const Team team = {omp_get_thread_num(), omp_get_num_threads()};
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; row++) quantize_row(x + row * layer->inputs, layer->inputs, &rows, row);
        multiply(layer, &rows, count, out, layer->outputs, team);
    }
    free(memory.start);
    return 1;
}

/* out = down(activation(up(x))), or down(activation(first half of up(x)) * second half) */
int bertblocks_mlp(const Layer *up, const Layer *down, int activation, int gated, const float *x, int64_t count,
                   float *out, int threads) {
    const Mlp mlp = {up, down, activation, gated};
    const int64_t most = smaller(count, MLP_ROWS);
    MlpRows shared;
    Memory memory = {NULL, 0};
    take_mlp(&memory, &shared, &mlp, most);
    if (!allocate(&memory)) return 0;
    take_mlp(&memory, &shared, &mlp, most);
#pragma omp parallel num_threads(threads)
    for (int64_t start = 0; start < count; start += MLP_ROWS) {
        const Team team = {omp_get_thread_num(), omp_get_num_threads()};
        const int64_t rows = smaller(MLP_ROWS, count - start);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            quantize_row(x + (start + row) * up->inputs, up->inputs, &shared.inputs, row);
        feed_forward(&mlp, &shared, rows, out + start * down->outputs, team);
        wait_for(team);
    }
    free(memory.start);
    return 1;
}

/* softmax(q k^T) v */
int bertblocks_attention(const Attention *call, int threads) {
    Scratch scratch;
    Memory memory = {NULL, 0};
    take_scratch(&memory, &scratch, call);
    const int64_t size = memory.size; /* of one thread */
    memory.size *= threads;
    if (!allocate(&memory)) return 0;
#pragma omp parallel num_threads(threads) private(scratch)
    {
        Memory own = {memory.start + size * omp_get_thread_num(), 0};
        take_scratch(&own, &scratch, call);
        attend(call, &scratch);
    }
    free(memory.start);
    return 1;
}

/* softmax(q k^T) v with dropout on the weights, or its gradients if that of the output is given */
int bertblocks_train_attention(const Attention *call, const Training *training, int threads) {
    Head head;
    Memory memory = {NULL, 0};
    take_head(&memory, &head, call);
    const int64_t size = memory.size; /* of one thread */
    memory.size *= threads;
    if (!allocate(&memory)) return 0;
#pragma omp parallel num_threads(threads) private(head)
    {
        Memory own = {memory.start + size * omp_get_thread_num(), 0};
        take_head(&own, &head, call);
        train(call, training, &head);
    }
    free(memory.start);
    return 1;
}

/* activations of rows, or gated units, or their gradients */
void bertblocks_activation(const Units *units, int threads) {
#pragma omp parallel num_threads(threads)
    activate_units(units);
}

/* numbers times the factors of dropout */
void bertblocks_dropout(const void *from, void *to, int64_t count, int is_bf16, uint64_t seed, float rate,
                        int threads) {
#pragma omp parallel num_threads(threads)
    drop_numbers(from, to, count, is_bf16, seed, rate);
}

/* cross-entropy of rows, and its gradients in place of the logits */
void bertblocks_cross_entropy(const Loss *loss, int threads) {
#pragma omp parallel num_threads(threads)
    cross_entropy(loss);
}

/* how many bytes `bertblocks_layer` needs for groups of up to `tokens` tokens */
int64_t bertblocks_layer_bytes(const EncoderLayer *layer, const Attention *call, int64_t tokens, int threads) {
    Memory memory = {NULL, 0};
    LayerMemory parts;
    take_layer(&memory, &parts, layer, call, tokens, threads, 0);
    return memory.size;
}

/* One encoder layer of all tokens, or of the `count` tokens that `selected` lists; `memory` is aligned to 64 bytes. */
void bertblocks_layer(const EncoderLayer *layer, const Attention *call, const float *x, float *out,
                      const int64_t *selected, int64_t count, int64_t group_tokens, char *memory, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Memory own = {memory, 0};
        LayerMemory parts;
        take_layer(&own, &parts, layer, call, group_tokens, threads, omp_get_thread_num());
        run_layer(layer, call, x, out, selected, count, group_tokens, &parts);
    }
}
