/* Runs one of the kernels on the files of a folder: for processors that are emulated.
 *
 * `driver FOLDER KERNEL NUMBER ...` reads the arrays 0, 1, 2, ... from the folder and writes the results to out0, out1,
 * ...; `driver FOLDER order` prints the memory order of weights. */

#include <stdio.h>

#include "kernels.c"

static char path[4096];
static int64_t numbers[16];

static void *read_array(const char *folder, int index) {
    snprintf(path, sizeof path, "%s/%d", folder, index);
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    const long size = ftell(file);
    rewind(file);
    char *array = aligned_alloc(64, round_up(size + 1, 64));
    if (fread(array, 1, size, file) != (size_t)size) exit(1);
    fclose(file);
    return array;
}

static void write_array(const char *folder, int index, const float *array, int64_t count) {
    snprintf(path, sizeof path, "%s/out%d", folder, index);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(array, sizeof *array, count, file) != (size_t)count || fclose(file)) exit(1);
}

static Layer read_layer(const char *folder, int first, int64_t inputs, int64_t outputs) {
    const Layer layer = {read_array(folder, first),     read_array(folder, first + 1), read_array(folder, first + 2),
                         read_array(folder, first + 3), inputs,                        outputs};
    return layer;
}

/* 0: x; 1 to 4: the layer; numbers: rows, inputs, outputs */
static void linear(const char *folder) {
    const Layer layer = read_layer(folder, 1, numbers[1], numbers[2]);
    float *out = malloc(numbers[0] * numbers[2] * sizeof *out);
    if (!bertblocks_linear(&layer, read_array(folder, 0), numbers[0], out, 2)) exit(1);
    write_array(folder, 0, out, numbers[0] * numbers[2]);
}

/* 0: x; 1 to 4: up; 5 to 8: down; numbers: rows, inputs, outputs of up, inner, outputs, activation, gated */
static void mlp(const char *folder) {
    const Layer up = read_layer(folder, 1, numbers[1], numbers[2]), down = read_layer(folder, 5, numbers[3], numbers[4]);
    float *out = malloc(numbers[0] * numbers[4] * sizeof *out);
    if (!bertblocks_mlp(&up, &down, numbers[5], numbers[6], read_array(folder, 0), numbers[0], out, 2)) exit(1);
    write_array(folder, 0, out, numbers[0] * numbers[4]);
}

/* 0 to 2: q, k, v; 3: starts; 4: the gradient, if there is one; numbers: tokens, heads, kv_heads, size, half window,
 * sequences, longest */
static void attention(const char *folder) {
    const int64_t tokens = numbers[0], heads = numbers[1], kv_heads = numbers[2], size = numbers[3];
    float *out = malloc(tokens * heads * size * sizeof *out);
    Attention call = {.q = read_array(folder, 0), .k = read_array(folder, 1), .v = read_array(folder, 2), .out = out};
    call.q_stride = call.out_stride = heads * size, call.k_stride = call.v_stride = kv_heads * size;
    call.starts = read_array(folder, 3), call.sequences = numbers[5], call.longest = numbers[6];
    call.heads = heads, call.kv_heads = kv_heads, call.size = size, call.half_window = numbers[4];
    call.scale = 1.0f / sqrtf(size);
    if (!bertblocks_attention(&call, 2)) exit(1);
    write_array(folder, 0, out, tokens * heads * size);
    Training training = {.gradient = read_array(folder, 4)};
    if (!training.gradient) return;
    const int64_t counts[] = {tokens * heads * size, tokens * kv_heads * size, tokens * kv_heads * size};
    training.of_q_stride = heads * size, training.of_k_stride = training.of_v_stride = kv_heads * size;
    training.of_q = malloc(counts[0] * sizeof(float));
    training.of_k = malloc(counts[1] * sizeof(float)), training.of_v = malloc(counts[2] * sizeof(float));
    if (!bertblocks_train_attention(&call, &training, 2)) exit(1);
    const float *results[] = {training.of_q, training.of_k, training.of_v};
    for (int i = 0; i < 3; i++) write_array(folder, i + 1, results[i], counts[i]);
}

/* 0: up; 1: the gradient of the result; numbers: rows, size, activation, gated */
static void activation(const char *folder) {
    const int64_t count = numbers[0] * numbers[1], wide = numbers[3] ? 2 * count : count;
    Units units = {.rows = numbers[0], .size = numbers[1], .activation = numbers[2], .gated = numbers[3]};
    float *out = malloc(wide * sizeof *out);
    units.up = read_array(folder, 0), units.out = out;
    bertblocks_activation(&units, 2);
    write_array(folder, 0, out, count);
    units.gradient = read_array(folder, 1);
    bertblocks_activation(&units, 2);
    write_array(folder, 1, out, wide);
}

/* 0: logits; 1: labels; 2: weights of rows; numbers: rows, size */
static void loss(const char *folder) {
    const int64_t rows = numbers[0], size = numbers[1];
    Loss call = {.rows = rows, .size = size, .z_loss = 0.01f};
    call.logits = read_array(folder, 0), call.labels = read_array(folder, 1), call.row_weights = read_array(folder, 2);
    call.losses = malloc(rows * sizeof(float)), call.denominators = malloc(rows * sizeof(float));
    call.sums = calloc(size, sizeof(float));
    bertblocks_cross_entropy(&call, 2);
    write_array(folder, 0, call.losses, rows);
    write_array(folder, 1, call.logits, rows * size);
    write_array(folder, 2, call.sums, size);
}

/* 0: numbers; numbers: count */
static void dropout(const char *folder) {
    float *out = malloc(numbers[0] * sizeof *out);
    bertblocks_dropout(read_array(folder, 0), out, numbers[0], 0, 7, 0.25f, 2);
    write_array(folder, 0, out, numbers[0]);
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    const char *folder = arguments[1], *kernel = arguments[2];
    for (int i = 3; i < count; i++) numbers[i - 3] = atoll(arguments[i]);
    if (!strcmp(kernel, "order")) printf("%d %d %d\n", bertblocks_panel, bertblocks_group, bertblocks_inputs);
    if (!strcmp(kernel, "linear")) linear(folder);
    if (!strcmp(kernel, "mlp")) mlp(folder);
    if (!strcmp(kernel, "attention")) attention(folder);
    if (!strcmp(kernel, "activation")) activation(folder);
    if (!strcmp(kernel, "loss")) loss(folder);
    if (!strcmp(kernel, "dropout")) dropout(folder);
    return 0;
}
