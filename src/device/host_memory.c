/* Owns the host device's address space and the file that its physical memory lies in.
 * Must not know caps or who asks. */
#include "device/host_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- physical memory ---- */

static rebatch_status open_file(struct rbi_host_file *file)
{
    if (file->descriptor >= 0)
        return REBATCH_OK;
    file->descriptor = memfd_create("rebatch", MFD_CLOEXEC);
    if (file->descriptor < 0)
        return rbi_error(REBATCH_E_DEVICE, "the machine gives no memory file: %s", strerror(errno));
    file->end = (uint64_t)sysconf(_SC_PAGESIZE);
    return REBATCH_OK;
}

rebatch_status rbi_host_file_take(struct rbi_host_file *file, rbi_physical *out, size_t bytes)
{
    const rebatch_status status = open_file(file);
    if (status)
        return status;
    if (ftruncate(file->descriptor, (off_t)(file->end + bytes)) != 0)
        return rbi_error(REBATCH_OOM, "the machine has no room for %zu bytes: %s", bytes,
                         strerror(errno));
    rbi_assert(file->end % (uint64_t)sysconf(_SC_PAGESIZE) == 0);
    *out = file->end;
    file->end += bytes;
    return REBATCH_OK;
}

rebatch_status rbi_host_file_give(struct rbi_host_file *file, rbi_physical physical, size_t bytes)
{
    rbi_assert(file->descriptor >= 0 && physical > 0 && physical + bytes <= file->end);
    if (fallocate(file->descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)physical,
                  (off_t)bytes) != 0)
        return rbi_error(REBATCH_E_DEVICE, "the machine did not take back %zu bytes: %s", bytes,
                         strerror(errno));
    return REBATCH_OK;
}

void rbi_host_file_close(struct rbi_host_file *file)
{
    if (file->descriptor >= 0)
        (void)close(file->descriptor);
    *file = RBI_HOST_FILE_INIT;
}

/* ---- address space ---- */

rebatch_status rbi_host_reserve(void **out, size_t bytes)
{
    void *address =
        mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return rbi_error(REBATCH_OOM, "the machine has no %zu bytes of address space: %s", bytes,
                         strerror(errno));
    *out = address;
    return REBATCH_OK;
}

rebatch_status rbi_host_unreserve(void *address, size_t bytes)
{
    if (munmap(address, bytes) != 0)
        return rbi_error(REBATCH_E_DEVICE, "the machine did not take back the addresses at %p: %s",
                         address, strerror(errno));
    return REBATCH_OK;
}

rebatch_status rbi_host_map(const struct rbi_host_file *file, void *address, size_t bytes,
                            rbi_physical physical)
{
    rbi_assert(file->descriptor >= 0 && physical > 0 && physical + bytes <= file->end);
    if (mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file->descriptor,
             (off_t)physical) != address)
        return rbi_error(REBATCH_OOM, "the machine could not map %zu bytes: %s", bytes,
                         strerror(errno));
    return REBATCH_OK;
}

/* Positions go with a descriptor to another process. */
rebatch_status rbi_host_file_export(const struct rbi_host_file *file, int *fd,
                                    rbi_physical physical)
{
    char path[32];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", file->descriptor);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd >= 0 && lseek(*fd, (off_t)physical, SEEK_SET) == (off_t)physical)
        return REBATCH_OK;
    const rebatch_status status =
        rbi_error(REBATCH_E_UNSUPPORTED, "the machine gives no descriptor of its memory file: %s",
                  strerror(errno));
    if (*fd >= 0)
        (void)close(*fd);
    *fd = -1;
    return status;
}

rebatch_status rbi_host_map_export(void *address, size_t bytes, int fd)
{
    struct stat file;
    const off_t at = lseek(fd, 0, SEEK_CUR);
    if (at < 0 || fstat(fd, &file) != 0 || file.st_size - at < (off_t)bytes)
        return rbi_error(REBATCH_E_INVALID,
                         "fd is %d: expected one of %zu bytes that a host device "
                         "has exported",
                         fd, bytes);
    if (mmap(address, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, at) != address)
        return rbi_error(REBATCH_OOM, "the machine could not map %zu bytes: %s", bytes,
                         strerror(errno));
    return REBATCH_OK;
}

rebatch_status rbi_host_set_access(void *address, size_t bytes)
{
    if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0)
        return rbi_error(REBATCH_OOM, "the machine could not open %zu bytes: %s", bytes,
                         strerror(errno));
    return REBATCH_OK;
}

rebatch_status rbi_host_unmap(void *address, size_t bytes)
{
    /* Nothing behind it, and still ours. */
    if (mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) != address)
        return rbi_error(REBATCH_E_DEVICE, "the machine could not unmap %zu bytes: %s", bytes,
                         strerror(errno));
    return REBATCH_OK;
}
