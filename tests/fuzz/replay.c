/* SPDX-License-Identifier: MIT
 *
 * replay COUNT [FILE…]: a fuzz target without libFuzzer, for every compiler. Runs the files, then COUNT inputs drawn from
 * a fixed seed; a broken promise aborts.
 */
#include "fuzz.h"
#include "random.h"

enum { MOST = 1 << 16 };

static void replay(const char *path)
{
    static uint8_t data[MOST];
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "%s: cannot open\n", path);
        exit(1);
    }
    const size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv)
{
    enum { LONGEST = 200 };
    const long count = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
    for (int i = 2; i < argc; i++) replay(argv[i]);
    struct random_state random = {1};
    for (long i = 0; i < count; i++) {
        uint8_t data[LONGEST];
        const size_t size = (size_t)random_between(&random, 0, LONGEST);
        for (size_t k = 0; k < size; k++) data[k] = (uint8_t)random_u64(&random);
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%d files and %ld drawn inputs\n", argc > 2 ? argc - 2 : 0, count);
    return argc > 2 || count > 0 ? 0 : 1;
}
