/* AMX' tiles in plain C, for CPUs that have none: included before a kernel that is compiled for them. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local struct {
    uint8_t rows[8];
    uint16_t row_bytes[8];
    uint8_t bytes[8][16][64];
} tiles;

static void emulated_loadconfig(const void *config) {
    memcpy(tiles.row_bytes, (const uint8_t *)config + 16, sizeof tiles.row_bytes);
    memcpy(tiles.rows, (const uint8_t *)config + 48, sizeof tiles.rows);
}

static void emulated_zero(int tile) { memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]); }

static void emulated_loadd(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.bytes[tile][row], (const char *)from + row * stride, tiles.row_bytes[tile]);
}

static void emulated_stored(int tile, void *to, int64_t stride) {
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy((char *)to + row * stride, tiles.bytes[tile][row], tiles.row_bytes[tile]);
}

/* unsigned bytes of the first times signed bytes of the second, as Intel's manual defines it */
static void emulated_dpbusd(int sum, int first, int second) {
    for (int row = 0; row < tiles.rows[sum]; row++)
        for (int group = 0; group < tiles.row_bytes[first] / 4; group++)
            for (int column = 0; column < tiles.row_bytes[sum] / 4; column++) {
                int32_t total;
                memcpy(&total, &tiles.bytes[sum][row][column * 4], sizeof total);
                for (int i = 0; i < 4; i++)
                    total += tiles.bytes[first][row][group * 4 + i] * (int8_t)tiles.bytes[second][group][column * 4 + i];
                memcpy(&tiles.bytes[sum][row][column * 4], &total, sizeof total);
            }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release() memset(&tiles, 0, sizeof tiles)
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbusd emulated_dpbusd
#define syscall(...) 0
#define __AMX_INT8__ 1
