/* A whole encoder layer with int8 weights: attention, then a feed-forward network, each with a residual and norms.
 *
 * One call instead of a dozen, because for a short text the calls take longer than the work. Rows that follow one
 * another through out projection, norms and feed-forward network stay in the caches. */

#pragma once

#include "attention.h"
#include "product.h"
#include "rows.h"

#define MLP_ROWS 96    /* rows whose hidden units stay in the caches between the two matrices */
#define FEWEST_ROWS 48 /* of a thread that works alone: with fewer, reading all weights takes longer than using them */

typedef struct {
    const Layer *up, *down;
    int activation, gated;
} Mlp;

typedef struct {
    const Layer *qkv, *out;
    Mlp mlp;
    /* before and after attention, before and after the feed-forward network; NULL for none */
    const Norm *attention_in, *attention_out, *mlp_in, *mlp_out;
} EncoderLayer;

/* ---------------------------------------------------------------- memory */

typedef struct {
    Rows inputs, middle;
    float *hidden; /* [rows][outputs of up] */
} MlpRows;

typedef struct {
    float *qkv, *attended; /* of a group of tokens */
    /* of a chunk of rows, one for each thread and the first for all of them together */
    Rows rows;
    MlpRows mlp;
    float *stream;
    float *row;
    Rows first_rows;
    MlpRows first_mlp;
    float *first_stream;
    Scratch scratch;
} LayerMemory;

static void take_rows(Memory *memory, Rows *rows, int64_t count, int64_t size) {
    rows->stride = round_up(size, INPUTS);
    rows->bytes = take(memory, (count + ROWS_BEYOND) * rows->stride * sizeof(byte));
    rows->scales = take_floats(memory, count);
    rows->zeros = take(memory, count * sizeof(int32_t));
}

static void take_mlp(Memory *memory, MlpRows *rows, const Mlp *mlp, int64_t count) {
    take_rows(memory, &rows->inputs, count, mlp->up->inputs);
    take_rows(memory, &rows->middle, count, mlp->down->inputs);
    rows->hidden = take_floats(memory, count * mlp->up->outputs);
}

static void take_layer(Memory *memory, LayerMemory *parts, const EncoderLayer *layer, const Attention *call,
                       int64_t tokens, int threads, int own) {
    const int64_t hidden = layer->qkv->inputs, widest = larger(hidden, layer->out->inputs);
    parts->qkv = take_floats(memory, tokens * layer->qkv->outputs);
    parts->attended = take_floats(memory, tokens * layer->out->inputs);
    for (int thread = 0; thread < threads; thread++) {
        LayerMemory each;
        take_rows(memory, &each.rows, BLOCK_ROWS, widest);
        take_mlp(memory, &each.mlp, &layer->mlp, MLP_ROWS);
        each.stream = take_floats(memory, MLP_ROWS * hidden);
        each.row = take_floats(memory, hidden);
        take_scratch(memory, &each.scratch, call);
        if (thread == 0) parts->first_rows = each.rows, parts->first_mlp = each.mlp, parts->first_stream = each.stream;
        if (thread != own) continue;
        parts->rows = each.rows, parts->mlp = each.mlp, parts->stream = each.stream;
        parts->row = each.row, parts->scratch = each.scratch;
    }
}

/* ---------------------------------------------------------------- the feed-forward network */

/* The first of the rows that a member of a team works on; the next member's first is its end. */
static int64_t share(int64_t count, int64_t rank, Team team) { return count * rank / team.size; }

#define FOR_OWN_ROWS(row, count, team) \
    for (int64_t row = share(count, team.rank, team); row < share(count, team.rank + 1, team); row++)

/* out = down(activation(up(inputs))), or down(activation(first half of up) * second half), of rows that are bytes */
static void feed_forward(const Mlp *mlp, const MlpRows *memory, int64_t rows, float *out, Team team) {
    const int64_t width = mlp->up->outputs, inner = mlp->down->inputs;
    multiply(mlp->up, &memory->inputs, rows, memory->hidden, width, team);
    wait_for(team);
    FOR_OWN_ROWS(row, rows, team) {
        float *unit = memory->hidden + row * width;
        activate(mlp->activation, unit, mlp->gated ? unit + inner : NULL, inner);
        quantize_row(unit, inner, &memory->middle, row);
    }
    wait_for(team);
    multiply(mlp->down, &memory->middle, rows, out, mlp->down->outputs, team);
}

/* ---------------------------------------------------------------- who works on which rows */

/* With many rows every thread works on chunks of its own and waits for nobody; with few, all share each chunk. */
typedef struct {
    Team team;
    int64_t first, step, chunk; /* this thread's chunks begin at first, first + step, ... */
} Plan;

