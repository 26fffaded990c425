/* What AMX's instructions do, by their description in Intel's manual, each by the name that LLVM has for it behind
   "llvm.x86.", to eight tiles of each thread. The product of pairs adds the two numbers of one after the other, each
   sum rounded; a processor may keep more digits of the first. */
#include <stdint.h>
#include <string.h>

enum { TILES = 8, ROWS = 16, WORDS = 16 };

static __thread struct {
    uint8_t rows[TILES];
    uint16_t bytes[TILES];
    uint32_t words[TILES][ROWS][WORDS];
    int configured;
} own;

static float number(uint32_t bits) {
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
}

static void check(void) {
    if (!own.configured) __builtin_trap(); /* as the processor does */
}

void twin_ldtilecfg(const uint8_t *shape) {
    memset(&own, 0, sizeof own);
    memcpy(own.bytes, shape + 16, sizeof own.bytes);
    memcpy(own.rows, shape + 48, sizeof own.rows);
    own.configured = 1;
}

void twin_tilerelease(void) { memset(&own, 0, sizeof own); }

void twin_tilezero(uint8_t tile) {
    check();
    memset(own.words[tile], 0, sizeof own.words[tile]);
}

void twin_tileloadd64(uint8_t tile, const uint8_t *place, int64_t apart) {
    twin_tilezero(tile);
    for (int row = 0; row < own.rows[tile]; row++) memcpy(own.words[tile][row], place + row * apart, own.bytes[tile]);
}

void twin_tilestored64(uint8_t tile, uint8_t *place, int64_t apart) {
    check();
    for (int row = 0; row < own.rows[tile]; row++) memcpy(place + row * apart, own.words[tile][row], own.bytes[tile]);
}

void twin_tdpbf16ps(uint8_t sums, uint8_t left, uint8_t right) {
    check();
    for (int row = 0; row < own.rows[sums]; row++) {
        for (int pair = 0; pair < own.bytes[left] / 4; pair++) {
            uint32_t both = own.words[left][row][pair];
            for (int column = 0; column < own.bytes[sums] / 4; column++) {
                uint32_t weights = own.words[right][pair][column];
                float sum = number(own.words[sums][row][column]);
                sum += number(both << 16) * number(weights << 16);
                sum += number(both & 0xFFFF0000u) * number(weights & 0xFFFF0000u);
                memcpy(&own.words[sums][row][column], &sum, sizeof sum);
            }
        }
    }
}

void twin_tdpbsud(uint8_t sums, uint8_t left, uint8_t right) {
    check();
    for (int row = 0; row < own.rows[sums]; row++) {
        for (int quad = 0; quad < own.bytes[left] / 4; quad++) {
            const int8_t *numbers = (const int8_t *)&own.words[left][row][quad];
            for (int column = 0; column < own.bytes[sums] / 4; column++) {
                const uint8_t *weights = (const uint8_t *)&own.words[right][quad][column];
                for (int place = 0; place < 4; place++) {
                    own.words[sums][row][column] += (uint32_t)(numbers[place] * weights[place]);
                }
            }
        }
    }
}
