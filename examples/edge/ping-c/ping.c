// ping N [BYTES]: publishes a message on the channel "out" and waits for it to come back on the channel "in", N times. Then it
// logs the time for one way: half of the round trip, in nanoseconds. `relay plain` is the other side.
//
// ping flood N BYTES BATCH: publishes N messages. At most two batches are in flight: before each further one, it waits for a
// message on the channel "in", by which the other side acknowledges a batch.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 1 << 20 };

static char message[LARGEST], answer[LARGEST];

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int flood(int out, int in, int n, int size, int batch) {
    for (int i = 0; i < n; i++) {
        if (i >= 2 * batch && i % batch == 0 && read(in, answer, sizeof answer) <= 0) return 1;
        if (write(out, message, (size_t)size) != size) {
            fprintf(stderr, "ping: message %d: %s\n", i, strerror(errno));
            return 1;
        }
    }
    while (read(in, answer, sizeof answer) > 0) continue; // until the module is stopped
    return 0;
}

int main(int argc, char **argv) {
    int flooding = argc > 1 && strcmp(argv[1], "flood") == 0;
    argc -= flooding, argv += flooding;
    int n = argc > 1 ? atoi(argv[1]) : 1000, size = argc > 2 ? atoi(argv[2]) : 64, batch = argc > 3 ? atoi(argv[3]) : n;
    int in = open("/ch/in", O_RDONLY), out = open("/ch/out", O_WRONLY);
    int64_t *took = calloc((size_t)(n > 0 ? n : 1), sizeof *took);
    if (in < 0 || out < 0 || n < 1 || batch < 1 || size < 1 || size > LARGEST || took == NULL) {
        fprintf(stderr, "ping: usage: ping N [BYTES], with the channels in and out (%s)\n", strerror(errno));
        return 2;
    }
    memset(message, 'x', (size_t)size);
    if (flooding) return flood(out, in, n, size, batch);
    for (int i = 0; i < n; i++) {
        int64_t begin = now();
        if (write(out, message, (size_t)size) != size || read(in, answer, sizeof answer) != size) {
            fprintf(stderr, "ping: message %d: %s\n", i, strerror(errno));
            return 1;
        }
        took[i] = (now() - begin) / 2;
    }
    qsort(took, (size_t)n, sizeof *took, ascending);
    printf("one way: n %d bytes %d p50 %lld p99 %lld max %lld ns\n", n, size, (long long)took[n / 2],
           (long long)took[(int)((int64_t)n * 99 / 100)], (long long)took[n - 1]);
    return 0;
}