static Plan plan_rows(int64_t rows, int64_t most) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (rows < threads * FEWEST_ROWS) {
        const Plan together = {{thread, threads}, 0, most, most};
        return together;
    }
    const int64_t rounds = (rows + threads * most - 1) / (threads * most);
    const int64_t chunk = (rows + threads * rounds - 1) / (threads * rounds);
    const Plan alone = {{0, 1}, thread * chunk, threads * chunk, chunk};
    return alone;
}

/* ---------------------------------------------------------------- the layer */

/* qkv of `count` tokens */
static void project(const EncoderLayer *layer, const float *x, int64_t count, const LayerMemory *memory) {
    const int64_t hidden = layer->qkv->inputs, width = layer->qkv->outputs;
    const Plan plan = plan_rows(count, BLOCK_ROWS);
    const Rows *bytes = plan.team.size > 1 ? &memory->first_rows : &memory->rows;
    for (int64_t start = plan.first; start < count; start += plan.step) {
        const int64_t rows = smaller(plan.chunk, count - start);
        FOR_OWN_ROWS(row, rows, plan.team) {
            const float *from = x + (start + row) * hidden;
            if (layer->attention_in) normalize(layer->attention_in, from, NULL, memory->row, hidden);
            quantize_row(layer->attention_in ? memory->row : from, hidden, bytes, row);
        }
        wait_for(plan.team);
        multiply(layer->qkv, bytes, rows, memory->qkv + start * width, width, plan.team);
        wait_for(plan.team);
    }
}

/* Everything after attention, of the tokens in `selected` or of all `count`. */
static void finish(const EncoderLayer *layer, const float *x, float *out, const int64_t *selected, int64_t count,
                   const LayerMemory *memory) {
    const int64_t hidden = layer->qkv->inputs, width = layer->out->inputs;
    const Plan plan = plan_rows(count, MLP_ROWS);
    const Team team = plan.team;
    const int together = team.size > 1;
    const Rows *bytes = together ? &memory->first_rows : &memory->rows;
    const MlpRows *mlp = together ? &memory->first_mlp : &memory->mlp;
    float *stream = together ? memory->first_stream : memory->stream;
    for (int64_t start = plan.first; start < count; start += plan.step) {
        const int64_t rows = smaller(plan.chunk, count - start);
        FOR_OWN_ROWS(row, rows, team) {
            const int64_t token = selected ? selected[start + row] : start + row;
            quantize_row(memory->attended + token * width, width, bytes, row);
        }
        wait_for(team);
        multiply(layer->out, bytes, rows, stream, hidden, team);
        wait_for(team);
        FOR_OWN_ROWS(row, rows, team) {
            const int64_t token = selected ? selected[start + row] : start + row;
            float *to = stream + row * hidden;
            normalize(layer->attention_out, to, x + token * hidden, to, hidden);
            if (layer->mlp_in) normalize(layer->mlp_in, to, NULL, memory->row, hidden);
            quantize_row(layer->mlp_in ? memory->row : to, hidden, &mlp->inputs, row);
        }
        wait_for(team);
        feed_forward(&layer->mlp, mlp, rows, out + start * hidden, team);
        wait_for(team);
        FOR_OWN_ROWS(row, rows, team) {
            float *to = out + (start + row) * hidden;
            normalize(layer->mlp_out, to, stream + row * hidden, to, hidden);
        }
        wait_for(team);
    }
}

/* All threads of a parallel region call this. Groups of sequences of up to `group_tokens` tokens follow one another, so
 * that their queries, keys and values stay in the caches; selected tokens take a single group. */
static void run_layer(const EncoderLayer *layer, const Attention *call, const float *x, float *out,
                      const int64_t *selected, int64_t count, int64_t group_tokens, const LayerMemory *memory) {
    const int64_t hidden = layer->qkv->inputs;
    Attention group = *call;
    for (int64_t sequence = 0; sequence < call->sequences; sequence += group.sequences) {
        const int64_t start = call->starts[sequence];
        int64_t end = sequence + 1;
        while (end < call->sequences && call->starts[end + 1] - start <= group_tokens) end++;
        const int64_t tokens = call->starts[end] - start;
        project(layer, x + start * hidden, tokens, memory);
#pragma omp barrier
        group.starts = call->starts + sequence;
        group.sequences = end - sequence;
        group.origin = start;
        group.q = memory->qkv;
        group.k = memory->qkv + call->heads * call->size;
        group.v = memory->qkv + (call->heads + call->kv_heads) * call->size;
        group.q_stride = group.k_stride = group.v_stride = layer->qkv->outputs;
        group.out = memory->attended;
        group.out_stride = layer->out->inputs;
        attend(&group, &memory->scratch);
        finish(layer, x + start * hidden, out + (selected ? 0 : start * hidden), selected, selected ? count : tokens, memory);
#pragma omp barrier
    }
}
