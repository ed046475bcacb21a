#ifndef DESCRIPTORS_H
#define DESCRIPTORS_H

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Send a descriptor to this process, which so gets another number of it. */
static int pass(int fd) {
    int ends[2];
    char control[CMSG_SPACE(sizeof fd)] = {0}, byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) abort();
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    if (sendmsg(ends[0], &message, 0) != 1) abort();
    close(ends[0]);
    if (recvmsg(ends[1], &message, 0) != 1) abort();
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    close(ends[1]);
    return fd;
}

#endif
