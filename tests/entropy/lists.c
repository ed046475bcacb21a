/* Lists a folder in the ways of the C library; each must give the same. One line for each name. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST 5000

static char *names[MOST];
static int count;

static void check(int place, const char *name) {
    if (place >= count || strcmp(names[place], name) != 0) {
        printf("%d is %s\n", place, name);
        exit(1);
    }
}

static int only_short(const struct dirent *entry) { return strlen(entry->d_name) < 3; }

/* Longest first, which leaves the order of most names open. */
static int by_length(const struct dirent **one, const struct dirent **other) {
    return (int)strlen((*other)->d_name) - (int)strlen((*one)->d_name);
}

static void rewind_and_seek(DIR *folder) {
    struct dirent entry, *result;
    rewinddir(folder);
    for (int i = 0; i < count / 2; i++) check(i, readdir(folder)->d_name);
    long place = telldir(folder);
    for (int i = count / 2; i < count; i++) {
        if (readdir_r(folder, &entry, &result) != 0 || result != &entry) abort();
        check(i, entry.d_name);
    }
    if (readdir_r(folder, &entry, &result) != 0 || result) abort();
    seekdir(folder, place);
    check(count / 2, readdir64(folder)->d_name);
}

static void scan(const char *path) {
    struct dirent **entries;
    if (scandir(path, &entries, NULL, NULL) != count) abort();
    for (int i = 0; i < count; i++) check(i, entries[i]->d_name);
    int found = scandir(path, &entries, only_short, by_length);
    if (found < 3) abort();
    for (int i = 1; i < found; i++)
        if (strlen(entries[i - 1]->d_name) == strlen(entries[i]->d_name) &&
            strcmp(entries[i]->d_name, "..") != 0 && strcmp(entries[i - 1]->d_name, "..") != 0 &&
            strcmp(entries[i - 1]->d_name, entries[i]->d_name) > 0)
            abort();
    if (scandir("/none", &entries, NULL, NULL) != -1 || errno != ENOENT) abort();
}

int main(int argument_count, char **arguments) {
    struct dirent *entry;
    struct stat one, other;
    if (argument_count != 2) return 2;
    DIR *folder = opendir(arguments[1]);
    errno = 0;
    while ((entry = readdir(folder)) && count < MOST) {
        names[count++] = strdup(entry->d_name);
        puts(entry->d_name);
    }
    if (errno != 0 || readdir(folder)) abort();
    if (fstat(dirfd(folder), &one) != 0 || stat(arguments[1], &other) != 0) abort();
    if (one.st_ino != other.st_ino) abort();
    rewind_and_seek(folder);
    if (closedir(folder) != 0) abort();
    folder = fdopendir(open(arguments[1], O_RDONLY | O_DIRECTORY));
    for (int i = 0; i < count; i++) check(i, readdir64(folder)->d_name);
    if (closedir(folder) != 0) abort();
    scan(arguments[1]);
    if (opendir("/none") || errno != ENOENT || fdopendir(0) || errno == ENOENT) abort();
    return 0;
}
