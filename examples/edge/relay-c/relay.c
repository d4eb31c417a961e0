// relay: publishes each message from the channel "in" on the channel "out", in capital letters, or unchanged with the argument
// "plain". The message "quit" makes it exit with code 3, "crash" makes it trap.
//
//   tripod edge run relay-c/relay.wasm --channel in=app/in:r --channel out=app/out:w
//
// A channel is a file below /ch: one read is one message, one write is one message. A read waits until there is one.
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LARGEST = 1 << 20 };

static char message[LARGEST];

static int channel(const char *path, int mode) {
    int fd = open(path, mode);
    if (fd < 0) {
        fprintf(stderr, "relay: %s: %s\n", path, strerror(errno));
        _exit(1);
    }
    return fd;
}

int main(int argc, char **argv) {
    int plain = argc > 1 && strcmp(argv[1], "plain") == 0;
    int in = channel("/ch/in", O_RDONLY), out = channel("/ch/out", O_WRONLY);
    fprintf(stderr, "relay: ready\n");
    for (;;) {
        ssize_t n = read(in, message, sizeof message);
        if (n < 0) {
            fprintf(stderr, "relay: read: %s\n", strerror(errno));
            return 1;
        }
        if (n == 0) return 0; // the module must stop
        if (n == 4 && memcmp(message, "quit", 4) == 0) return 3;
        if (n == 5 && memcmp(message, "crash", 5) == 0) __builtin_trap();
        for (ssize_t i = 0; !plain && i < n; i++) message[i] = (char)toupper((unsigned char)message[i]);
        if (write(out, message, (size_t)n) != n) {
            fprintf(stderr, "relay: write: %s\n", strerror(errno));
            return 1;
        }
    }
}
