/* int8 products in AMX' tiles, for more rows than the vectors take at a time. */

#pragma once

#ifdef __AMX_INT8__

#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

#define MOST_ROWS 32          /* rows of a product at a time: two tiles */
#define ROWS_BEYOND MOST_ROWS /* rows that are read, although there may be fewer */

/* Asks Linux for the right to use tiles, which it grants to the whole process. */
static int prepare(void) {
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

/* All eight tiles have 16 rows of 64 bytes. */
static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
    _tile_loadconfig(&config);
}

static void end_tiles(void) { _tile_release(); }

/* sums [32][32] = bytes x weights, where `inputs` is a multiple of INPUTS */
static void multiply_tiles(const uint8_t *bytes, int64_t stride, const int8_t *weights, int64_t inputs, int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += INPUTS) {
        _tile_loadd(4, bytes + k, stride);
        _tile_loadd(5, bytes + 16 * stride + k, stride);
        _tile_loadd(6, weights + k * PANEL, PANEL * 4);
        _tile_loadd(7, weights + k * PANEL + 64, PANEL * 4);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
    _tile_stored(3, sums + 16 * PANEL + 16, PANEL * 4);
}

#else

#define MOST_ROWS TILE_ROWS
#define ROWS_BEYOND 0
static int prepare(void) { return 1; }
static void begin_tiles(void) {}
static void end_tiles(void) {}

#endif
