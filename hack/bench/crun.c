// crun: run the crun of PATH on a bundle whose specification claims a newer OCI version than that crun knows.
//
// containerd 2.4 writes ociVersion 1.3.0, and crun 1.8, which Debian 12 has, refuses everything newer than 1.1. The
// benchmark wants the same crun below containerd and Tripod, so containerd calls this program, which costs it 0.3 ms. The
// version is replaced in place, with one of the same length. CRUN is the path of the real one.
#include <fcntl.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

static void lower_version(const char *bundle) {
	char path[4096], text[8192];
	snprintf(path, sizeof path, "%s/config.json", bundle);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return; // crun reports it
	ssize_t n = pread(fd, text, sizeof text - 1, 0);
	text[n > 0 ? n : 0] = 0;
	char *version = strstr(text, "\"ociVersion\":\"1.");
	if (version) {
		version += strlen("\"ociVersion\":\"");
		if (version[3] == '.' && version[5] == '"' && pwrite(fd, "1.0.2", 5, version - text) != 5)
			perror(path);
	}
	close(fd);
}

int main(int argc, char **argv) {
	for (int i = 1; i + 1 < argc; i++)
		if (!strcmp(argv[i], "--bundle"))
			lower_version(argv[i + 1]);
	execv(CRUN, argv);
	perror(CRUN);
	return 127;
}
